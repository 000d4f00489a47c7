"""Parts of tensors, against numpy's own indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.publish.held import Held, runs_of

from .making import helds, indices_of, runs_by_hand, taken


def whole_of(held: Held) -> np.ndarray:
    return np.arange(held.whole_count, dtype=np.int64).reshape(held.shape)


@settings(deadline=None)
@given(helds())
def test_sizes(held: Held) -> None:
    part = taken(held, whole_of(held))
    assert held.local_shape == part.shape
    assert held.size == part.size
    assert held.whole_count == whole_of(held).size


@settings(deadline=None)
@given(helds())
def test_what_comes_before_each_element(held: Held) -> None:
    """Also before those that the part does not hold, and before the end."""
    ids = taken(held, whole_of(held)).reshape(-1)
    places = np.arange(held.whole_count + 3, dtype=np.int64)
    expected = [np.count_nonzero(ids < element) for element in places]
    assert held.before(places).tolist() == expected
    assert held.before(places[::-1]).tolist() == expected[::-1], "in any order"


@settings(deadline=None)
@given(helds(), st.data())
def test_where_elements_lie_in_the_whole(held: Held, data: st.DataObject) -> None:
    ids = taken(held, whole_of(held)).reshape(-1)
    every = np.arange(held.size, dtype=np.int64)
    chosen = data.draw(st.lists(st.integers(0, held.size - 1), max_size=8)) if held.size else []
    some = np.array(chosen, np.int64)
    assert np.array_equal(held.to_whole(some), ids[some])
    assert np.array_equal(held.to_whole(every), ids)
    assert np.array_equal(every, np.arange(held.size)), "the argument was written to"


@settings(deadline=None)
@given(helds())
def test_a_part_keeps_the_order_of_the_whole(held: Held) -> None:
    """What everything rests on: a range of the whole is one range of the part."""
    if held.size:
        whole = held.to_whole(np.arange(held.size, dtype=np.int64))
        assert np.all(np.diff(whole) > 0)
        assert np.array_equal(held.before(whole), np.arange(held.size))


@settings(deadline=None)
@given(st.sets(st.integers(0, 40)))
def test_runs(indices: set[int]) -> None:
    runs = runs_of(sorted(indices))
    assert indices_of(runs) == sorted(indices)
    assert runs == runs_by_hand(sorted(indices))
    if indices:
        assert all(start < stop for start, stop in runs)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs)), "two are one"
    else:
        assert runs == ((0, 0),)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 4)])
def test_a_whole_tensor(shape: tuple[int, ...]) -> None:
    held = Held.whole(shape)
    assert held.local_shape == held.shape == shape
    elements = np.arange(held.size + 1)
    assert np.array_equal(held.to_whole(elements[:-1]), elements[:-1])
    assert np.array_equal(held.before(elements), elements)


def test_equal_parts_are_one_key() -> None:
    """Replicas are found so."""
    assert len({Held((4,), (runs_of([0, 1]),)), Held((4,), (((0, 2),),))}) == 1
