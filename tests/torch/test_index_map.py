"""Tables of runs: they say exactly what was found, and refuse to lead outside."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: index maps were NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import msgspec
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinwire.codec.digest import xxh3_64
from thinwire.errors import Corrupt
from thinwire.torch.index_map import IndexMap, Run, find_runs, fold_runs, join_runs
from thinwire.torch.map_file import MAGIC, read_map, write_map

Ids = np.ndarray[Any, np.dtype[np.int64]]


@st.composite
def placed_ids(draw: Any) -> list[int]:
    """Ids in the order of a parameter: strided runs, blocks of them, holes, and no order at all."""
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        first = draw(st.integers(0, 40))
        length, step = draw(st.integers(1, 6)), draw(st.integers(-2, 4))
        run = [first + step * j for j in range(length)]
        repeat, jump = draw(st.integers(1, 4)), draw(st.integers(-3, 30))
        gap = draw(st.integers(0, 2))
        for r in range(repeat):
            ids += [i + r * jump for i in run] + [-1] * gap
        ids += draw(st.lists(st.integers(-1, 60), max_size=3))
    return [max(i, -1) for i in ids]


def pieces(ids: list[int], cuts: list[int]) -> Ids:
    """Runs found piece by piece, and joined."""
    array = np.array(ids, np.int64)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    rows = [find_runs(array[a:b], a) for a, b in pairwise(edges)] or [np.empty((0, 4), np.int64)]
    return join_runs(np.concatenate(rows))


def spelled(folded: Ids, count: int) -> list[int]:
    """What folded rows say, place by place."""
    said = [-1] * count
    for ids, start, length, step, repeat, id_jump, jump in folded.tolist():
        for r in range(repeat):
            for j in range(length):
                assert said[start + r * jump + j] == -1, "a place is said twice"
                said[start + r * jump + j] = ids + r * id_jump + j * step
    return said


@settings(max_examples=150, deadline=None)
@given(placed_ids(), st.lists(st.integers(0, 200), max_size=12))
@example([0, 1, 2, 3, 5, 7, 9], [3, 4])
@example([0, 2, 4, 5, 8, 11], [])
@example([5, -1, 6, -1, 7, -1], [])
def test_runs_spell_the_ids_wherever_they_were_cut(ids: list[int], cuts: list[int]) -> None:
    for where in ([], cuts, list(range(len(ids)))):
        found = pieces(ids, where)
        said = [-1] * len(ids)
        for start, first, step, length in found.tolist():
            for j in range(length):
                said[start + j] = first + j * step
        assert said == ids
        assert spelled(fold_runs(found), len(ids)) == ids


@settings(max_examples=150, deadline=None)
@given(placed_ids(), st.data())
def test_places_and_sources_by_brute_force(ids: list[int], data: Any) -> None:
    rows = [[0, 0, i, s, n, d, r, ij, j] for i, s, n, d, r, ij, j in fold_runs(pieces(ids, []))]
    found = IndexMap(
        {"t": ("BF16", 200)},
        {"p": ("BF16", len(ids))},
        np.array(rows, np.int64).reshape(-1, 9),
        {},
    )
    asked = np.array(sorted(data.draw(st.sets(st.integers(0, 199), max_size=60))), np.int64)
    told = [
        (int(at), int(asked[number]))
        for places in found.places("t", asked)
        for at, number in zip(places.at, places.asked, strict=True)
    ]
    wanted = set(asked.tolist())
    assert sorted(told) == [(at, i) for at, i in enumerate(ids) if i in wanted]
    assert found.held_count("t") == sum(i >= 0 for i in ids)
    at = np.arange(len(ids), dtype=np.int64)
    tensors, elements = found.sources(0, at)
    assert elements.tolist() == ids
    assert tensors.tolist() == [0 if i >= 0 else -1 for i in ids]


ROWS = st.lists(
    st.lists(
        st.one_of(
            st.integers(-2, 12),
            st.integers(-(2**63), 2**63 - 1),
            st.sampled_from([2**31, 2**32, 2**47, 2**48 - 1, 2**62, -(2**63)]),
        ),
        min_size=9,
        max_size=9,
    ),
    min_size=1,
    max_size=4,
)


def is_inside(row: list[int], sizes: list[int], rooms: list[int]) -> bool:
    run = Run(*row)
    if min(row) < 0 or run.length < 1 or run.repeat < 1:
        return False
    if run.tensor >= len(sizes) or run.parameter >= len(rooms):
        return False
    last = run.start + (run.length - 1) + (run.repeat - 1) * run.jump
    return run.source_stop <= sizes[run.tensor] and last < rooms[run.parameter]


@settings(max_examples=200, deadline=None)
@given(ROWS)
@example([[0, 0, 0, 0, 2**32, 2**32, 2**32, 2**32, 2**32]])
@example([[0, 0, 0, 0, 1, 1, 3, 0, 0]])
@example([[0, 0, 0, 0, 2, 1, 2, 1, 1]])
def test_rows_that_lead_outside_are_refused(rows: list[list[int]]) -> None:
    sizes, rooms = [10, 3], [8, 20]
    try:
        found = IndexMap(
            {"a": ("BF16", 10), "b": ("BF16", 3)},
            {"p": ("BF16", 8), "q": ("BF16", 20)},
            np.array(rows, np.int64),
            {},
        )
    except Corrupt:
        return
    assert all(is_inside(row, sizes, rooms) for row in rows)
    # What was let in is understood alike by both ways of reading it.
    for name, count in (("a", 10), ("b", 3)):
        every = np.arange(count, dtype=np.int64)
        told = sorted(
            (places.parameter, int(at), int(every[number]))
            for places in found.places(name, every)
            for at, number in zip(places.at, places.asked, strict=True)
        )
        said = sorted(
            (
                run.parameter,
                run.start + r * run.jump + j,
                run.source + r * run.source_jump + j * run.source_step,
            )
            for run in found.runs_of(name)
            for r in range(run.repeat)
            for j in range(run.length)
        )
        assert told == said


def test_sound_rows_are_let_in() -> None:
    rows = np.array([[0, 0, 0, 0, 4, 2, 1, 1, 1], [1, 1, 0, 0, 1, 1, 3, 1, 9]], np.int64)
    found = IndexMap(
        {"a": ("BF16", 10), "b": ("BF16", 3)}, {"p": ("F32", 8), "q": ("BF16", 20)}, rows, {}
    )
    assert len(found.runs) == 2
    assert IndexMap({}, {}, np.empty((0, 9), np.int64), {}).table_bytes == 0


# Files.


def some_map(seed: int = 1) -> IndexMap:
    rows = [[0, 0, 0, 0, 4, 1, 3, 8, 4], [0, 1, 4, 0, 2, 1, 1, 1, 1], [1, 1, 0, 2, 3, 1, 1, 1, 1]]
    return IndexMap(
        {"a": ("BF16", 30), "b.é": ("F32", 3)},
        {"p": ("BF16", 12), "q": ("F32", 5 + seed)},
        np.array(rows, np.int64),
        {"r": "the loader transforms what it writes to it"},
    )


def same(a: IndexMap | None, b: IndexMap) -> bool:
    return (
        a is not None
        and a.tensors == b.tensors
        and list(a.parameters.items()) == list(b.parameters.items())
        and a.refused == b.refused
        and np.array_equal(a.runs, b.runs)
    )


def test_a_kept_map_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.map"
    assert read_map(path) is None
    write_map(path, some_map())
    assert same(read_map(path), some_map())
    write_map(path, some_map(2))
    assert same(read_map(path), some_map(2))
    assert [found.name for found in path.parent.iterdir()] == ["x.map"]


def test_every_truncation_and_every_flipped_bit_is_no_map(tmp_path: Path) -> None:
    path = tmp_path / "x.map"
    write_map(path, some_map())
    data = path.read_bytes()
    broken = tmp_path / "broken"
    for length in range(len(data)):
        broken.write_bytes(data[:length])
        assert read_map(broken) is None, length
    # Every bit of the beginning and of the end, one of each byte between.
    near = [*range(12), *range(len(data) - 8, len(data))]
    for bit in [8 * n + n % 8 for n in range(len(data))] + [
        8 * n + b for n in near for b in range(8)
    ]:
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        broken.write_bytes(wrong)
        assert read_map(broken) is None, bit
    broken.write_bytes(data + b"\0")
    assert read_map(broken) is None


def resealed(head: bytes, rows: bytes) -> bytes:
    data = MAGIC + len(head).to_bytes(4, "little") + head + rows
    return data + xxh3_64(np.frombuffer(data, np.uint8)).to_bytes(8, "little")


GOOD = {"tensors": [["a", "BF16", 9]], "parameters": [["p", "BF16", 9]], "refused": {}}
ROW = np.array([0, 0, 0, 0, 9, 1, 1, 1, 1], "<i8").tobytes()


@pytest.mark.parametrize(
    ("head", "rows"),
    [
        (b"", ROW),
        (b"\xff", ROW),
        (b"[]", ROW),
        (b"{", ROW),
        (msgspec.json.encode({**GOOD, "more": 1}), ROW),
        (msgspec.json.encode({**GOOD, "tensors": [["a", "BF16", 2**70]]}), ROW),
        (msgspec.json.encode({**GOOD, "tensors": [["a", "BF16", 2**63]]}), ROW),
        (msgspec.json.encode({**GOOD, "tensors": [["a", "BF16", 8]]}), ROW),
        (msgspec.json.encode({**GOOD, "tensors": []}), ROW),
        (msgspec.json.encode({**GOOD, "parameters": [["p", "BF16", "9"]]}), ROW),
        (msgspec.json.encode({**GOOD, "parameters": [["p", "BF16", -9]]}), ROW),
        (msgspec.json.encode(GOOD), ROW[:-1]),
        (msgspec.json.encode(GOOD), ROW + ROW[:8]),
        (msgspec.json.encode(GOOD), b"\xff" * 72),
    ],
)
def test_what_was_sealed_by_somebody_else_is_no_map(
    head: bytes, rows: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.map"
    path.write_bytes(resealed(msgspec.json.encode(GOOD), ROW))
    assert read_map(path) is not None
    path.write_bytes(resealed(head, rows))
    assert read_map(path) is None


def test_many_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.map"
    maps = [some_map(seed) for seed in range(4)]
    wrong: list[object] = []
    is_ending = threading.Event()

    def write(found: IndexMap) -> None:
        try:
            for _ in range(40):
                write_map(path, found)
        except BaseException as error:
            wrong.append(error)

    def read() -> None:
        while not is_ending.is_set():
            found = read_map(path)
            if found is not None and not any(same(found, one) for one in maps):
                wrong.append(found)

    writers = [threading.Thread(target=write, args=(found,)) for found in maps]
    reader = threading.Thread(target=read)
    for thread in [*writers, reader]:
        thread.start()
    for thread in writers:
        thread.join()
    is_ending.set()
    reader.join()
    assert not wrong
    assert any(same(read_map(path), one) for one in maps)
    assert [found.name for found in tmp_path.iterdir()] == ["x.map"]


def test_a_link_is_no_map(tmp_path: Path) -> None:
    write_map(tmp_path / "real", some_map())
    (tmp_path / "x.map").symlink_to("real")
    assert read_map(tmp_path / "x.map") is None
