"""What changes between checkpoints of a run, and what it costs, for each number of steps a publish.

A window of k steps is one delta: from the checkpoint before its first step to that after its last.
Every delta is decoded and compared bit for bit before its size counts.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from thinwire.bench.bound import class_of
from thinwire.bench.corpus import SETTLING_STEPS, SHORT_RUN_STEPS
from thinwire.bench.measure import check_round_trip
from thinwire.bench.ours import decode_into, encode, load_checkpoint
from thinwire.bench.tensors import Checkpoint, Words, changed_count, raw_bytes

STEPS_PER_PUBLISH = (1, 2, 4, 8, 16)
# A run of so many steps can wait longer for AdamW's moments than the bench's SETTLING_STEPS do,
# and still hold whole windows of 16.
LONG_RUN_STEPS = 48
LONG_RUN_FIRST = 16
BF16_MANTISSA_BITS = 7
# Classes of which less changes in a step may still wait for their first change.
TELLING_SHARE = 0.05
EXPONENT_BIAS = 127
_RUN_NAME = re.compile(
    r"(?P<model>\w+?)(-(?P<optimizer>adamw|muon))?-lr(?P<rate>[\d.]+e-\d+)(?P<spread>-spread)?"
)
_MODELS = {"minilm": "MiniLM", "smollm2": "SmolLM2"}
Counts: TypeAlias = npt.NDArray[np.float64]
_OPTIMIZERS = {None: "AdamW", "adamw": "AdamW", "muon": "Muon"}


def short_rate(learning_rate: float) -> str:
    """1e-6 and not 1e-06, as the folders of runs are named."""
    digits, exponent = f"{learning_rate:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


class Kind(NamedTuple):
    """What a run is, read from the name of its folder; the project's corpus is all AdamW."""

    model: str
    optimizer: str
    learning_rate: float
    is_spread: bool

    @property
    def series(self) -> str:
        """What a line of a plot is named: all but the learning rate."""
        ending = ", spread" if self.is_spread else ""
        return f"{self.model}, {self.optimizer}{ending}"


def kind_of(run_name: str) -> Kind:
    """Raises ValueError for a folder that is not named as the corpus makers name theirs."""
    found = _RUN_NAME.fullmatch(run_name)
    if found is None:
        raise ValueError(f"{run_name!r} is not <model>[-<optimizer>]-lr<rate>[-spread]")
    return Kind(
        _MODELS.get(found["model"], found["model"]),
        _OPTIMIZERS[found["optimizer"]],
        float(found["rate"]),
        found["spread"] is not None,
    )


class Window(NamedTuple):
    """One delta over ``step_count`` optimizer steps, the first of them being ``first`` + 1."""

    first: int
    step_count: int
    changed_count: int
    element_count: int
    payload_bytes: int
    raw_bytes: int
    encode_s: float
    apply_s: float


class Row(NamedTuple):
    """A run published every ``step_count`` optimizer steps: means over its windows.

    ``of_single_bytes``: the bytes of the windows as a share of what the same steps take one by one;
    ``of_single_changes``: likewise the changes. Speeds are medians, raw megabytes a CPU second.
    """

    step_count: int
    window_count: int
    changed_percent: float
    payload_percent: float
    bits_per_change: float
    percent_per_step: float
    of_single_bytes: float
    of_single_changes: float
    encode_mb_s: float
    apply_mb_s: float


class ClassShare(NamedTuple):
    """The weights of one BF16 exponent: magnitudes from 2^``exponent`` to twice that.

    ``move``: how far a BF16 value of this class moved in a window, in learning rates, the mean over
    all weights of the class. While a step is shorter than the spacing few values move, but by the
    whole spacing: on average they go as far as the FP32 masters do.
    """

    exponent: int
    weight_percent: float
    changed_percent: float
    move: float


class Part(NamedTuple):
    """Some of a model's weights, and what of them one step changes."""

    weight_percent: float
    changed_percent: float


@dataclass(frozen=True)
class Run:
    """One measured run. ``changed_percents`` is that of every single step, from step 1 on.

    ``move``: by how many learning rates a weight moves in a step, the median over the matrices.
    ``expected_percent``: what would change in a step if in each tensor the large weights moved as
    far as the small ones (see `expected_count`). ``parts``: the embeddings and the rest.
    ``classes``: by steps a publish, what of each exponent changes.
    """

    name: str
    kind: Kind
    element_count: int
    first: int
    last: int
    changed_percents: tuple[float, ...]
    move: float
    expected_percent: float
    parts: tuple[Part, Part]
    rows: tuple[Row, ...]
    classes: dict[int, tuple[ClassShare, ...]]

    def row(self, step_count: int) -> Row | None:
        """The row of so many steps a publish, if the run is long enough for one."""
        return next((row for row in self.rows if row.step_count == step_count), None)


