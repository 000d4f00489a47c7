"""A sound container and everything that a bad wire does to it: cut, flipped, replaced."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire
from thinwire.codec import zstd
from thinwire.codec.delta import Delta
from thinwire.codec.write import Pair, write_delta
from thinwire.errors import ApplyError, BaseMismatch, FormatError, NotFound, Truncated

from .making import INSTRUCTION_SETS, flipped_bits
from .sample_delta import BASE, NEW, PAYLOAD, READERS, decode_all, list_changes
from .writer import pack, unpack, with_sections


def assert_new(found: dict[str, np.ndarray], *, whole: bool = True) -> None:
    """Exactly the new bits."""
    for name, bits in found.items():
        assert bits.tobytes() == NEW[name].tobytes()
    if whole:
        assert found.keys() == NEW.keys()


def test_the_sample_has_every_kind() -> None:
    inspection = thinwire.inspect(PAYLOAD)
    assert {entry.kind for entry in inspection.tensors} == {"delta", "same", "full", "removed"}
    methods = {method for entry in inspection.tensors for method in entry.methods}
    assert methods >= {"class", "raw"}
    assert {entry.kind for entry in inspection.attachments} == {"header", "file"}
    assert len(inspection.group_bytes) > 1
    assert any(entry.group is None and entry.kind == "delta" for entry in inspection.tensors)
    assert_new(decode_all(PAYLOAD))
    assert_new(list_changes(PAYLOAD), whole=False)


def test_the_test_writer_agrees() -> None:
    plain, stored_bytes = unpack(PAYLOAD), int.from_bytes(PAYLOAD[12:16], "little")
    index = msgspec.json.encode(plain.index)
    stored = PAYLOAD[40 : 40 + stored_bytes]
    assert pack(index, plain.digests, plain.sections, stored=stored) == PAYLOAD
    assert_new(decode_all(pack(*plain)))


def test_every_prefix_is_truncated() -> None:
    for size in range(len(PAYLOAD)):
        for read in (thinwire.inspect, decode_all):
            with pytest.raises(Truncated):
                read(PAYLOAD[:size])


def test_every_prefix_of_a_file_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "delta.tw"
    for size in range(0, len(PAYLOAD), 7):
        path.write_bytes(PAYLOAD[:size])
        with pytest.raises(Truncated, match=r"delta\.tw"):
            thinwire.inspect(path)
    with pytest.raises(NotFound):
        thinwire.inspect(tmp_path / "missing.tw")


def test_bytes_that_follow_are_an_error() -> None:
    with pytest.raises(FormatError):
        thinwire.inspect(PAYLOAD + b"\0")


def test_every_flipped_bit_is_an_error() -> None:
    for damaged in flipped_bits(PAYLOAD):
        with pytest.raises(FormatError):
            thinwire.inspect(damaged)
        with pytest.raises(FormatError):
            decode_all(damaged)


def test_flipped_bits_of_the_sections_behind_a_right_trailer_never_give_wrong_weights() -> None:
    # As if the trailer had been made after the damage: the tensors' own digests find it. A few
    # bits mean nothing (the last ones of a range coder's number), and the weights come out right.
    sections = unpack(PAYLOAD).sections
    harmless = 0
    for damaged in flipped_bits(sections):
        payload = with_sections(PAYLOAD, damaged)
        thinwire.inspect(payload)
        _is_error_or_right(list_changes, payload)
        harmless += _is_error_or_right(decode_all, payload)
    assert harmless < 8 * len(sections) // 10


def _is_error_or_right(read: Callable[[bytes], dict[str, np.ndarray]], payload: bytes) -> bool:
    try:
        found = read(payload)
    except (FormatError, ApplyError):
        return False
    assert_new(found, whole=False)
    return True


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_random_sections_never_give_wrong_weights(data: st.DataObject) -> None:
    sections = bytearray(unpack(PAYLOAD).sections)
    start = data.draw(st.integers(0, len(sections) - 1))
    size = data.draw(st.integers(1, len(sections) - start))
    sections[start : start + size] = data.draw(st.binary(min_size=size, max_size=size))
    payload = with_sections(PAYLOAD, bytes(sections))
    for read in READERS:
        _is_error_or_right(read, payload)


@pytest.mark.parametrize("name", [name for name in BASE if name in NEW])
def test_decode_into_is_all_or_nothing(name: str) -> None:
    # Every damage that the kernel itself must find, in place, on each kind of tensor.
    dtype = next(e.dtype for e in thinwire.inspect(PAYLOAD).tensors if e.name == name)
    payload = _single(name, dtype)
    sections = unpack(payload).sections
    damages = [with_sections(payload, damaged) for damaged in flipped_bits(sections)]
    rng = np.random.default_rng(8)
    damages += [with_sections(payload, rng.bytes(len(sections))) for _ in range(100)]
    failures = [_failure(BASE[name], NEW[name], damaged) for damaged in damages]
    assert len([error for error in failures if isinstance(error, FormatError)]) >= len(sections)
    # A raw chunk holds the new bits whole, and so gives them on any base.
    raw = "raw" in thinwire.inspect(payload).tensors[0].methods
    error = _failure(BASE[name] ^ np.uint8(1), NEW[name], payload)
    assert isinstance(error, BaseMismatch) or raw or NEW[name].size == 0
    assert _failure(BASE[name], NEW[name], payload) is None


def _failure(base: np.ndarray, new: np.ndarray, payload: bytes) -> Exception | None:
    """What decode_into raised; the base then is as it was, else it is the new tensor."""
    own = base.copy()
    try:
        _decode_into(own, payload)
    except (FormatError, ApplyError) as error:
        assert own.tobytes() == base.tobytes()
        return error
    assert own.tobytes() == new.tobytes()
    return None


def _single(name: str, dtype: str) -> bytes:
    out = io.BytesIO()
    width = {"BF16": 2, "F32": 4, "I64": 8, "F64": 8, "U8": 1}[dtype]
    shape = (BASE[name].size // width,)
    write_delta(out, [Pair("", dtype, shape, BASE[name], NEW[name])])
    return out.getvalue()


def _decode_into(base: np.ndarray, payload: bytes) -> None:
    width = {"BF16": 2, "F32": 4, "I64": 8, "F64": 8, "U8": 1}
    dtype = thinwire.inspect(payload).tensors[0].dtype
    thinwire.decode_into(base.view(f"<u{width[dtype]}"), payload)


def test_in_place_is_all_or_nothing_over_all_tensors() -> None:
    base = {name: bits for name, bits in BASE.items() if name in NEW}
    shapes = {entry.name: entry for entry in thinwire.inspect(PAYLOAD).tensors}
    out = io.BytesIO()
    write_delta(out, [Pair(n, shapes[n].dtype, shapes[n].shape, base[n], NEW[n]) for n in base])
    payload = out.getvalue()
    outcomes = set()
    for damaged in flipped_bits(unpack(payload).sections):
        own = {name: bits.copy() for name, bits in base.items()}
        with Delta.open(with_sections(payload, damaged)) as delta:
            try:
                delta.apply_in_place(own)
            except FormatError:
                expected = base
            else:
                expected = NEW
        assert all(own[name].tobytes() == expected[name].tobytes() for name in base)
        outcomes.add(expected is base)
    assert True in outcomes


def test_in_place_names_the_base_that_is_wrong() -> None:
    rng = np.random.default_rng(7)
    base = {name: rng.integers(0, 1 << 16, 500, "<u2") for name in "abc"}
    new = {name: values ^ (rng.random(500) < 0.02) for name, values in base.items()}
    payload = thinwire.encode_tensors(base, new)
    for wrong in base:
        own = {name: values.copy().view(np.uint8) for name, values in base.items()}
        own[wrong][7] ^= 1
        before = {name: bits.tobytes() for name, bits in own.items()}
        with Delta.open(payload) as delta:
            with pytest.raises(BaseMismatch) as caught:
                delta.apply_in_place(own)
            assert caught.value.context["tensor"] == wrong
            assert {name: bits.tobytes() for name, bits in own.items()} == before
            with pytest.raises(BaseMismatch) as caught:
                delta.apply(own, lambda entry: np.empty(entry.byte_count, np.uint8))
            assert caught.value.context["tensor"] == wrong


def test_decode_into_undoes_chunks_that_were_sound() -> None:
    # The damage lies in the second chunk, after the first was overwritten and hashed.
    rng = np.random.default_rng(3)
    base = rng.integers(0, 1 << 16, (1 << 20) + 5000, "<u2")
    new = base + (rng.random(base.size) < 0.01).astype("<u2")
    payload = thinwire.encode(base, new, dtype="BF16")
    sections = unpack(payload).sections
    second = unpack(payload).index["tensors"][0]["sizes"][0]
    for at in (0, 1, 2, second - 1, second, second + 1, second + 2, len(sections) - 1):
        damaged = bytearray(sections)
        damaged[at] ^= 0x55
        own = base.copy()
        with pytest.raises(FormatError):
            thinwire.decode_into(own, with_sections(payload, bytes(damaged)))
        assert np.array_equal(own, base)
    thinwire.decode_into(base, payload)
    assert np.array_equal(base, new)


def test_same_bytes_for_any_workers_and_instruction_set() -> None:
    rng = np.random.default_rng(6)
    base = {
        "large": rng.integers(0, 1 << 16, 3 * (1 << 20) + 17, "<u2"),
        "floats": rng.standard_normal(100_000).astype("<f4"),
        "ids": np.arange(200_000),
        **{f"small.{n}": rng.integers(0, 1 << 16, 400 * n, "<u2") for n in range(40)},
    }
    new = {name: values.copy() for name, values in base.items()}
    for values in new.values():
        values[rng.random(values.size) < 0.003] += 1
    new["added"] = np.ones(70_000, np.float32)
    expected = thinwire.encode_tensors(base, new)
    for workers in (2, 4):
        assert thinwire.encode_tensors(base, new, workers=workers) == expected
    for instructions in INSTRUCTION_SETS:
        spec = thinwire.Spec(instructions=instructions)
        assert thinwire.encode_tensors(base, new, spec=spec) == expected
    for workers in (1, 4):
        found = thinwire.decode_tensors(base, expected, workers=workers)
        assert {name: bits.tobytes() for name, bits in found.items()} == {
            name: values.tobytes() for name, values in new.items()
        }


@pytest.mark.parametrize("level", range(1, 20))
def test_frames_of_every_level_fit_the_window_that_is_accepted(level: int) -> None:
    data = bytes(1 << 24) + b"x"
    assert zstd.decompress(zstd.compress(data, level), len(data), "data") == data


def test_a_delta_from_a_file_is_the_one_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "delta.tw"
    path.write_bytes(PAYLOAD)
    assert thinwire.inspect(path) == thinwire.inspect(PAYLOAD)
    assert thinwire.inspect(str(path)) == thinwire.inspect(bytearray(PAYLOAD))
