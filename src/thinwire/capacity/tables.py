"""What was measured at some changed shares, and what lies between."""

from __future__ import annotations

from itertools import pairwise
from math import log, log2
from typing import NamedTuple


class Point(NamedTuple):
    """A measurement.

    Attributes:
        share: Changed weights, of all.
        value: What was found there.
        source: Where it stands.
    """

    share: float
    value: float
    source: str


# Bits of a whole delta file per changed BF16 weight, one optimizer step a version. Where several
# runs have about the same share, the one of most bits.
BITS_PER_CHANGE = (
    Point(0.00068, 6.87, "docs/changes.md: MiniLM, AdamW, 3e-7"),
    Point(0.0035, 7.23, "docs/benchmarks.md: SmolLM2-135M, steps 6 to 8"),
    Point(0.01204, 6.95, "docs/benchmarks.md: a thousand consecutive steps"),
    Point(0.0157, 6.74, "docs/changes.md: decoder, AdamW, 1e-6, spread"),
    Point(0.0368, 5.78, "docs/changes.md: decoder, AdamW, 3e-6"),
    Point(0.08878, 5.17, "docs/changes.md: decoder, AdamW, 1e-5"),
    Point(0.38958, 4.21, "docs/changes.md: decoder, AdamW, 1e-4"),
    Point(0.88561, 5.20, "docs/changes.md: decoder, AdamW, 1e-4, 16 steps in one"),
)

# Our bytes over those of Fireworks' arc_v3 on the same steps.
OF_ARC3 = (
    Point(0.00068, 0.225, "docs/benchmarks.md: MiniLM, lr 3e-7"),
    Point(0.00204, 0.308, "docs/benchmarks.md: MiniLM, lr 1e-6"),
    Point(0.00662, 0.397, "docs/benchmarks.md: MiniLM, lr 3e-6"),
    Point(0.01204, 0.429, "docs/benchmarks.md: a thousand consecutive steps"),
)

# A delta over k versions, in step deltas: docs/changes.md, "Delta, % of raw", decoder, AdamW, 1e-6.
MERGED = ((1, 1.0), (2, 1.58), (4, 2.46), (8, 3.72), (16, 5.49))
# Words changed over k versions, in those of one step: the same run, "Changed, %".
MERGED_CHANGES = ((1, 1.0), (2, 1.74), (4, 2.97), (8, 4.90), (16, 7.82))
# The most that 16 steps at 1e-4 took there; random bits take 100.1 % (make bars).
_MOST_OF_RAW = 1.001


def between(points: tuple[Point, ...], share: float) -> float:
    """The value at a share: on a line over its logarithm, and flat beyond the ends."""
    if share <= points[0].share:
        return points[0].value
    for low, high in pairwise(points):
        if share <= high.share:
            part = log(share / low.share) / log(high.share / low.share)
            return low.value + part * (high.value - low.value)
    return points[-1].value


def is_covered(points: tuple[Point, ...], share: float) -> bool:
    """Whether a share lies between measured ones."""
    return points[0].share <= share <= points[-1].share


def merged_growth(versions: int) -> float:
    """Bytes of a delta over some versions, in step deltas."""
    return _grown(MERGED, versions)


def merged_bytes(step_bytes: float, versions: int, raw_bytes: float) -> int:
    """About what a merged delta over some versions takes."""
    return int(min(step_bytes * merged_growth(versions), raw_bytes * _MOST_OF_RAW))


def merged_share(share: float, versions: int) -> float:
    """Words that differ between two versions that lie some versions apart, of all."""
    return min(1.0, share * _grown(MERGED_CHANGES, versions))


def _grown(points: tuple[tuple[int, float], ...], versions: int) -> float:
    """Between measured doublings a line over the logarithm; beyond, the last doubling goes on."""
    if versions <= 1:
        return float(max(0, versions))
    at = log2(versions)
    last = len(points) - 1
    if at >= last:
        ratio = points[-1][1] / points[-2][1]
        return float(points[-1][1] * ratio ** (at - last))
    low = int(at)
    ratio = points[low + 1][1] / points[low][1]
    return float(points[low][1] * ratio ** (at - low))
