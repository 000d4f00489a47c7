"""Measure rows over consecutive checkpoints. A row that does not round-trip never gets a number."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from thinwire.bench.bound import Bound, class_bound
from thinwire.bench.peer import CheckpointPeer, InPlacePeer, SectionedPeer
from thinwire.bench.report import (
    BOUND_ROW,
    MEMCPY_ROW,
    REFERENCE_ROW,
    BoundParts,
    Report,
    Row,
    Speed,
)
from thinwire.bench.tensors import (
    Checkpoint,
    LoadFn,
    as_checkpoint,
    changed_count,
    raw_bytes,
    require_same_layout,
)
from thinwire.errors import InvalidArgument

OnProgress = Callable[[int, str], None]
"""Called with the step's number and the row's name before each row of each step."""

DEFAULT_REPETITION_COUNT = 3

_T = TypeVar("_T")


class RoundTripError(RuntimeError):
    """A peer did not give back the new checkpoint bit for bit."""


@dataclass
class _Clock:
    """Collects (raw bytes a CPU second, raw bytes a second) of timed calls."""

    cpu_rates: list[float] = field(default_factory=list)
    wall_rates: list[float] = field(default_factory=list)

    def time(self, byte_count: int, call: Callable[[], _T]) -> _T:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        result = call()
        cpu_s, wall_s = time.process_time() - cpu_start, time.perf_counter() - wall_start
        # A clock of coarse resolution may see no time at all pass in a tiny test.
        self.cpu_rates.append(byte_count / max(cpu_s, 1e-9))
        self.wall_rates.append(byte_count / max(wall_s, 1e-9))
        return result

    def speed(self) -> Speed | None:
        if not self.cpu_rates:
            return None
        return Speed(
            cpu_mb_s=statistics.median(self.cpu_rates) / 1e6,
            wall_mb_s=statistics.median(self.wall_rates) / 1e6,
        )


@dataclass
class _Tally:
    """What one row has collected so far."""

    payload_bytes: list[int] = field(default_factory=list)
    file_bytes: list[int] = field(default_factory=list)
    section_bytes: list[int] = field(default_factory=list)
    encode: _Clock = field(default_factory=_Clock)
    decode: _Clock = field(default_factory=_Clock)
    decode_into: _Clock = field(default_factory=_Clock)


@dataclass
class _Steps:
    """What the steps themselves are, one entry each."""

    raw_bytes: list[int] = field(default_factory=list)
    changed_count: list[int] = field(default_factory=list)
    element_count: list[int] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)


def check_round_trip(peer_name: str, new: Checkpoint, decoded: Checkpoint) -> None:
    """Raise RoundTripError, naming row and tensor, unless ``decoded`` has the bits of ``new``."""
    if set(decoded) != set(new):
        missing = sorted(set(decoded) ^ set(new))
        raise RoundTripError(f"row {peer_name}: tensor {missing[0]!r} is on one side only")
    for name, tensor in new.items():
        got = decoded[name]
        if got[:2] != tensor[:2] or got.words.shape != tensor.words.shape:
            raise RoundTripError(
                f"row {peer_name}: tensor {name!r} came back as {got.dtype} {got.shape}, "
                f"not {tensor.dtype} {tensor.shape}"
            )
        wrong_count = int(np.count_nonzero(got.words != tensor.words))
        if wrong_count:
            raise RoundTripError(
                f"row {peer_name}: tensor {name!r} came back with {wrong_count} wrong elements "
                f"of {tensor.words.size}"
            )


def measure_sequence(
    paths: Sequence[Path],
    peers: Sequence[CheckpointPeer],
    *,
    load: LoadFn,
    repetition_count: int = DEFAULT_REPETITION_COUNT,
    on_progress: OnProgress | None = None,
    skipped: Mapping[str, str] | None = None,
) -> Report:
    """Measure every peer on every step from one path to the next, in one process.

    Sizes are means over the steps; speeds are medians over ``repetition_count`` calls per step.
    Rows take turns within each step, memcpy included, so all see the same machine. ``skipped``
    (row: reason) is only passed on. Raises InvalidArgument for fewer than two paths, for
    checkpoints of different layouts, without any element, or when two rows share a name;
    RoundTripError when a row gives wrong bits.
    """
    if len(paths) < 2:
        raise InvalidArgument(f"a step needs two checkpoints, got {len(paths)}")
    names = [peer.name for peer in peers]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"two rows have the same name: {', '.join(names)}")
    if repetition_count < 1:
        raise InvalidArgument(f"repetition_count must be at least 1, got {repetition_count}")

    tallies = {name: _Tally() for name in names}
    steps, memcpy = _Steps(), _Clock()
    base = as_checkpoint(load(paths[0]))
    for step, path in enumerate(paths[1:]):
        new = as_checkpoint(load(path))
        require_same_layout(base, new)
        if raw_bytes(new) == 0:
            raise InvalidArgument(f"{path} has no weights")
        _describe_step(steps, base, new)
        _measure_memcpy(memcpy, new, repetition_count)
        for peer in peers:
            if on_progress is not None:
                on_progress(step, peer.name)
            if step == 0:
                # Untimed, so that no row pays for imports, page faults or cold caches.
                check_round_trip(peer.name, new, peer.decode(base, peer.encode(base, new)))
            _measure_step(tallies[peer.name], peer, base, new, repetition_count)
        base = new
    report = _report(tallies, steps, memcpy, len(base), repetition_count, dict(skipped or {}))
    notes = {peer.name: getattr(peer, "note", "") for peer in peers}
    return replace(report, notes={name: note for name, note in notes.items() if note})


def _describe_step(steps: _Steps, base: Checkpoint, new: Checkpoint) -> None:
    steps.raw_bytes.append(raw_bytes(new))
    steps.changed_count.append(changed_count(base, new))
    steps.element_count.append(sum(tensor.words.size for tensor in new.values()))
    steps.bounds.append(class_bound(base, new))


def _measure_memcpy(clock: _Clock, new: Checkpoint, repetition_count: int) -> None:
    source = np.concatenate([tensor.words.view(np.uint8) for tensor in new.values()])
    target = np.empty_like(source)
    np.copyto(target, source)
    for _ in range(repetition_count):
        clock.time(source.nbytes, partial(np.copyto, target, source))


def _measure_step(
    tally: _Tally, peer: CheckpointPeer, base: Checkpoint, new: Checkpoint, repetition_count: int
) -> None:
    byte_count = raw_bytes(new)
    payload = b""
    for repetition in range(repetition_count):
        payload = tally.encode.time(byte_count, partial(peer.encode, base, new))
        decoded = tally.decode.time(byte_count, partial(peer.decode, base, payload))
        check_round_trip(peer.name, new, decoded)
        # Freed before the next timed call, so that it finds the allocator as the first one did.
        del decoded
        if repetition == 0:
            tally.file_bytes.append(len(payload))
            tally.payload_bytes.append(len(payload) - peer.framing_bytes(payload))
            if isinstance(peer, SectionedPeer):
                tally.section_bytes.append(peer.section_bytes(payload))
    if isinstance(peer, InPlacePeer):
        _measure_in_place(tally.decode_into, peer, payload, base, new, repetition_count)


def _measure_in_place(
    clock: _Clock,
    peer: InPlacePeer,
    payload: bytes,
    base: Checkpoint,
    new: Checkpoint,
    repetition_count: int,
) -> None:
    scratch = {name: tensor._replace(words=tensor.words.copy()) for name, tensor in base.items()}
    for repetition in range(repetition_count):
        if repetition:
            for name, tensor in base.items():
                np.copyto(scratch[name].words, tensor.words)
        clock.time(raw_bytes(new), partial(peer.decode_into, scratch, payload))
        check_round_trip(f"{peer.name} in place", new, scratch)


def _report(
    tallies: dict[str, _Tally],
    steps: _Steps,
    memcpy: _Clock,
    tensor_count: int,
    repetition_count: int,
    skipped: dict[str, str],
) -> Report:
    reference = (
        _mean_percent(tallies[REFERENCE_ROW].payload_bytes, steps.raw_bytes)
        if REFERENCE_ROW in tallies
        else None
    )
    bound_bytes = [bound.payload_bytes for bound in steps.bounds]
    rows = [_row(BOUND_ROW, _Tally(payload_bytes=bound_bytes), steps, reference)]
    rows += [_row(name, tally, steps, reference) for name, tally in tallies.items()]
    rows.append(Row(name=MEMCPY_ROW, encode=memcpy.speed(), decode=memcpy.speed()))
    return Report(
        rows=tuple(rows),
        bound=BoundParts(
            positions_percent=_mean([b.percent(b.positions_bits) for b in steps.bounds]),
            direction_percent=_mean([b.percent(b.direction_bits) for b in steps.bounds]),
            size_percent=_mean([b.percent(b.size_bits) for b in steps.bounds]),
        ),
        step_count=len(steps.bounds),
        tensor_count=tensor_count,
        raw_bytes=steps.raw_bytes[-1],
        changed_percent=_mean_percent(steps.changed_count, steps.element_count),
        repetition_count=repetition_count,
        machine={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "system": platform.system(),
            "machine": platform.machine(),
        },
        skipped=skipped,
    )


def _row(name: str, tally: _Tally, steps: _Steps, reference: float | None) -> Row:
    payload_percent = _mean_percent(tally.payload_bytes, steps.raw_bytes)
    change_count = sum(steps.changed_count)
    return Row(
        name=name,
        payload_percent=payload_percent,
        file_percent=_mean_percent(tally.file_bytes, steps.raw_bytes) if tally.file_bytes else None,
        bits_per_change=8 * sum(tally.payload_bytes) / change_count if change_count else None,
        times_reference=payload_percent / reference if reference else None,
        encode=tally.encode.speed(),
        decode=tally.decode.speed(),
        decode_into=tally.decode_into.speed(),
        step_payload_bytes=tuple(tally.payload_bytes),
        section_percent=(
            _mean_percent(tally.section_bytes, steps.raw_bytes) if tally.section_bytes else None
        ),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _mean_percent(parts: Sequence[int], wholes: Sequence[int]) -> float:
    return 100 * _mean([part / whole for part, whole in zip(parts, wholes, strict=True)])
