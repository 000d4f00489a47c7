"""Objects in blocks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ChecksumMismatch, Corrupt, LimitExceeded
from thinwire.stream.blocks import (
    MAX_BLOCK_BYTES,
    MAX_BLOCKS,
    MIN_BLOCK_BYTES,
    ObjectRecord,
    block_bytes_for,
    blocks_of,
    check_block,
    check_record,
    record_of,
    record_of_file,
)

BLOCK = MIN_BLOCK_BYTES
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7]


def some_bytes(size: int) -> bytes:
    return (b"0123456789abcdefg" * (size // 17 + 1))[:size]


@pytest.mark.parametrize("size", SIZES)
def test_record_of_bytes_and_of_a_file(size: int, tmp_path: Path) -> None:
    data = some_bytes(size)
    (tmp_path / "object").write_bytes(data)
    record = record_of(data)
    assert record == record_of_file(tmp_path / "object")
    check_record(record, "it")
    assert record.size == size
    spans = [record.span(number) for number in range(len(record.blocks))]
    assert [data[a:b] for a, b in spans] == (
        [data[s : s + BLOCK] for s in range(0, size, BLOCK)] or [b""]
    )
    for number, (start, stop) in enumerate(spans):
        assert record.blocks[number] == blake3(data[start:stop]).hexdigest()
        check_block(record, number, data[start:stop], "it")
        with pytest.raises(ChecksumMismatch):
            check_block(record, number, data[start:stop] + b"x", "it")


def test_digest_of_an_object() -> None:
    one, two = record_of(some_bytes(9)), record_of(some_bytes(2 * BLOCK))
    assert one.digest == blake3(some_bytes(9)).hexdigest()
    assert two.digest == blake3("".join(two.blocks).encode()).hexdigest()


@given(st.integers(0, MAX_BLOCK_BYTES * MAX_BLOCKS))
def test_block_size_keeps_the_list_short(size: int) -> None:
    block = block_bytes_for(size)
    assert MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES
    assert block & (block - 1) == 0
    count = max(1, -(-size // block))
    assert count <= MAX_BLOCKS
    assert count <= 256 or block == MAX_BLOCK_BYTES
    assert block == MIN_BLOCK_BYTES or size > 128 * block


@given(
    st.lists(st.tuples(st.integers(0, 5 * BLOCK), st.integers(0, 5 * BLOCK)), max_size=4),
)
def test_blocks_of_ranges(ranges: list[tuple[int, int]]) -> None:
    record = ObjectRecord(5 * BLOCK, BLOCK, ["0" * 64] * 5)
    wanted = {
        number
        for number in range(5)
        for start, stop in ranges
        if max(start, number * BLOCK) < min(stop, (number + 1) * BLOCK)
    }
    assert blocks_of(record, ranges) == sorted(wanted)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"block": 0}, Corrupt),
        ({"block": -BLOCK}, Corrupt),
        ({"block": BLOCK + 1}, Corrupt),
        ({"block": BLOCK // 2}, Corrupt),
        ({"block": 2 * MAX_BLOCK_BYTES}, Corrupt),
        ({"size": -1}, LimitExceeded),
        ({"size": 2**62}, LimitExceeded),
        ({"size": 3 * BLOCK}, Corrupt),
        ({"size": BLOCK}, Corrupt),
        ({"blocks": []}, Corrupt),
        ({"blocks": ["0" * 64, "0" * 63]}, Corrupt),
        ({"blocks": ["0" * 64, "A" * 64]}, Corrupt),
        ({"blocks": ["0" * 64, "../" + "0" * 61]}, Corrupt),
        ({"blocks": ["0" * 64, "0" * 64 + "\n"]}, Corrupt),
    ],
)
def test_records_that_we_would_not_write(change: dict[str, object], error: type) -> None:
    record = record_of(some_bytes(BLOCK + 1))
    check_record(record, "it")
    with pytest.raises(error):
        check_record(msgspec.structs.replace(record, **change), "it")
