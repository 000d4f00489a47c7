"""Along a way: fetch each step, verify it, apply it to the sink, while the next is fetched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from thinwire.checkpoint import Checkpoint
from thinwire.codec.delta_set import DeltaSet
from thinwire.errors import NotFound, ThinwireError
from thinwire.follow.fetch import Fetcher
from thinwire.follow.install import install_anchor, install_reference
from thinwire.follow.loading import check_room, load_delta
from thinwire.follow.metering import ProgressMeter
from thinwire.follow.prefetch import ahead
from thinwire.follow.reference import local_copy
from thinwire.follow.selection import Selection
from thinwire.follow.sink import Mark, Sink
from thinwire.follow.steps import Step, check_record
from thinwire.follow.stream import Stream
from thinwire.stream.events import Applied, Fetched, Observers, Progressed
from thinwire.stream.records import Manifest, Source
from thinwire.stream.version import Version

# A delta is never much larger than the model; small models get some room for names and files.
_DELTA_ROOM_BYTES = 64 << 20

OnBytes = Callable[[int], None] | None


class Loaded(NamedTuple):
    """A step with its target's manifest, and its delta; an anchor has none, it is streamed."""

    step: Step
    manifest: Manifest
    delta: DeltaSet | None


class StepFailed(Exception):
    """Which step failed: there may be another way."""

    def __init__(self, step: Step, error: ThinwireError) -> None:
        super().__init__(str(error))
        self.step = step
        self.error = error