def spacing_of(exponent: int) -> float:
    """From one BF16 number to the next, for magnitudes from 2^exponent to twice that."""
    return float(2.0 ** (exponent - BF16_MANTISSA_BITS))


def first_settled(last: int) -> int:
    """The checkpoint that the first window starts from, in a run of ``last`` steps."""
    if last >= LONG_RUN_STEPS:
        return LONG_RUN_FIRST
    return SETTLING_STEPS if last > SHORT_RUN_STEPS else 0


def window_starts(first: int, last: int, step_count: int) -> range:
    """Windows side by side from ``first`` on; steps that fill no window are left out."""
    return range(first, last - step_count + 1, step_count)


def measure_window(base: Checkpoint, new: Checkpoint, first: int, step_count: int) -> Window:
    """Encode, apply to a copy, compare: RoundTripError unless every bit is right."""
    start_s = time.process_time()
    payload = encode(base, new)
    encoded_s = time.process_time()
    target = {name: tensor._replace(words=tensor.words.copy()) for name, tensor in base.items()}
    copied_s = time.process_time()
    decode_into(target, payload)
    applied_s = time.process_time()
    check_round_trip("thinwire", new, target)
    return Window(
        first,
        step_count,
        changed_count(base, new),
        sum(tensor.words.size for tensor in new.values()),
        len(payload),
        raw_bytes(new),
        encoded_s - start_s,
        applied_s - copied_s,
    )


def to_row(windows: Sequence[Window], singles: Sequence[Window]) -> Row:
    """The row of ``windows``, all of one length; ``singles`` are deltas of one step each."""
    step_count = windows[0].step_count
    covered = {start + i for start in (w.first for w in windows) for i in range(step_count)}
    parts = [single for single in singles if single.first in covered]
    changed = sum(window.changed_count for window in windows)
    payload = sum(window.payload_bytes for window in windows)
    raw = sum(window.raw_bytes for window in windows)
    payload_percent = 100 * payload / raw
    return Row(
        step_count=step_count,
        window_count=len(windows),
        changed_percent=100 * changed / sum(window.element_count for window in windows),
        payload_percent=payload_percent,
        bits_per_change=8 * payload / max(changed, 1),
        percent_per_step=payload_percent / step_count,
        of_single_bytes=payload / sum(part.payload_bytes for part in parts),
        of_single_changes=changed / max(sum(part.changed_count for part in parts), 1),
        encode_mb_s=_speed(windows, lambda window: window.encode_s),
        apply_mb_s=_speed(windows, lambda window: window.apply_s),
    )


def _speed(windows: Sequence[Window], seconds: Callable[[Window], float]) -> float:
    # A coarse clock may see no time pass on a tiny model.
    return statistics.median(w.raw_bytes / max(seconds(w), 1e-9) for w in windows) / 1e6


def values_of(words: Words) -> npt.NDArray[np.float32]:
    """BF16 words as FP32 numbers."""
    values: npt.NDArray[np.float32] = (words.astype(np.uint32) << 16).view(np.float32)
    return values


def count_classes(steps: Sequence[Path], step_count: int) -> dict[str, Counts]:
    """The counts of every BF16 tensor over all settled windows of a run."""
    first, last = first_settled(len(steps) - 1), len(steps) - 1
    counts: dict[str, Counts] = {}
    for start in window_starts(first, last, step_count):
        base, new = load_checkpoint(steps[start]), load_checkpoint(steps[start + step_count])
        for name, tensor in new.items():
            if tensor.dtype == "BF16":
                found = count_tensor(base[name].words, tensor.words)
                counts[name] = counts[name] + found if name in counts else found
    return counts


def sum_counts(counts: Mapping[str, Counts]) -> Counts:
    """The counts of all tensors together."""
    total: Counts = np.sum([np.zeros((3, 256)), *counts.values()], axis=0)
    return total


def to_part(counts: Mapping[str, Counts], weight_count: float) -> Part:
    """These tensors of a model of ``weight_count`` weights, all windows together."""
    weights, changed, _ = sum_counts(counts).sum(axis=1)
    return Part(float(100 * weights / weight_count), float(100 * changed / max(weights, 1.0)))


def is_embedding(name: str, shape: Sequence[int]) -> bool:
    """Whether rows of a matrix belong to tokens, by its name as models on Hugging Face have it."""
    return len(shape) == 2 and any(part in name for part in ("embed", "wte", "lm_head"))


