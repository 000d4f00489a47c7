"""The plan of who captures, encodes and uploads what, against every word counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec.dtypes import byte_count
from thinwire.codec.plan import Pair, plan_units
from thinwire.errors import TensorMismatch
from thinwire.publish import units
from thinwire.publish.baseline import in_unit
from thinwire.publish.held import Held
from thinwire.publish.spreading import Holding, Inventory, Part, inventory_of, spread_over
from thinwire.publish.units import Plan, Unit

from .making import holding, placed, spreads_of, taken, word_ids

DTYPES = ["BF16", "F32", "U8", "C64", "I64", "BOOL"]
CHUNK_WORDS = 12
SMALL_WORDS = 6


@contextmanager
def small_chunks() -> Iterator[None]:
    """Tensors of a few words have several chunks then."""
    with (
        mock.patch.object(units, "CHUNK_WORDS", CHUNK_WORDS),
        mock.patch.object(units, "SMALL_WORDS", SMALL_WORDS),
        mock.patch.object(units, "GROUP_WORDS", 16),
    ):
        yield


@st.composite
def jobs(draw: st.DrawFn) -> list[list[Holding]]:
    """What each rank of a job says that it holds: any tensors, cut and replicated any way."""
    rank_count = draw(st.integers(1, 5))
    job: list[list[Holding]] = [[] for _ in range(rank_count)]
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        for rank, held in enumerate(draw(placed(shape, rank_count))):
            if held is not None:
                job[rank].append(holding(f"tensor{number}", dtype, held))
    return job


def plan_of(job: Sequence[Sequence[Holding]]) -> Plan:
    return Plan(spreads_of(job), len(job))


def all_units(plan: Plan) -> list[Unit]:
    return [unit for tensor in range(len(plan.spreads)) for unit in plan.units_of(tensor)]


def words_of(plan: Plan, unit: Unit, source: units.Source) -> np.ndarray:
    """Which words of the tensor a source captures."""
    spread = plan.spreads[unit.tensor]
    part = spread.parts[source.part]
    ids = word_ids(spread.dtype, spread.shape)
    # Complex words: the part is taken element by element, each with its two words.
    elements = taken(part, np.arange(part.whole_count).reshape(part.shape)).reshape(-1)
    local = ids.reshape(max(1, part.whole_count), -1)[elements].reshape(-1)
    found: np.ndarray = local[source.start : source.stop]
    return found


@settings(deadline=None)
@given(jobs())
def test_every_word_is_captured_once(job: list[list[Holding]]) -> None:
    """By a rank that holds it, in the unit where it belongs."""
    with small_chunks():
        plan = plan_of(job)
        holders = {
            (rank, one.name): Held(one.shape, one.dims)
            for rank, held in enumerate(job)
            for one in held
        }
        for unit in all_units(plan):
            spread = plan.spreads[unit.tensor]
            captured = []
            for source in unit.sources:
                assert holders[source.rank, spread.name] == spread.parts[source.part]
                words = words_of(plan, unit, source)
                local = np.arange(len(words), dtype=np.int64)
                places = in_unit(plan, unit, source, local)
                assert np.array_equal(places, words - unit.start)
                captured += words.tolist()
            assert sorted(captured) == list(range(unit.start, unit.stop))


@settings(deadline=None)
@given(jobs())
def test_units_tile_the_tensors(job: list[list[Holding]]) -> None:
    with small_chunks():
        plan = plan_of(job)
        total = 0
        for tensor, spread in enumerate(plan.spreads):
            found = list(plan.units_of(tensor))
            assert [unit.number for unit in found] == list(range(plan.unit_count(tensor)))
            assert found[0].start == 0
            assert found[-1].stop == spread.word_count
            assert all(a.stop == b.start for a, b in pairwise(found))
            if plan.is_small(tensor):
                assert len(found) == 1
            else:
                assert all(unit.stop - unit.start == CHUNK_WORDS for unit in found[:-1])
                assert 0 < found[-1].stop - found[-1].start <= CHUNK_WORDS
            total += spread.word_count
        assert plan.total_words == total
        assert plan.total_units == len(all_units(plan))


@settings(deadline=None)
@given(jobs())
def test_places_number_the_units(job: list[list[Holding]]) -> None:
    with small_chunks():
        plan = plan_of(job)
        found = all_units(plan)
        assert [plan.place_of(unit) for unit in found] == list(range(plan.total_units))
        assert [plan.unit_at(place) for place in range(plan.total_units)] == found


@settings(deadline=None)
@given(jobs())
def test_who_does_what(job: list[list[Holding]]) -> None:
    with small_chunks():
        plan = plan_of(job)
        by_rank = [list(plan.units_for(rank)) for rank in range(len(job))]
        for unit in all_units(plan):
            assert 0 <= unit.owner < len(job)
            if plan.is_small(unit.tensor):
                assert unit.owner == plan.home_of(unit.tensor), "small ones share chunks"
            elif unit.sources:
                assert unit.owner in {source.rank for source in unit.sources}
                sizes = {source.rank: source.stop - source.start for source in unit.sources}
                most = max(sizes, key=sizes.__getitem__)
                if 2 * sizes[most] > unit.stop - unit.start:
                    assert unit.owner == most, "whoever has most of it sends nothing"
            assert unit.is_own == ([source.rank for source in unit.sources] == [unit.owner])
            busy = {unit.owner, *(source.rank for source in unit.sources)}
            assert {rank for rank, mine in enumerate(by_rank) if unit in mine} == busy


@settings(deadline=None)
@given(jobs())
def test_every_tensor_is_in_one_container(job: list[list[Holding]]) -> None:
    plan = plan_of(job)
    inside = [tensor for tensors in plan.containers for tensor in tensors]
    assert inside == list(range(len(plan.spreads))), "in order, so that the first is the first"
    assert len(plan.homes) == len(plan.containers) <= max(1, len(job))
    assert plan.homes == sorted(set(plan.homes)), "no rank assembles two while others have none"
    assert all(
        plan.home_of(t) == h for h, ts in zip(plan.homes, plan.containers, strict=True) for t in ts
    )


@settings(deadline=None)
@given(jobs())
def test_every_rank_makes_the_same_plan(job: list[list[Holding]]) -> None:
    with small_chunks():
        plan, other = plan_of(job), plan_of([list(held) for held in job])
        assert plan.spreads == other.spreads
        assert (plan.containers, plan.homes) == (other.containers, other.homes)
        # The cuts are found as they are needed: also in another order.
        places = list(reversed(range(plan.total_units)))
        assert [plan.unit_at(p) for p in places] == [other.unit_at(p) for p in reversed(places)][
            ::-1
        ]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_replicas_share_the_work(ranks: int, chunks: int, before: int) -> None:
    """Of tensors that all ranks hold, each captures as many whole ones, give or take one."""
    with small_chunks():
        names = [f"t{number}" for number in range(before + 1)]
        held = [holding(name, "BF16", Held.whole((chunks, CHUNK_WORDS))) for name in names]
        plan = plan_of([held] * ranks)
        assert all(unit.is_own for unit in all_units(plan)), "nobody sends anything"
        takers = [{unit.owner for unit in plan.units_of(t)} for t in range(len(names))]
        assert all(len(taker) == 1 for taker in takers), "what is published one rank had"
        captures = Counter(rank for taker in takers for rank in taker)
        assert max(captures.values()) - min(captures[rank] for rank in range(ranks)) <= 1


def test_replicas_share_many_small_tensors_of_one_chunk() -> None:
    """In turn, not all of them the first rank."""
    with small_chunks():
        held = [holding(f"t{number}", "F32", Held.whole((9,))) for number in range(12)]
        plan = plan_of([held] * 3)
        assert Counter(unit.owner for unit in all_units(plan)) == {0: 4, 1: 4, 2: 4}


@settings(deadline=None)
@given(jobs())
def test_small_tensors_are_grouped_as_the_codec_groups_them(job: list[list[Holding]]) -> None:
    plan = plan_of(job)
    for number, tensors in enumerate(plan.containers):
        groups = plan.groups(number)
        assert sorted(t for group in groups for t in group) == list(tensors), "all are small here"
        pairs = []
        for tensor in tensors:
            spread = plan.spreads[tensor]
            data = np.zeros(byte_count(spread.dtype, spread.shape), np.uint8)
            pairs.append(Pair(spread.name, spread.dtype, spread.shape, data, data))
        expected = [[pair.name for pair in group] for group in plan_units(pairs)[1]]
        assert [[plan.spreads[t].name for t in group] for group in groups] == expected


def test_groups_end_where_the_codec_ends_them() -> None:
    """Large enough ones are full."""
    shapes = [(60_000,), (65_535,), (65_000,), (65_000,), (65_000,), (1,), (70_000,), (2,)]
    held = [holding(f"t{n}", "BF16", Held.whole(shape)) for n, shape in enumerate(shapes)]
    plan = plan_of([held])
    pairs = []
    for spread in plan.spreads:
        data = np.zeros(spread.byte_count, np.uint8)
        pairs.append(Pair(spread.name, spread.dtype, spread.shape, data, data))
    expected = [[pair.name for pair in group] for group in plan_units(pairs)[1]]
    assert len(expected) == 2
    assert [[plan.spreads[t].name for t in group] for group in plan.groups(0)] == expected


def test_a_part_that_covers_most_of_a_chunk_is_encoded_where_it_lies() -> None:
    with small_chunks():
        shape = (20,)
        parts = [Held(shape, (((0, 11),),)), Held(shape, (((11, 20),),))]
        plan = plan_of([[holding("t", "BF16", part)] for part in parts])
        assert [unit.owner for unit in all_units(plan)] == [0, 1]
        assert [unit.is_own for unit in all_units(plan)] == [False, True]


def test_columns_are_encoded_in_turn() -> None:
    """No rank has most of any chunk: all encode some."""
    with small_chunks():
        shape = (24, 6)
        parts = [Held(shape, (((0, 24),), ((a, a + 2),))) for a in (0, 2, 4)]
        plan = plan_of([[holding("t", "BF16", part)] for part in parts])
        assert Counter(unit.owner for unit in all_units(plan)) == {0: 4, 1: 4, 2: 4}


class TestRefusals:
    def test_another_dtype(self) -> None:
        whole = Held.whole((4,))
        with pytest.raises(TensorMismatch, match=r"'t'.*rank 1.*same model") as raised:
            spreads_of([[holding("t", "BF16", whole)], [holding("t", "F32", whole)]])
        assert raised.value.context["tensor"] == "t"

    def test_another_shape(self) -> None:
        with pytest.raises(TensorMismatch, match="'t'"):
            spreads_of(
                [[holding("t", "F32", Held.whole((4,)))], [holding("t", "F32", Held.whole((2, 2)))]]
            )

    @pytest.mark.parametrize(
        "runs",
        [
            [((0, 3),), ((4, 8),)],  # one element of nobody
            [((0, 5),), ((3, 8),)],  # two of both
            [((0, 4),), ((3, 7),)],  # as many as there are, and yet one twice and one not at all
            [((0, 4),), ((0, 4),)],  # replicas of one half
            [((0, 2), (4, 6)), ((2, 4), (5, 7))],
            [((0, 0),), ((0, 0),)],  # nothing at all
            [((0, 4),), ((8, 12),)],  # as many as there are, some of them outside
            [((-4, 0),), ((0, 4),)],
            [((4, 8), (0, 4)), ((0, 0),)],  # not in order
        ],
    )
    @pytest.mark.parametrize("is_turned", [False, True])
    def test_parts_that_are_not_the_tensor(self, runs: list[units.Runs], is_turned: bool) -> None:
        def part(one: units.Runs) -> Held:
            return Held((3, 8), (((0, 3),), one)) if is_turned else Held((8,), (one,))

        spreads = spreads_of([[holding("t", "F32", part(one))] for one in runs])
        with pytest.raises(TensorMismatch, match="'t' is not whole"):
            Plan(spreads, 2)

    @settings(deadline=None)
    @given(jobs(), st.data())
    def test_a_rank_that_is_missing(self, job: list[list[Holding]], data: st.DataObject) -> None:
        """Whatever only it held is noticed."""
        lost = data.draw(st.integers(0, len(job) - 1))
        rest = [held for rank, held in enumerate(job) if rank != lost]
        is_whole = True
        spreads = spreads_of(rest)
        for spread in spreads:
            found = np.zeros(spread.shape, np.int64)
            for part in spread.parts:
                grid = np.zeros(spread.shape, np.int64)
                ids = taken(part, np.arange(grid.size).reshape(grid.shape))
                grid.reshape(-1)[ids.reshape(-1)] = 1
                found += grid
            is_whole &= bool(np.all(found == 1))
        if is_whole:
            Plan(spreads, max(1, len(rest)))
        else:
            with pytest.raises(TensorMismatch):
                Plan(spreads, max(1, len(rest)))


def test_tensors_without_elements() -> None:
    """They are published by whoever has them, and nobody captures anything."""
    shape = (0, 5)
    job = [[holding("t", "F32", Held(shape, (((0, 0),), ((a, b),))))] for a, b in [(0, 3), (3, 5)]]
    plan = plan_of(job)
    (unit,) = all_units(plan)
    assert unit.sources == ()
    assert (unit.start, unit.stop, unit.owner) == (0, 0, 0)


def test_a_rank_without_anything() -> None:
    whole = [holding(name, "F32", Held.whole((30,))) for name in "ab"]
    with small_chunks():
        plan = plan_of([whole, [], whole])
        assert {unit.owner for unit in all_units(plan)} == {0, 2}
        assert list(plan.units_for(1)) == []


def test_a_tensor_without_elements() -> None:
    """However ranks say that they hold nothing of it."""
    parts = [Held((0, 4), (((0, 0),), ((0, 4),))), Held((0, 4), (((0, 0),), ((0, 2),)))]
    plan = plan_of([[holding("t", "F32", part)] for part in parts])
    assert [unit.stop for unit in all_units(plan)] == [0]


def test_an_empty_part_is_no_part() -> None:
    """As a rank has that is one too many for the tensor."""
    shape = (30,)
    parts = [Held(shape, (((0, 30),),)), Held(shape, (((0, 0),),))]
    spreads = spreads_of([[holding("t", "F32", part)] for part in parts])
    assert [(s.parts, s.holders) for s in spreads] == [((parts[0],), ((0,),))]


def test_more_ranks_than_containers() -> None:
    """Not every rank of thousands opens a shard of its own."""
    held = [holding(f"t{number}", "F32", Held.whole((10,))) for number in range(200)]
    plan = Plan(spreads_of([held] * 100), 100)
    assert len(plan.containers) == units.MAX_CONTAINERS
    assert len(set(plan.homes)) == units.MAX_CONTAINERS


def test_containers_are_about_equal() -> None:
    held = [holding(f"t{number}", "BF16", Held.whole((1000 + number,))) for number in range(64)]
    plan = plan_of([held] * 4)
    sizes = [sum(plan.spreads[t].byte_count for t in tensors) for tensors in plan.containers]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)


def test_a_huge_model_is_cut_into_containers_of_bearable_size() -> None:
    """One rank, hundreds of GB: nothing of that size is made here."""
    held = [holding(f"t{n}", "BF16", Held.whole((1 << 20, 5000))) for n in range(20)]
    plan = plan_of([held])
    for tensors in plan.containers:
        size = sum(plan.spreads[t].byte_count for t in tensors)
        assert size <= 1.5 * units.CONTAINER_RAW_BYTES
    assert set(plan.homes) == {0}


def test_a_thousand_ranks_that_share_every_tensor() -> None:
    """3,000 tensors, of which each rank says its rows: together they are three million."""
    ranks, layers = 1000, 3
    shapes = [(2048, 7168), (7168, 2048), (384, 7168), (7168,)]
    names = [f"layers.{n}.{k}" for n in range(layers) for k in range(1000)]
    first = inventory_of(Holding(name, "BF16", (4,), (((0, 4),),)) for name in names)
    # One tensor in a hundred is small.
    numbers = np.array([n % 3 if n % 100 else 3 for n in range(len(names))], "<u4").tobytes()

    def said(rank: int) -> Inventory:
        parts = []
        for shape in shapes:
            rows = -(-shape[0] // ranks)
            own = (min(shape[0], rank * rows), min(shape[0], (rank + 1) * rows))
            dims = (own,), *(((0, size),) for size in shape[1:])
            parts.append(Part("BF16", shape, dims))
        return Inventory(first.names, numbers, parts)

    spreads = spread_over(map(said, range(ranks)))
    assert [spread.name for spread in spreads] == names
    assert len({id(spread.layout) for spread in spreads}) == len(shapes)
    plan = Plan(spreads, ranks)
    own = list(plan.units_for(7))
    assert {unit.tensor for unit in own} >= {n for n in range(len(names)) if n % 3 == 0}


@given(jobs())
@settings(deadline=None)
def test_spreads_are_what_each_rank_said(job: list[list[Holding]]) -> None:
    spreads = spreads_of(job)
    assert [s.name for s in spreads] == list(dict.fromkeys(h.name for held in job for h in held))
    for spread in spreads:
        found = {
            (rank, part.dims)
            for part, holders in zip(spread.parts, spread.holders, strict=True)
            for rank in holders
        }
        expected = {
            (rank, one.dims)
            for rank, held in enumerate(job)
            for one in held
            if one.name == spread.name and Held(one.shape, one.dims).size
        }
        assert found == expected or not expected
