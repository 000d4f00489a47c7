"""A running model at a host's copy: whatever its loader does, it ends as a fresh load would."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: attaching was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from thinwire.errors import EngineError, TensorMismatch
from thinwire.torch.attached import AttachedModel
from thinwire.torch.costs import Costs
from thinwire.torch.index_map import IndexMap
from thinwire.torch.live import parameters_of
from thinwire.torch.map_file import read_map, write_map
from thinwire.torch.ways import Loader, Patch, Way

from .layouts import (
    HIDDEN,
    HONEST,
    LYING,
    Engine,
    Tensors,
    content,
    copied,
    copy_to,
    engines,
    random_bits,
    state,
    stepped,
    weights_like,
    write_checkpoint,
)

# Shrinking engines takes minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def attached(
    engine: Engine, folder: Path, ways: Sequence[Way] = ("map", "dense"), **more: Any
) -> AttachedModel:
    loader = Loader(identity="test", load=engine.load_weights, **more)
    return AttachedModel(engine.tensors(), loader, folder / "maps", ways)


def with_nans_at_home(engine: Engine, tensors: Tensors) -> Tensors:
    """Of casts, torch makes NaNs as it likes: none where one may be cast."""
    dtypes = {dtype for dtype, _ in engine.catalog.values()}
    if len(dtypes & {"BF16", "F16", "F32"}) < 1:
        return tensors
    held = {t.dtype for t in engine.tensors().values()}
    found = {}
    for name, tensor in tensors.items():
        others = held - {tensor.dtype}
        if tensor.is_floating_point() and any(dtype.is_floating_point for dtype in others):
            exact = tensor.double()
            tensor = torch.where(exact.isnan(), 1.0, exact).to(tensor.dtype)
        found[name] = tensor
    return found


def follow(engine: Engine, seed: int, folder: Path, make: Any = weights_like) -> AttachedModel:
    """Attach, and go three versions on; every time the state is that of a fresh load."""
    rng = np.random.default_rng(seed)
    tensors = with_nans_at_home(engine, content(engine, rng, make))
    engine.load_weights(tensors.items())
    blank = copied(engine)
    model = attached(engine, folder)
    # The engine was started from an older version.
    tensors, _ = stepped(tensors, rng, 0.05)
    tensors = with_nans_at_home(engine, tensors)
    copy = write_checkpoint(folder / "copy", tensors)
    model.attach(copy)
    assert state(engine) == fresh(blank, tensors)
    for number in range(3):
        tensors, places = stepped(tensors, rng, (0.01, 0.2, 0.9)[number])
        tensors = with_nans_at_home(engine, tensors)
        copy = write_checkpoint(folder / "copy", tensors)
        told: Any = {name: at for name, at in places.items() if at.size}
        if number == 1:
            told = None
        elif number == 2:
            told = {name: None if at.size % 2 else at for name, at in told.items()}
        before = state(engine)
        staged = model.stage(copy, told)
        assert state(engine) == before
        model.apply(staged, copy)
        assert state(engine) == fresh(blank, tensors)
        assert not model.differing_count(copy)
        if staged.can_be_undone:
            assert model.undo(staged)
            assert state(engine) == before
            again = model.stage(copy, told)
            model.apply(again, copy)
            assert state(engine) == fresh(blank, tensors)
        else:
            assert not model.undo(staged)
    return model


def fresh(blank: Engine, tensors: Tensors) -> dict[str, bytes]:
    other = copied(blank)
    other.fails_at = None
    other.load_weights(tensors.items())
    return state(other)


@settings(max_examples=30, deadline=None, phases=PHASES)
@given(engines(), st.integers(0, 2**32 - 1))
def test_honest_engines(engine: Engine, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = follow(engine, seed, Path(folder))
        assert model.facts is not None
        assert model.facts.way == "map"
        assert not model.facts.refused
        assert not model.facts.loose
        assert not model.facts.is_cached


@settings(max_examples=35, deadline=None, phases=PHASES)
@given(engines([*HONEST, *LYING, *HIDDEN, *LYING, *HIDDEN]), st.integers(0, 2**32 - 1))
def test_engines_of_which_parts_cannot_be_placed(engine: Engine, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        follow(engine, seed, Path(folder))


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(engines(), st.integers(0, 2**32 - 1))
def test_any_bits(engine: Engine, seed: int) -> None:
    """NaNs with payloads, infinities, denormals, zeros of both signs."""
    with tempfile.TemporaryDirectory() as folder:
        follow(engine, seed, Path(folder), random_bits)


def simple(count: int = 400, dtype: str = "BF16") -> Engine:
    engine = Engine()
    for name in ("a", "b"):
        engine.hold(name, torch.zeros(count, dtype=torch.bfloat16))
        engine.take(name, dtype, (count,), copy_to(name))
    return engine


def start(engine: Engine, folder: Path, seed: int = 1) -> tuple[Tensors, Any]:
    tensors = content(engine, np.random.default_rng(seed), weights_like)
    engine.load_weights(tensors.items())
    return tensors, write_checkpoint(folder / "copy", tensors)


def test_the_cache_is_used_and_depends_on_the_layout(tmp_path: Path) -> None:
    _, copy = start(engine := simple(), tmp_path)
    assert not attached(engine, tmp_path).attach(copy).is_cached
    engine.calls = 0
    assert attached(engine, tmp_path).attach(copy).is_cached
    # Once, as it is, to compare where it goes with what the map says.
    assert engine.calls == len(engine.catalog)
    # One element more, another dtype, another order of memory, another name, another identity.
    others = [simple(), simple(), simple(), simple()]
    others[0].hold("more", torch.zeros(1))
    others[1].register_parameter("a", torch.nn.Parameter(torch.zeros(400), requires_grad=False))
    others[2].register_parameter("a", None)
    others[2].hold("a", torch.zeros(401, dtype=torch.bfloat16)[:400])
    others[3].hold("a2", torch.zeros(200, dtype=torch.bfloat16))
    for number, other in enumerate(others):
        other.load_weights((name, torch.zeros(400)) for name in "ab")
        start(other, tmp_path)
        assert attached(other, tmp_path).attach(copy).is_cached == (number == 2), number
    loader = Loader(identity="another", load=engine.load_weights)
    assert not AttachedModel(engine.tensors(), loader, tmp_path / "maps").attach(copy).is_cached


def test_the_order_of_memory_is_a_part_of_the_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    found = []
    for is_turned in (False, True):
        engine = Engine()
        room = torch.zeros(20, 20, dtype=torch.bfloat16)
        engine.hold("w", room.t() if is_turned else room)
        engine.take("w", "BF16", (20, 20), copy_to("w"))
        tensors = {"w": weights_like(rng, "BF16", (20, 20))}
        engine.load_weights(tensors.items())
        copy = write_checkpoint(tmp_path / "copy", tensors)
        found.append(attached(engine, tmp_path).attach(copy).is_cached)
        assert state(engine) == fresh(engine, tensors)
    assert found == [False, False]


def shuffled(path: Path, how: str) -> None:
    found = read_map(path)
    assert found is not None
    rows = found.runs.copy()
    if how == "swapped":
        rows[:, 0] = rows[::-1, 0]
    elif how == "one moved":
        rows[0, 1] = 1 - rows[0, 1]
        rows[0, 2:] = [5, 10, 300, 1, 1, 1, 1]
        rows = rows[:1]
    elif how == "shifted":
        rows[0, 2:5] = [1, 0, 399]
    elif how == "reversed parts":
        rows = np.concatenate(
            [
                [[0, 0, 0, 200, 200, 1, 1, 1, 1], [0, 0, 200, 0, 200, 1, 1, 1, 1]],
                rows[1:],
            ]
        )
    write_map(path, IndexMap(found.tensors, found.parameters, rows, found.refused))


@pytest.mark.parametrize("how", ["swapped", "one moved", "shifted", "reversed parts"])
def test_a_wrong_map_in_the_cache_is_found_out(how: str, tmp_path: Path) -> None:
    tensors, copy = start(engine := simple(), tmp_path)
    attached(engine, tmp_path).attach(copy)
    (path,) = (tmp_path / "maps").iterdir()
    good = read_map(path)
    shuffled(path, how)
    facts = attached(engine, tmp_path).attach(copy)
    assert not facts.is_cached
    assert state(engine) == fresh(engine, tensors)
    again = read_map(path)
    assert again is not None
    assert good is not None
    assert np.array_equal(again.runs, good.runs)


def test_a_wrong_part_of_a_fused_parameter_is_found_out(tmp_path: Path) -> None:
    """k and v exchanged: a small part of the parameter."""
    engine = Engine()
    engine.hold("qkv", torch.zeros(600, dtype=torch.bfloat16))
    for name, at, count in (("q", 0, 480), ("k", 480, 60), ("v", 540, 60)):
        part = slice(at, at + count)
        engine.take(name, "BF16", (count,), copy_to("qkv", lambda t, part=part: t[part]))
    tensors, copy = start(engine, tmp_path)
    attached(engine, tmp_path).attach(copy)
    (path,) = (tmp_path / "maps").iterdir()
    found = read_map(path)
    assert found is not None
    rows = found.runs.copy()
    rows[[1, 2], 3] = rows[[2, 1], 3]
    write_map(path, IndexMap(found.tensors, found.parameters, rows, {}))
    assert not attached(engine, tmp_path).attach(copy).is_cached
    assert state(engine) == fresh(engine, tensors)


def test_a_torn_cache_is_made_again(tmp_path: Path) -> None:
    _, copy = start(engine := simple(), tmp_path)
    attached(engine, tmp_path).attach(copy)
    (path,) = (tmp_path / "maps").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert not attached(engine, tmp_path).attach(copy).is_cached
    assert attached(engine, tmp_path).attach(copy).is_cached


@pytest.mark.parametrize("is_cached", [False, True])
def test_weights_that_are_arranged_after_loading(is_cached: bool, tmp_path: Path) -> None:
    tensors, copy = start(engine := simple(), tmp_path)
    if is_cached:
        attached(engine, tmp_path).attach(copy)
    order = torch.from_numpy(np.random.default_rng(3).permutation(400))

    def arrange() -> None:
        with torch.no_grad():
            engine.part("a").copy_(engine.part("a")[order])

    arrange()
    with pytest.raises(EngineError, match="do not hold what its loader writes"):
        attached(engine, tmp_path).attach(copy)
    # It says so at every start: the map that was found is not taken.
    engine.load_weights(tensors.items())
    arrange()
    reloads = []

    def reload(weights: Any) -> None:
        engine.load_weights(weights)
        arrange()
        reloads.append(1)

    model = attached(engine, tmp_path, ("map", "dense", "reload"), reload=reload)
    facts = model.attach(copy)
    # Once to find out what a start makes of the weights, and once to take that way.
    assert (facts.way, len(reloads)) == ("reload", 2)
    assert "do not hold" in facts.reason
    new, places = stepped(tensors, np.random.default_rng(4), 0.1)
    copy = write_checkpoint(tmp_path / "copy", new)
    staged = model.stage(copy, places)
    model.apply(staged, copy)
    assert not staged.can_be_undone
    other = copied(engine)
    other.load_weights(new.items())
    with torch.no_grad():
        other.part("a").copy_(other.part("a")[order])
    assert state(engine) == state(other)
    assert model.differing_count(copy) is None


def test_every_word_of_a_float32_changes_with_every_version(tmp_path: Path) -> None:
    engine = Engine()
    engine.hold("bias", torch.zeros(300))
    engine.take("bias", "F32", (300,), copy_to("bias"))
    engine.hold("w", torch.zeros(300, dtype=torch.bfloat16))
    engine.take("w", "BF16", (300,), copy_to("w"))
    tensors, _ = start(engine, tmp_path)
    tensors = {name: (t.float() * 1.001).to(t.dtype) for name, t in tensors.items()}
    copy = write_checkpoint(tmp_path / "copy", tensors)
    facts = attached(engine, tmp_path).attach(copy)
    assert facts.way == "map"
    assert state(engine) == fresh(engine, tensors)


def test_a_loader_that_changes_some_values(tmp_path: Path) -> None:
    engine = simple()

    def write(engine: Engine, value: torch.Tensor) -> None:
        flushed = torch.where(value.float().abs() < 1.1e-38, torch.zeros(()), value.float())
        engine.part("a").copy_(flushed)

    engine.take("a", "BF16", (400,), write)
    tensors, copy = start(engine, tmp_path)
    tensors["a"][7] = 1e-39
    copy = write_checkpoint(tmp_path / "copy", tensors)
    engine.load_weights(tensors.items())
    model = attached(engine, tmp_path)
    facts = model.attach(copy)
    assert "some of the values" in facts.refused["a"]
    assert facts.loose == ("a",)
    assert state(engine) == fresh(engine, tensors)
    tensors, places = stepped(tensors, np.random.default_rng(2), 0.1)
    tensors["a"][9] = -1e-39
    places["a"] = np.union1d(places["a"], [9])
    copy = write_checkpoint(tmp_path / "copy", tensors)
    model.apply(model.stage(copy, places), copy)
    assert state(engine) == fresh(engine, tensors)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_loader_that_fails_half_way(at: int, tmp_path: Path) -> None:
    tensors, copy = start(engine := simple(), tmp_path)
    engine.calls, engine.fails_at = 0, at
    model = attached(engine, tmp_path)
    with pytest.raises(EngineError, match="no room for"):
        model.attach(copy)
    assert not list(tmp_path.glob("maps/*.map"))
    engine.fails_at = None
    try:
        facts = attached(engine, tmp_path).attach(copy)
    except EngineError as error:
        # Where it failed as the weights were put back, the engine must be started again.
        if "do not hold" not in error.message:
            raise
        engine.load_weights(tensors.items())
        facts = attached(engine, tmp_path).attach(copy)
    assert not facts.is_cached
    assert state(engine) == fresh(engine, tensors)


def test_many_changes_go_the_dense_way(tmp_path: Path) -> None:
    tensors, copy = start(engine := simple(), tmp_path)
    model = attached(engine, tmp_path)
    model.attach(copy)
    model._costs = Costs(1e-6, 1e-7)
    for share, is_dense in ((0.01, False), (0.9, True)):
        tensors, places = stepped(tensors, np.random.default_rng(5), share)
        copy = write_checkpoint(tmp_path / "copy", tensors)
        engine.calls = 0
        staged = model.stage(copy, places)
        assert bool(staged.dense) == is_dense
        assert staged.can_be_undone == (not is_dense)
        model.apply(staged, copy)
        assert engine.calls == (2 if is_dense else 0)
        assert state(engine) == fresh(engine, tensors)


def test_the_dense_way_keeps_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    """Two tensors in one place: the later one of the checkpoint stays, as after a fresh load."""
    engine = simple()
    engine.take("z", "BF16", (400,), copy_to("a"))
    tensors, copy = start(engine, tmp_path)
    model = attached(engine, tmp_path, ("dense",))
    model.attach(copy)
    tensors, places = stepped(tensors, np.random.default_rng(5), 0.1)
    copy = write_checkpoint(tmp_path / "copy", tensors)
    staged = model.stage(copy, dict(reversed(places.items())))
    model.apply(staged, copy)
    assert state(engine) == fresh(engine, tensors)


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(engines(), st.integers(0, 2**32 - 1), st.booleans())
def test_patches(engine: Engine, seed: int, is_told: bool) -> None:
    rng = np.random.default_rng(seed)
    tensors = content(engine, rng, weights_like)
    engine.load_weights(tensors.items())
    held = {name: tensor.clone() for name, tensor in tensors.items()}

    def patch(patches: Sequence[Patch]) -> None:
        for name, shape, positions, values in patches:
            assert tuple(held[name].shape) == shape
            assert bool((positions[1:] > positions[:-1]).all())
            held[name].reshape(-1)[positions] = values
            engine.load_weights([(name, held[name])])

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = write_checkpoint(folder / "copy", tensors)
        model = attached(engine, folder, ("patches",), patch=patch)
        assert model.attach(copy).way == "patches"
        tensors, places = stepped(tensors, rng, 0.2)
        copy = write_checkpoint(folder / "copy", tensors)
        blank = copied(engine)
        staged = model.stage(copy, places if is_told else None)
        model.apply(staged, copy)
        assert state(engine) == fresh(blank, tensors)
        if staged.patches:
            assert not model.undo(staged)


def test_no_way_is_left(tmp_path: Path) -> None:
    _, copy = start(engine := simple(), tmp_path)
    for ways in ((), ("patches",), ("reload",)):
        with pytest.raises(EngineError, match="none of the ways"):
            attached(engine, tmp_path, ways).attach(copy)


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    tensors, copy = start(engine := simple(), tmp_path)
    model = attached(engine, tmp_path)
    model.attach(copy)
    with pytest.raises(TensorMismatch, match="no tensor 'nobody'"):
        model.stage(copy, {"nobody": None})
    for other in ({"a": tensors["a"]}, {**tensors, "a": tensors["a"].float()}):
        with pytest.raises(TensorMismatch, match="are not those"):
            model.stage(write_checkpoint(tmp_path / "other", other), None)


def test_a_packed_engine_is_refused(tmp_path: Path) -> None:
    _, copy = start(engine := simple(), tmp_path)
    engine.hold("lin_weight", torch.zeros(0))
    with pytest.raises(EngineError, match="packed elsewhere"):
        attached(engine, tmp_path).attach(copy)


def test_elements_that_are_not_here_are_told(tmp_path: Path) -> None:
    engine = simple()
    engine.take("gone", "F32", (5,))
    engine.take("half", "BF16", (10,), copy_to("own", lambda t: t[:5], lambda v: v[5:]))
    engine.hold("own", torch.zeros(7, dtype=torch.bfloat16))
    _, copy = start(engine, tmp_path)
    model = attached(engine, tmp_path)
    assert model.held_counts() == {}
    facts = model.attach(copy)
    assert facts.absent == ("gone",)
    assert model.held_counts() == {"gone": 0, "half": 5}
    assert parameters_of(engine.tensors().items())[0].keys() == {"a", "b", "own"}


def test_what_others_write_is_seen(tmp_path: Path) -> None:
    _, copy = start(engine := simple(), tmp_path)
    model = attached(engine, tmp_path)
    model.attach(copy)
    with torch.no_grad():
        engine.part("a")[3] = 77
        engine.part("b")[5] = -77
    assert model.differing_count(copy) == 2
    assert model.differing_count(copy, ["b"]) == 1