def count_tensor(base: Words, new: Words) -> Counts:
    """Three rows by exponent field: weights, changed ones, and how far these went in all."""
    classes = class_of(base, "BF16")
    changed = np.flatnonzero(base != new)
    step = np.abs(values_of(new[changed]) - values_of(base[changed])).astype(np.float64)
    return np.stack(
        [
            np.bincount(classes, minlength=256).astype(np.float64),
            np.bincount(classes[changed], minlength=256).astype(np.float64),
            np.bincount(classes[changed], step, minlength=256),
        ]
    )


def class_shares(counts: Counts, learning_rate: float) -> tuple[ClassShare, ...]:
    """What of each exponent changed."""
    totals, changed, distance = counts
    return tuple(
        ClassShare(
            exponent=field - EXPONENT_BIAS,
            weight_percent=float(100 * totals[field] / totals.sum()),
            changed_percent=float(100 * changed[field] / totals[field]),
            move=float(distance[field] / totals[field] / learning_rate),
        )
        for field in np.flatnonzero(totals).tolist()
    )


def mean_distance(counts: Counts) -> float | None:
    """How far a weight of one tensor went, the mean over its small weights; None: cannot be told.

    Small are the classes of which enough changes in one step. The larger ones may still wait for
    their first change, however far their masters went.
    """
    totals, changed, distance = counts
    is_telling = changed > TELLING_SHARE * totals
    return (
        float(distance[is_telling].sum() / totals[is_telling].sum()) if is_telling.any() else None
    )


def expected_count(counts: Counts) -> float:
    """How many weights would change if the large ones moved as far as the small ones do.

    A move changes a BF16 value with probability move / spacing, once the masters lie anywhere
    between BF16 values. Where no move can be told it is what did change.
    """
    length = mean_distance(counts)
    if length is None:
        return float(counts[1].sum())
    spacings = np.array([spacing_of(field - EXPONENT_BIAS) for field in range(256)])
    return float(np.sum(counts[0] * np.minimum(1.0, length / spacings)))


def measure_run(
    name: str, steps: Sequence[Path], announce: Callable[[str], None] = lambda _: None
) -> Run:
    """All rows of one run; ``steps`` are its checkpoint folders, numbered 0, 1, 2, ..."""
    numbers = [int(step.name) for step in steps]
    if numbers != list(range(len(steps))):
        raise ValueError(f"run {name} does not hold the steps 0, 1, 2, ...: {numbers}")
    kind, last = kind_of(name), numbers[-1]
    first = first_settled(last)
    rows: list[Row] = []
    singles: list[Window] = []
    for step_count in STEPS_PER_PUBLISH:
        # Single steps are measured from the start: the plot of how a run settles shows them.
        begin = 0 if step_count == 1 else first
        windows = [
            measure_window(
                load_checkpoint(steps[start]),
                load_checkpoint(steps[start + step_count]),
                start,
                step_count,
            )
            for start in window_starts(begin, last, step_count)
        ]
        if step_count == 1:
            singles = windows
            windows = [window for window in windows if window.first >= first]
        if windows:
            rows.append(to_row(windows, singles))
            announce(
                f"{name}, {step_count} steps a publish: {rows[-1].changed_percent:.3f} % changed, "
                f"{rows[-1].payload_percent:.4f} % of raw"
            )
    counts = {row.step_count: count_classes(steps, row.step_count) for row in rows}
    shapes = {name: tensor.shape for name, tensor in load_checkpoint(steps[0]).items()}
    moves = [
        length / kind.learning_rate
        for name, found in counts[1].items()
        if len(shapes[name]) > 1 and (length := mean_distance(found)) is not None
    ]
    embeddings = {name: c for name, c in counts[1].items() if is_embedding(name, shapes[name])}
    rest = {name: found for name, found in counts[1].items() if name not in embeddings}
    weight_count = float(sum_counts(counts[1])[0].sum())
    return Run(
        name=name,
        kind=kind,
        element_count=singles[0].element_count,
        first=first,
        last=last,
        changed_percents=tuple(100 * s.changed_count / s.element_count for s in singles),
        move=statistics.median(moves) if moves else 0.0,
        expected_percent=100 * sum(map(expected_count, counts[1].values())) / weight_count,
        parts=(to_part(embeddings, weight_count), to_part(rest, weight_count)),
        rows=tuple(rows),
        classes={
            step_count: class_shares(sum_counts(found), kind.learning_rate)
            for step_count, found in counts.items()
        },
    )
