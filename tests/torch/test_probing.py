"""Where elements went is found out from any loader that moves them, and never guessed."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: probing was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import EngineError
from thinwire.torch import probing
from thinwire.torch.index_map import IndexMap
from thinwire.torch.live import parameters_of
from thinwire.torch.probing import Alphabet, Prober
from thinwire.torch.scatter import LiveModel

from .layouts import (
    HONEST,
    LYING,
    Engine,
    bits,
    changes,
    content,
    copied,
    copy_to,
    engines,
    loaded,
    state,
    stepped,
    weights_like,
    with_gaps,
)

SLOW = settings(max_examples=60, deadline=None)


def probed(engine: Engine) -> tuple[IndexMap, LiveModel]:
    parameters, _ = parameters_of(engine.tensors().items())
    found = Prober(parameters, engine.catalog, engine.load_weights).find()
    return found, LiveModel(parameters, found)


@contextmanager
def few_digits(piece: int, even: int, odd: int) -> Iterator[None]:
    """Small pieces, and so few digits that even tiny models need many passes."""
    with ExitStack() as stack:
        put = lambda *what: stack.enter_context(mock.patch.object(probing, *what))  # noqa: E731
        put("_PIECE", piece)
        put("WIDE", Alphabet(0x0080, even, odd))
        put("NARROW", Alphabet((127 - 14) << 7, min(even, 2048), min(odd, 1792)))
        small = {
            name: Alphabet(alphabet.lowest, min(even, alphabet.even), min(odd, alphabet.odd))
            for name, alphabet in probing._ALPHABETS.items()
        }
        put("_ALPHABETS", small)
        yield


def check_swaps(engine: Engine, rng: np.random.Generator, found: IndexMap, live: LiveModel) -> None:
    """What is placed follows exactly, bit for bit; what is refused is left alone."""
    old = content(engine, rng)
    new, places = stepped(old, rng, 0.3)
    engine.load_weights(old.items())
    before = state(engine)
    # Any bits go through a loader; of casts, torch makes NaNs as it likes.
    wanted = loaded(engine, new)
    swap = live.prepare(changes(new, places))
    swap.swap()
    assert swap.holds_new()
    after = state(engine)
    names = {name for name in found.parameters if name not in found.refused}
    for name in names:
        same_but_nans(engine, name, after[name], wanted[name])
    for name in before.keys() - names:
        if name in found.refused:
            assert after[name] == before[name]
    swap.swap()
    assert state(engine) == before


def same_but_nans(engine: Engine, name: str, one: bytes, other: bytes) -> None:
    if one == other:
        return
    tensor = engine.part(name)
    casts = {dtype for dtype, _ in engine.catalog.values()}
    assert len(casts) > 1, f"{name} differs"
    a, b = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
        for data in (one, other)
    )
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differ = a.view(word) != b.view(word)
    assert bool((a[differ].float().isnan() & b[differ].float().isnan()).all()), f"{name} differs"


@SLOW
@given(
    engines(),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1 << 17, 1 << 14, 16128), (1, 8, 8), (7, 4, 12), (64, 16, 5), (3, 64, 60)]),
)
def test_every_honest_loader_is_placed(
    engine: Engine, seed: int, digits: tuple[int, int, int]
) -> None:
    with few_digits(*digits):
        found, live = probed(engine)
    assert not found.refused
    check_swaps(engine, np.random.default_rng(seed), found, live)


@SLOW
@given(
    engines([*HONEST, *LYING, *LYING, *LYING]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1 << 17, 64, 7]),
)
def test_what_transforms_is_refused(engine: Engine, seed: int, piece: int) -> None:
    with mock.patch.object(probing, "_PIECE", piece):
        found, live = probed(engine)
    assert found.refused.keys() == engine.transformed
    assert all(
        any(reason in why for reason in ("transforms", "writes", "pieces"))
        for why in found.refused.values()
    )
    check_swaps(engine, np.random.default_rng(seed), found, live)


def many(count: int, factor: float) -> Engine:
    """So many tensors that scaled digits spell other elements."""
    engine = Engine()
    for number in range(count):
        name = f"w{number}"
        # What is loaded doubled spells elements of later tensors, which are longer.
        count = 300 + 2 * number
        engine.hold(name, torch.zeros(count, dtype=torch.bfloat16))

        def write(engine: Engine, value: torch.Tensor, name: str = name) -> None:
            engine.part(name).copy_(value.float() * factor)

        engine.take(name, "BF16", (count,), write)
    return engine


@pytest.mark.parametrize("factor", [2.0, 4.0, 0.5])
def test_a_power_of_two_spells_other_elements(factor: float) -> None:
    engine = many(200, factor)
    found, _ = probed(engine)
    assert found.refused.keys() == engine.tensors().keys()
    assert len(found.runs) == 0


def test_a_widened_float8_spells_elements_of_another() -> None:
    engine = Engine()
    engine.hold("big", torch.zeros(40000, dtype=torch.bfloat16))
    engine.take("big", "BF16", (40000,), copy_to("big"))
    engine.hold("w", torch.zeros(20, dtype=torch.bfloat16))
    engine.take("w", "F8_E4M3", (20,), copy_to("w"))
    found, _ = probed(engine)
    assert found.refused.keys() == {"w"}
    assert found.held_count("big") == 40000


@pytest.mark.parametrize("dtype", [torch.float64])
def test_one_element_of_a_dtype_without_digits(dtype: torch.dtype) -> None:
    engine = Engine()
    engine.hold("w", torch.zeros(1, dtype=dtype))
    engine.take("w", "BF16", (1,), copy_to("w"))
    for number in range(40):
        engine.hold(f"more{number}", torch.zeros(9, dtype=torch.bfloat16))
        engine.take(f"more{number}", "BF16", (9,), copy_to(f"more{number}"))
    # Three passes: the first and the last digit of the first element are the same.
    with few_digits(1 << 17, 8, 8):
        found, _ = probed(engine)
    assert found.refused.keys() == {"w"}


def test_integers_that_only_some_values_show_in() -> None:
    engine = Engine()
    engine.hold("w", torch.zeros(900, dtype=torch.int16))
    engine.take("w", "BF16", (900,), copy_to("w", lambda t: t))
    found, _ = probed(engine)
    assert found.refused.keys() == {"w"}


def test_a_parameter_in_too_many_pieces_is_refused() -> None:
    engine = Engine()
    order = torch.from_numpy(np.random.default_rng(1).permutation(4096))
    engine.hold("w", torch.zeros(4096, dtype=torch.bfloat16))
    engine.hold("v", torch.zeros(4096, dtype=torch.bfloat16))

    def write(engine: Engine, value: torch.Tensor) -> None:
        engine.part("w").copy_(value[order])

    engine.take("w", "BF16", (4096,), write)
    engine.take("v", "BF16", (4096,), copy_to("v"))
    found, _ = probed(engine)
    assert "pieces" in found.refused["w"]
    assert found.refused.keys() == {"w"}
    assert found.held_count("v") == 4096


def test_the_later_of_two_that_share_a_place() -> None:
    engine = Engine()
    engine.hold("w", torch.zeros(50, dtype=torch.bfloat16))
    for name in ("a", "b"):
        engine.take(name, "BF16", (50,), copy_to("w"))
    found, _ = probed(engine)
    assert (found.held_count("a"), found.held_count("b")) == (0, 50)


@settings(max_examples=40, deadline=None)
@given(engines(), st.integers(1, 30))
def test_a_loader_that_fails_is_an_error(engine: Engine, at: int) -> None:
    total = len(engine.catalog)
    engine.fails_at = at
    if at <= 2 * total:
        with pytest.raises(EngineError, match="no room for"):
            probed(engine)


def test_nothing_that_can_be_probed() -> None:
    engine = Engine()
    engine.take("w", "F64", (3,))
    with pytest.raises(EngineError, match="no tensor"):
        probed(engine)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "I64"]),
    st.lists(st.integers(0, 700), min_size=1, max_size=5),
    st.sampled_from([(1 << 14, 16128), (8, 8), (64, 54)]),
)
def test_digits_are_positive_and_normal_and_spell_their_numbers(
    dtype: str, counts: list[int], digits: tuple[int, int]
) -> None:
    engine = Engine()
    for number, count in enumerate(counts):
        engine.hold(f"w{number}", torch.zeros(count).to(probing.torch_dtype(dtype)))
        engine.take(f"w{number}", dtype, (count,), copy_to(f"w{number}"))
    seen: list[torch.Tensor] = []
    load = engine.load_weights

    def watched(weights: Any) -> Any:
        for name, value in weights:
            if value.dtype.is_floating_point and value.numel():
                exact = value.double()
                assert bool((exact > 0).all() and exact.isfinite().all())
                assert bool((exact >= torch.finfo(value.dtype).smallest_normal).all())
            seen.append(value)
            load([(name, value)])

    parameters, _ = parameters_of(engine.tensors().items())
    with few_digits(1 << 17, *digits):
        found = Prober(parameters, engine.catalog, watched).find()
    assert seen
    for number, count in enumerate(counts):
        assert found.held_count(f"w{number}") == count


@settings(max_examples=30, deadline=None)
@given(engines([*HONEST, with_gaps]), st.integers(0, 2**32 - 1))
def test_what_cannot_be_seen_is_not_placed(engine: Engine, seed: int) -> None:
    found, live = probed(engine)
    check_swaps(engine, np.random.default_rng(seed), found, live)


def test_what_a_pass_read_goes_to_a_file(tmp_path: Any) -> None:
    engine = Engine()
    engine.hold("w", torch.zeros(5000, dtype=torch.bfloat16))
    engine.take("w", "BF16", (5000,), copy_to("w"))
    parameters, _ = parameters_of(engine.tensors().items())
    with mock.patch.object(probing, "_IN_MEMORY_BYTES", 100):
        found = Prober(parameters, engine.catalog, engine.load_weights, tmp_path).find()
    assert found.held_count("w") == 5000
    assert not list(tmp_path.iterdir())


def test_copies_of_engines_keep_their_ties() -> None:
    engine = Engine()
    engine.hold("a", torch.zeros(3))
    engine.register_parameter("b", engine.get_parameter("a"))
    other = copied(engine)
    other.part("a").fill_(1)
    assert bits(other.part("b")) == bits(other.part("a")) != bits(engine.part("a"))
    assert weights_like(np.random.default_rng(1), "BF16", (2,)).shape == (2,)
