"""Words exchanged in place: exactly those, and back."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any
from unittest import mock

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: scattering was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import TensorMismatch
from thinwire.torch import scatter
from thinwire.torch.index_map import IndexMap
from thinwire.torch.live import Parameter, converted, parameters_of, torch_dtype
from thinwire.torch.scatter import Change, LiveModel

from .layouts import NAMES, WORDS, random_bits, words_of

DTYPES = sorted(set(NAMES.values()) - {"BOOL"})


def whole(tensor: torch.Tensor) -> tuple[LiveModel, str]:
    """A model of one parameter that is one tensor."""
    dtype, count = NAMES[tensor.dtype], tensor.numel()
    parameters, refused = parameters_of([("p", tensor)])
    assert not refused
    row = np.array([[0, 0, 0, 0, count, 1, 1, 1, 1]], np.int64)
    found = IndexMap({"t": (dtype, count)}, {"p": (dtype, count)}, row, {})
    return LiveModel(parameters, found), dtype


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 60),
    st.sampled_from([1 << 31, 7, 1]),
    st.sampled_from([1 << 20, 5, 1]),
    st.integers(0, 2**32 - 1),
)
def test_twice_is_as_before(dtype: str, count: int, window: int, piece: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensor, new = random_bits(rng, dtype, (count,)), random_bits(rng, dtype, (count,))
    old = tensor.clone()
    live, _ = whole(tensor)
    at = np.flatnonzero(rng.random(count) < 0.4).astype(np.int64)
    wanted = words_of(old).copy()
    wanted[at] = words_of(new)[at]
    with mock.patch.object(scatter, "_WINDOW", window), mock.patch.object(scatter, "_PIECE", piece):
        swap = live.prepare([Change("t", at, words_of(new)[at])])
        assert swap.word_count == at.size
        assert words_of(tensor).tolist() == words_of(old).tolist()
        is_same = words_of(old).tolist() == wanted.tolist()
        assert swap.holds_new() == is_same
        swap.swap()
        assert words_of(tensor).tolist() == wanted.tolist()
        assert swap.holds_new()
        differing = live.differences("t", words_of(old))
        assert differing.tolist() == np.flatnonzero(wanted != words_of(old)).tolist()
        assert live.differences("t", wanted).size == 0
        swap.swap()
        assert words_of(tensor).tolist() == words_of(old).tolist()
        assert swap.holds_new() == is_same


def test_places_outside_are_refused() -> None:
    live, _ = whole(torch.zeros(5))
    for at in ([5], [0, 7], [-1]):
        change = Change("t", np.array(at, np.int64), np.zeros(len(at), np.uint32))
        with pytest.raises(TensorMismatch, match="outside"):
            live.prepare([change])


def test_another_model_is_refused() -> None:
    live, _ = whole(torch.zeros(5))
    for other in (torch.zeros(6), torch.zeros(5, dtype=torch.bfloat16)):
        with pytest.raises(TensorMismatch, match="not those"):
            LiveModel(parameters_of([("p", other)])[0], live.index_map)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"]),
    st.sampled_from(["BF16", "F16", "F32", "F64"]),
    st.integers(0, 50),
    st.integers(0, 2**32 - 1),
)
def test_converted_is_what_copy_makes(source: str, target: str, count: int, seed: int) -> None:
    value = random_bits(np.random.default_rng(seed), source, (count,))
    held = torch.zeros(count, dtype=torch_dtype(target))
    held.copy_(value)
    found = converted(words_of(value), source, target)
    differ = found != words_of(held)
    assert bool(held[torch.from_numpy(differ)].double().isnan().all())


@settings(max_examples=100, deadline=None)
@given(
    st.permutations([0, 1, 2]), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.booleans()
)
def test_dense_parameters_are_seen_in_the_order_of_memory(
    order: list[int], shape: list[int], is_cut: bool
) -> None:
    count = int(np.prod(shape))
    memory = torch.arange(count + 6, dtype=torch.float32)
    tensor = memory[3 : 3 + count].reshape(shape).permute(order)
    if is_cut:
        tensor = tensor[..., ::2]
    parameters, refused = parameters_of([("p", tensor)])
    inside = memory[3 : 3 + count]
    if tensor.numel() == count:
        assert parameters["p"].flat.view(torch.float32).tolist() == inside.tolist()
        assert parameters["p"].flat.data_ptr() == tensor.data_ptr()
    elif not refused:
        # What is left begins with the first element and has no gap.
        assert parameters["p"].flat.view(torch.float32).tolist() == sorted(
            tensor.reshape(-1).tolist()
        )


def test_what_cannot_be_seen_flat() -> None:
    memory = torch.zeros(4, 4)
    seen, refused = parameters_of(
        [
            ("gaps", memory[:, :3]),
            ("expanded", torch.zeros(1).expand(9)),
            ("complex", torch.zeros(3, dtype=torch.complex64)),
            ("none", torch.zeros(0)),
            ("one", torch.zeros(1)),
            ("scalar", torch.tensor(1.0)),
        ]
    )
    assert refused.keys() == {"gaps", "expanded", "complex"}
    assert seen.keys() == {"one", "scalar"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=6))
def test_no_memory_is_seen_twice(spans: list[tuple[int, int]]) -> None:
    memory = torch.zeros(16, dtype=torch.bfloat16)
    named = [(f"p{n}", memory[start : start + count]) for n, (start, count) in enumerate(spans)]
    seen, refused = parameters_of(named)
    covered: list[int] = []
    for name, parameter in seen.items():
        start, count = spans[int(name[1:])]
        assert parameter.count == count
        covered += range(start, start + count)
    assert len(covered) == len(set(covered))
    for number, (start, count) in enumerate(spans):
        if f"p{number}" not in seen and f"p{number}" not in refused:
            assert {*range(start, start + count)} <= {*covered}


def test_parameters_keep_their_order_and_first_names() -> None:
    memory = torch.zeros(8)
    named = [("z", memory), ("a", memory), ("m", torch.zeros(2)), ("part", memory[2:4])]
    seen, refused = parameters_of(named)
    assert [*seen] == ["z", "m"]
    assert not refused


def test_a_device_goes_another_way() -> None:
    """The code for accelerators, on the CPU."""
    rng = np.random.default_rng(1)
    for dtype in DTYPES:
        tensor, new = random_bits(rng, dtype, (20,)), random_bits(rng, dtype, (20,))
        old = words_of(tensor).copy()
        with mock.patch.object(Parameter, "is_on_cpu", False):
            live, _ = whole(tensor)
            at = np.array([1, 5, 19], np.int64)
            swap = live.prepare([Change("t", at, words_of(new)[at])])
        assert not swap.holds_new()
        swap.swap()
        wanted = old.copy()
        wanted[at] = words_of(new)[at]
        assert words_of(tensor).tolist() == wanted.tolist()
        assert swap.holds_new()
        swap.swap()
        assert words_of(tensor).tolist() == old.tolist()
        assert WORDS[tensor.element_size()].itemsize == tensor.element_size()


def test_a_swap_that_fails_on_the_way_exchanges_nothing() -> None:
    first, second = torch.zeros(6), torch.zeros(6)
    rows = np.array([[0, 0, 0, 0, 6, 1, 1, 1, 1], [0, 1, 0, 0, 6, 1, 1, 1, 1]], np.int64)
    found = IndexMap({"t": ("F32", 6)}, {"a": ("F32", 6), "b": ("F32", 6)}, rows, {})
    parameters = parameters_of([("a", first), ("b", second)])[0]
    with mock.patch.object(Parameter, "is_on_cpu", False):
        change = Change("t", np.arange(6, dtype=np.int64), words_of(torch.ones(6)))
        swap = LiveModel(parameters, found).prepare([change])
    real, calls = scatter._Device.swap, []

    def fails(device: scatter._Device) -> None:
        calls.append(device)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        real(device)

    with mock.patch.object(scatter._Device, "swap", fails), pytest.raises(RuntimeError):
        swap.swap()
    assert not swap.is_swapped
    assert first.tolist() == second.tolist() == [0] * 6
    swap.swap()
    assert swap.is_swapped
    assert first.tolist() == second.tolist() == [1] * 6


def test_the_same_word_for_every_copy() -> None:
    rows = np.array([[0, 0, 0, 0, 6, 1, 1, 1, 1], [0, 1, 2, 1, 3, 1, 1, 1, 1]], np.int64)
    first, second = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(5)
    parameters: dict[str, Any] = parameters_of([("a", first), ("b", second)])[0]
    found = IndexMap({"t": ("BF16", 6)}, {"a": ("BF16", 6), "b": ("F32", 5)}, rows, {})
    new = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.bfloat16)
    swap = LiveModel(parameters, found).prepare(
        [Change("t", np.arange(6, dtype=np.int64), words_of(new))]
    )
    swap.swap()
    assert swap.word_count == 9
    assert first.tolist() == [1, 2, 3, 4, 5, 6]
    assert second.tolist() == [0, 3, 4, 5, 0]
