"""The file of changed words: what was sealed is read, and nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec.delta import ChunkChanges
from thinwire.codec.digest import CHUNK_WORDS, xxh3_64
from thinwire.engines.places import MAGIC, WHOLE, PlacesFile, read_places
from thinwire.errors import ChecksumMismatch, Corrupt, FormatError, StoreError, Truncated

Told = tuple[str, int, list[int] | None]


def blocks() -> st.SearchStrategy[list[Told]]:
    positions = st.sets(
        st.one_of(st.integers(0, 40), st.integers(0, CHUNK_WORDS - 1)), max_size=20
    ).map(sorted)
    first = st.sampled_from([0, CHUNK_WORDS, 7 * CHUNK_WORDS, 2**40])
    name = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    one = st.one_of(st.tuples(name, first, positions), st.tuples(name, st.just(0), st.none()))
    return st.lists(one, max_size=8)


def add(file: PlacesFile, told: list[Told]) -> int:
    count = 0
    for name, first, positions in told:
        if positions is None:
            file.add_whole(name, 5)
            count += 5
        else:
            words = np.zeros(2 * len(positions), np.uint8)
            at = np.array(positions, np.uint32)
            file.add(ChunkChanges(name, first, at, words, 2))
            count += len(positions)
    return count


def read(path: Path) -> list[Told]:
    return [
        (name, first, None if at is None else at.tolist()) for name, first, at in read_places(path)
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(blocks(), min_size=1, max_size=4), st.booleans())
def test_what_was_added_is_read(parts: list[list[Told]], is_renamed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "next"
        file = PlacesFile(path)
        so_far: list[Told] = []
        count = 0
        for number, part in enumerate(parts):
            count += add(file, part)
            so_far += part
            if is_renamed:
                path = Path(folder) / f"{number}"
                file.rename(path)
            file.seal()
            assert file.path == path
            assert read(path) == so_far
            # Sealed twice is sealed once.
            file.seal()
            assert read(path) == so_far
            assert file.word_count == count
        file.close()
        assert [found.name for found in Path(folder).iterdir()] == [path.name]


def sample(folder: Path) -> Path:
    file = PlacesFile(folder / "places")
    add(file, [("model.w", 0, [0, 5, 70000]), ("é", CHUNK_WORDS, []), ("b", 0, None)])
    file.seal()
    file.close()
    return folder / "places"


def test_every_truncation_and_every_flipped_bit(tmp_path: Path) -> None:
    data = sample(tmp_path).read_bytes()
    broken = tmp_path / "broken"
    for length in range(len(data)):
        broken.write_bytes(data[:length])
        with pytest.raises((Truncated, ChecksumMismatch)):
            read(broken)
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        broken.write_bytes(wrong)
        with pytest.raises((Corrupt, ChecksumMismatch)):
            read(broken)


def test_what_was_added_after_the_seal_must_be_sealed(tmp_path: Path) -> None:
    file = PlacesFile(tmp_path / "places")
    add(file, [("w", 0, [1])])
    file.seal()
    add(file, [("w", 0, [2])])
    file._file.flush()
    with pytest.raises(FormatError):
        read(file.path)
    file.seal()
    assert len(read(file.path)) == 2
    file.close()


def sealed(path: Path, body: bytes) -> Path:
    data = MAGIC + body
    path.write_bytes(data + xxh3_64(np.frombuffer(data, np.uint8)).to_bytes(8, "little"))
    return path


def block(name: bytes, count: int, positions: Any = ()) -> bytes:
    head = len(name).to_bytes(2, "little") + name + (0).to_bytes(8, "little")
    return head + count.to_bytes(4, "little") + np.array(positions, "<u4").tobytes()


@pytest.mark.parametrize(
    "body",
    [
        b"\1",
        b"\5\0ab",
        block(b"w", 3, [1, 2]),
        block(b"w", 2, [2, 2]),
        block(b"w", 2, [3, 2]),
        block(b"w", 1, [CHUNK_WORDS]),
        block(b"w", WHOLE - 1, [1]),
        block(b"\xff", 0),
        block(b"w", WHOLE)[:-1],
        block(b"w", 0) + b"\0",
    ],
)
def test_what_was_sealed_by_somebody_else(body: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        read(sealed(tmp_path / "places", body))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        read(tmp_path / "none")
    real = sample(tmp_path)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises((StoreError, FormatError)):
        read(tmp_path / "link")
    with pytest.raises(StoreError):
        PlacesFile(tmp_path / "no folder" / "places")
