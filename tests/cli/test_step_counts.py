"""Histograms of step sizes agree with plain arithmetic and with what the container counts."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire import encode_tensors, inspect
from thinwire.cli.step_counts import count_steps, octave_label
from thinwire.codec.delta import ChunkChanges, Delta
from thinwire.codec.dtypes import DTYPES


def ordered(word: int, bits: int) -> int:
    return (1 << bits) - 1 - word if word >> (bits - 1) else word | 1 << (bits - 1)


def expected(old: list[int], new: list[int], bits: int, is_ordered: bool) -> dict[str, list[int]]:
    counts = {"down": [0] * 64, "up": [0] * 64}
    for before, after in zip(old, new, strict=True):
        if is_ordered:
            before, after = ordered(before, bits), ordered(after, bits)
        step = (after - before) % (1 << bits)
        size, way = (step, "up") if step < 1 << (bits - 1) else ((1 << bits) - step, "down")
        counts[way][size.bit_length() - 1] += 1
    for row in counts.values():
        while row and row[-1] == 0:
            row.pop()
    return counts


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    row = DTYPES[dtype]
    bits = 8 * row.word_bytes
    rng = np.random.default_rng(bits)
    corners = [0, 1, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 1]
    old, new = [], []
    for before in corners:
        for after in [*corners, before ^ 1, (before + 2**53 - 1) % (1 << bits)]:
            old.append(before)
            new.append(after)
    random = rng.integers(0, 256, (2, 500, row.word_bytes), dtype=np.uint8)
    old += [int.from_bytes(word.tobytes(), "little") for word in random[0]]
    new += [int.from_bytes(word.tobytes(), "little") for word in random[1]]
    kept = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    old, new = [a for a, _ in kept], [b for _, b in kept]
    base, words = (np.array(side, f"<u{row.word_bytes}").view(np.uint8) for side in (old, new))
    change = ChunkChanges("w", 0, np.arange(len(old), dtype="<u4"), words, row.word_bytes)
    counts = count_steps({"w": base}, {"w": dtype}, [change])["w"]
    wanted = expected(old, new, bits, row.ordered)
    assert counts._asdict() == wanted
    assert counts.total == len(old)


def test_the_container_counts_the_same() -> None:
    rng = np.random.default_rng(3)
    base = {name: rng.normal(size=n).astype(np.float16) for name, n in (("a", 90_000), ("b", 50))}
    new = {}
    for name, array in base.items():
        words = array.view(np.uint16).copy()
        chosen = rng.random(words.size) < 0.05
        words[chosen] += rng.integers(1, 40, int(chosen.sum())).astype(np.uint16)
        new[name] = words.view(np.float16)
    payload = encode_tensors(base, new)
    bases = {name: array.view(np.uint8) for name, array in base.items()}
    with Delta.open(payload) as delta:
        counts = count_steps(bases, dict.fromkeys(base, "F16"), delta.changes(bases))
    down, up = inspect(payload).steps
    for counted, whole in (("down", down), ("up", up)):
        rows = [getattr(counts[name], counted) for name in counts]
        summed = [sum(row[i] for row in rows if i < len(row)) for i in range(len(whole))]
        assert summed == whole
        assert max(map(len, rows)) <= len(whole)


def test_labels() -> None:
    assert [octave_label(octave) for octave in (0, 1, 2, 10)] == ["1", "2-3", "4-7", "1024-2047"]