class Walker:
    """Takes a sink along the steps of a way."""

    def __init__(
        self,
        stream: Stream,
        sink: Sink,
        fetcher: Fetcher,
        selection: Selection,
        base: str | os.PathLike[str] | None,
        observers: Observers,
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._fetcher = fetcher
        self._selection = selection
        self.base = base
        self._observers = observers

    def has_copy(self, source: Source) -> bool:
        """Whether a copy of a source is on this machine; it is proved when it is used."""
        try:
            local_copy(source, self.base)
        except NotFound:
            return False
        return True

    def walk(
        self,
        way: Iterator[Step],
        mark: Mark | None,
        on_bytes: OnBytes = None,
    ) -> Iterator[Version]:
        """Take every step; yields each version that the sink then holds.

        Raises:
            StepFailed: A step cannot be fetched or applied; the sink is where the last one led.
        """
        for loaded in ahead(self._loads(way, mark, self._delta_limit(mark))):
            if isinstance(loaded, StepFailed):
                raise loaded
            try:
                version = self.apply(loaded, mark, on_bytes)
            except ThinwireError as error:
                raise StepFailed(loaded.step, error) from error
            yield version
            mark = self._sink.mark()

    def load(self, step: Step, mark: Mark | None) -> Loaded:
        """Fetch and open the delta of a step from what the sink holds.

        Raises:
            StepFailed: It is not what it should be, or is not there.
        """
        found = next(self._loads(iter([step]), mark, self._delta_limit(mark)))
        if isinstance(found, StepFailed):
            raise found
        return found

    def apply(self, loaded: Loaded, mark: Mark | None, on_bytes: OnBytes = None) -> Version:
        """Apply a loaded step to the sink and close it.

        Raises:
            ThinwireError: The sink is as it was.
        """
        start_s = time.perf_counter()
        step, manifest, delta = loaded
        version = Version.of(manifest)
        new = Mark.of(version, manifest.stream, self._selection.patterns)
        if delta is None:
            self._check_room(step, None)
            fetcher = self._fetcher.fork(self._fetch_meter(step).count)
            install_anchor(self._sink, step, new, fetcher, self._selection, on_bytes)
            self._tell_fetched(step, fetcher, start_s)
        else:
            with delta:
                self._apply_delta(step, manifest, delta, new, on_bytes)
        self._observers.on_event(
            Applied(
                url=self._stream.url,
                lineage=step.lineage,
                version=version.version,
                kind=step.kind,
                base=None if mark is None else mark.version,
                step=version.step,
                wall_s=time.perf_counter() - start_s,
                age_s=time.time() - version.created_ms / 1000,
            )
        )
        return version

    def _apply_delta(
        self, step: Step, manifest: Manifest, delta: DeltaSet, new: Mark, on_bytes: OnBytes
    ) -> None:
        is_reference = step.kind == "reference"
        total_bytes = manifest.raw_bytes if is_reference else 0
        meter = self._meter(step, "apply", total_bytes)
        if not is_reference:
            self._sink.apply(delta, new)
            return
        assert manifest.source is not None
        path = local_copy(manifest.source, self.base)
        copy = Checkpoint.open(path, ignore_subfolders=True)
        on_made = meter.beside(on_bytes)
        install_reference(self._sink, step, new, delta, copy, self._selection, on_made)

    def _loads(
        self, way: Iterator[Step], mark: Mark | None, limit_bytes: int | None
    ) -> Iterator[Loaded | StepFailed]:
        """Runs beside what is done to the sink, and so never looks at it."""
        weights = None if mark is None else mark.weights
        for step in way:
            try:
                manifest = step.manifest or self._stream.require(step.lineage, step.target)
                check_record(step, manifest)
                delta = None
                if step.kind == "anchor":
                    limit_bytes = 2 * step.payload_bytes + _DELTA_ROOM_BYTES
                else:
                    base_weights = None if step.base is None else weights
                    delta = self._load_delta(step, base_weights, limit_bytes)
            except ThinwireError as error:
                yield StepFailed(step, error)
                return
            yield Loaded(step, manifest, delta)
            weights = step.weights

    def _load_delta(
        self, step: Step, base_weights: str | None, limit_bytes: int | None
    ) -> DeltaSet:
        self._check_room(step, limit_bytes)
        start_s = time.perf_counter()
        fetcher = self._fetcher.fork(self._fetch_meter(step).count)
        delta = load_delta(
            step,
            fetcher,
            self._sink.scratch(),
            base_weights=base_weights,
            # A reference names tensors only: it is small, and a copy is proved as a whole.
            selection=Selection() if step.kind == "reference" else self._selection,
        )
        self._tell_fetched(step, fetcher, start_s)
        return delta

    def _tell_fetched(self, step: Step, fetcher: Fetcher, start_s: float) -> None:
        self._observers.on_event(
            Fetched(
                url=self._stream.url,
                lineage=step.lineage,
                version=step.target.version,
                kind=step.kind,
                payload_bytes=fetcher.fetched_bytes,
                cached_bytes=fetcher.cached_bytes,
                wall_s=time.perf_counter() - start_s,
            )
        )

    def _fetch_meter(self, step: Step) -> ProgressMeter:
        # Of a part of the model nobody knows yet what it takes.
        total_bytes = step.payload_bytes if self._selection.is_all else 0
        return self._meter(step, "fetch", total_bytes)

    def _meter(
        self, step: Step, phase: Literal["fetch", "apply"], total_bytes: int
    ) -> ProgressMeter:
        return ProgressMeter(
            self._observers,
            Progressed(
                url=self._stream.url,
                lineage=step.lineage,
                version=step.target.version,
                phase=phase,
                total_bytes=total_bytes,
            ),
        )

    def _check_room(self, step: Step, limit_bytes: int | None) -> None:
        if not self._selection.is_all:
            # A part is fetched; which one shows only then.
            return
        what = f"version {step.target.version} of {self._stream.url}"
        check_room(self._sink.scratch(), step.payload_bytes, limit_bytes, what)

    def _delta_limit(self, mark: Mark | None) -> int | None:
        """The most that a delta to what the sink holds can reasonably have."""
        if mark is None or not self._selection.is_all:
            return None
        tensors = self._sink.checkpoint().tensors.values()
        return 2 * sum(tensor.data.size for tensor in tensors) + _DELTA_ROOM_BYTES
