"""Whole dictionaries of tensors: kept, changed, added, removed, reshaped, retyped."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire
from thinwire.codec.delta import Delta
from thinwire.errors import BaseMismatch, InvalidArgument, TensorMismatch

DTYPES = [
    np.dtype(name)
    for name in [
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        *["float16", "float32", "float64", "complex64", "int8", "uint16", "int32", "int64", "bool"],
    ]
]
NAMES = [
    "",
    "w",
    "model.layers.0.q",
    "a/b",
    "..",
    "\u00e9",
    "e\u0301",
    "x" * 300,
    "\0",
    "__metadata__",
]
SHAPES = [(), (0,), (1,), (7,), (16, 9), (3, 0), (2, 3, 4), (400,), (70, 1000)]

Arrays = dict[str, np.ndarray]


def random_array(
    rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray:
    """Random bits, or values near zero, as weights are."""
    if dtype == np.dtype(bool):
        return rng.random(shape) < 0.5
    if rng.random() < 0.5 and dtype.kind not in "iu":
        return (rng.standard_normal(shape) / 50).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def changed(rng: np.random.Generator, old: np.ndarray, share: float) -> np.ndarray:
    """Some elements with other low bits."""
    new = np.array(old, order="C", copy=True)
    raw = new.reshape(-1).view(np.uint8).reshape(-1, old.dtype.itemsize)
    raw[rng.random(len(raw)) < share, 0] ^= 1
    return new


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Arrays, Arrays]:
    """Base and new."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base: Arrays = {}
    new: Arrays = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=8)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from(SHAPES))
        old = random_array(rng, dtype, shape)
        fate = draw(
            st.sampled_from(["kept", "few", "some", "all", "new", "gone", "reshaped", "retyped"])
        )
        if fate != "new":
            base[name] = old
        if fate in ("kept", "few", "some", "all"):
            new[name] = changed(rng, old, {"kept": 0, "few": 0.004, "some": 0.1, "all": 1}[fate])
        elif fate == "reshaped":
            new[name] = random_array(rng, dtype, (*shape, 2))
        elif fate == "retyped":
            new[name] = random_array(rng, draw(st.sampled_from(DTYPES)), shape)
        elif fate == "new":
            new[name] = old
    order = draw(st.permutations(list(new)))
    return base, {name: new[name] for name in order}


def bits(arrays: Arrays) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}


@given(checkpoints(), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_round_trip(pair: tuple[Arrays, Arrays], workers: int) -> None:
    base, new = pair
    before = bits(base)
    payload = thinwire.encode_tensors(base, new, workers=workers)
    assert payload == thinwire.encode_tensors(base, new)
    found = thinwire.decode_tensors(base, payload, workers=workers)
    assert bits(found) == bits(new)
    assert list(found) == list(new)
    assert bits(base) == before
    assert_described(base, new, payload)


def assert_described(base: Arrays, new: Arrays, payload: bytes) -> None:
    """What inspect says, tensor by tensor."""
    inspection = thinwire.inspect(payload)
    entries = {entry.name: entry for entry in inspection.tensors}
    assert entries.keys() == base.keys() | new.keys()
    for name, entry in entries.items():
        if name not in new:
            assert entry.kind == "removed"
            continue
        array = new[name]
        assert entry.shape == array.shape
        assert entry.byte_count == array.nbytes
        old = base.get(name)
        if old is None or (old.dtype, old.shape) != (array.dtype, array.shape):
            assert entry.kind == "full"
            continue
        word_bytes = 4 if array.dtype == np.dtype("complex64") else array.dtype.itemsize
        rows = [np.frombuffer(a.tobytes(), f"V{word_bytes}") for a in (old, array)]
        assert entry.changed_count == int((rows[0] != rows[1]).sum())
        assert entry.kind == ("delta" if entry.changed_count else "same")
    # Random words may cost more than they hold by the index alone; never by more than it.
    assert len(payload) <= inspection.raw_bytes + 1000 + 600 * len(entries)


@given(checkpoints())
@settings(max_examples=30, deadline=None)
def test_changes(pair: tuple[Arrays, Arrays]) -> None:
    base, new = pair
    payload = thinwire.encode_tensors(base, new)
    own = {name: np.frombuffer(data, np.uint8).copy() for name, data in bits(base).items()}
    with Delta.open(payload) as delta:
        both = [e.name for e in delta.tensors.values() if e.kind in ("delta", "same")]
        for change in delta.changes(own):
            words = own[change.name].reshape(-1, change.words.size // change.positions.size)
            words[change.first_word + change.positions] = change.words.reshape(
                change.positions.size, -1
            )
    for name in both:
        assert own[name].tobytes() == new[name].tobytes()


@given(checkpoints())
@settings(max_examples=30, deadline=None)
def test_in_place(pair: tuple[Arrays, Arrays]) -> None:
    base, new = pair
    before = bits(base)
    own = {name: np.frombuffer(data, np.uint8).copy() for name, data in before.items()}
    with Delta.open(thinwire.encode_tensors(base, new)) as delta:
        if any(entry.kind in ("full", "removed") for entry in delta.tensors.values()):
            with pytest.raises(InvalidArgument):
                delta.apply_in_place(own)
            assert bits(own) == before
        else:
            delta.apply_in_place(own)
            assert bits(own) == bits(new)


@given(checkpoints(), st.data())
@settings(max_examples=30, deadline=None)
def test_a_base_that_differs_is_never_taken(
    pair: tuple[Arrays, Arrays], data: st.DataObject
) -> None:
    base, new = pair
    kept = [
        name
        for name in base.keys() & new.keys()
        if base[name].size
        and (base[name].dtype, base[name].shape) == (new[name].dtype, new[name].shape)
    ]
    payload = thinwire.encode_tensors(base, new)
    if not kept:
        return
    name = data.draw(st.sampled_from(sorted(kept)))
    with pytest.raises(TensorMismatch):
        thinwire.decode_tensors({n: a for n, a in base.items() if n != name}, payload)
    raw = bytearray(base[name].tobytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    wrong = {**base, name: np.frombuffer(bytes(raw), np.uint8)}
    try:
        found = thinwire.decode_tensors(wrong, payload)
    except BaseMismatch as error:
        assert name in str(error) or error.context["tensor"] == name  # noqa: PT017
    else:  # a raw chunk does not need its base
        assert bits(found) == bits(new)


def test_names_are_names_and_nothing_else() -> None:
    base = {name: np.arange(3) for name in NAMES}
    new = {name: np.arange(3) + 1 for name in NAMES}
    found = thinwire.decode_tensors(base, thinwire.encode_tensors(base, new))
    assert bits(found) == bits(new)


def test_a_name_that_is_too_long_is_refused() -> None:
    array = np.zeros(3)
    thinwire.encode_tensors({"x" * 1024: array}, {"x" * 1024: array})
    for name in ("x" * 1025, "\u20ac" * 342):
        with pytest.raises(InvalidArgument):
            thinwire.encode_tensors({name: array}, {name: array})


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_out_of_range_are_refused(workers: int) -> None:
    payload = thinwire.encode_tensors({}, {})
    with pytest.raises(InvalidArgument):
        thinwire.encode_tensors({}, {}, workers=workers)
    with pytest.raises(InvalidArgument):
        thinwire.decode_tensors({}, payload, workers=workers)


def test_nothing_at_all() -> None:
    payload = thinwire.encode_tensors({}, {})
    assert thinwire.decode_tensors({}, payload) == {}
    assert thinwire.inspect(payload).tensors == []


def test_random_bits_grow_by_less_than_a_thousandth() -> None:
    rng = np.random.default_rng(0)
    base, new = ({"w": rng.integers(0, 1 << 16, 1 << 21, "<u2")} for _ in range(2))
    assert len(thinwire.encode_tensors(base, new)) <= new["w"].nbytes * 1.001
