"""From what a sink holds to a version, around whatever turns out to be missing or wrong."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.errors import (
    BaseMismatch,
    FormatError,
    HistoryPruned,
    NotFound,
    TensorMismatch,
    ThinwireError,
)
from thinwire.follow.guard import Guard
from thinwire.follow.prefetch import Beside
from thinwire.follow.routing import Router
from thinwire.follow.sink import Mark
from thinwire.follow.steps import Step, check_chain, step_of_version
from thinwire.follow.stream import Stream
from thinwire.follow.walking import Loaded, OnBytes, StepFailed, Walker
from thinwire.stream.encoding import link_of
from thinwire.stream.records import Manifest
from thinwire.stream.version import Version

# Ways that were tried and failed before giving up.
_MAX_DETOURS = 16


class Traveller:
    """Takes a sink to versions.

    Args:
        stream: The stream.
        guard: Knows what the sink holds.
        walker: Takes the steps.
        on_failure: Told of every step that failed and is being avoided.
        on_way: Told of the lineage and the version with which a way begins.
        on_version: Told of every version that the sink reached; true: go no further.
    """

    def __init__(
        self,
        stream: Stream,
        guard: Guard,
        walker: Walker,
        on_failure: Callable[[str, int, ThinwireError], None],
        on_way: Callable[[str, int], None],
        on_version: Callable[[Version], bool],
    ) -> None:
        self._stream = stream
        self._guard = guard
        self._walker = walker
        self._on_failure = on_failure
        self._on_way = on_way
        self._on_version = on_version
        self.router = Router(stream, walker.has_copy)

    def follow_on(
        self, mark: Mark, following: Manifest, on_bytes: OnBytes
    ) -> tuple[Version | None, Manifest, ThinwireError | None]:
        """Go to the version after ours, if it is the newest.

        While its delta is fetched, it shows whether there is yet another version.

        Returns:
            The version that was reached; or None, with a newer manifest to plan a way from and
            what prevented it, if anything did.
        """
        step = step_of_version(following, self._stream.url)
        check_chain([step], mark.link, step.target)
        beyond = Beside(lambda: self._stream.manifest(following.lineage, following.version + 1))
        loaded: Loaded | None = None
        last: ThinwireError | None = None
        try:
            loaded = self._walker.load(step, mark)
        except StepFailed as failed:
            last = failed.error
        more = beyond.result()
        if last is not None:
            last = self._note(StepFailed(step, last))
        elif more is None and loaded is not None:
            try:
                return self._walker.apply(loaded, mark, on_bytes), following, None
            except ThinwireError as error:
                last = self._note(StepFailed(step, error))
        elif loaded is not None and loaded.delta is not None:
            loaded.delta.close()
        return None, more or following, last

    def go(
        self,
        mark: Mark | None,
        wanted: Manifest,
        on_bytes: OnBytes = None,
        last: ThinwireError | None = None,
    ) -> Version:
        """Go to a version by the cheapest way that works.

        Args:
            mark: What the sink holds; None: nothing that can be used.
            wanted: The version.
            on_bytes: Called with the bytes of a whole version as they arrive.
            last: What went wrong before, to be raised where there is no other way.

        Raises:
            ThinwireError: No way works; the sink is at a whole version.
        """
        target = link_of(wanted)
        for _ in range(_MAX_DETOURS):
            if mark is not None and mark.link == target:
                return mark.to_version()
            start, after = mark, 0
            if isinstance(last, TensorMismatch) and mark is not None and mark.tensors:
                # A part of the model is right, and a step does not fit it, because tensors came or
                # went: from an anchor, but never backwards.
                start, after = None, mark.version
            elif isinstance(last, BaseMismatch | TensorMismatch):
                # What is held is not what its mark says: anything is better.
                start = mark = None
            try:
                way = self.router.way(start, wanted, after)
            except (HistoryPruned, NotFound) as error:
                if last is None:
                    raise
                # That something is missing says less than that it was pruned, where it was.
                raise (self.router.pruned or last) from error
            self._on_way(wanted.lineage, way.begins)
            try:
                for version in self._walker.walk(way.steps, start, on_bytes):
                    # Only what was reached from here on is known to be right.
                    mark = self._guard.mark()
                    last = None
                    if self._on_version(version):
                        return version
            except StepFailed as failed:
                last = self._note(failed)
        raise last or HistoryPruned(f"no way led to version {wanted.version}")

    def bring_to(self, mark: Mark | None, manifest: Manifest) -> Version:
        """Go to a version, forwards or backwards; to the next one without asking for a way."""
        if mark is not None and mark.lineage != manifest.lineage:
            mark = None
        if mark is not None and manifest.base == mark.link and manifest.kind == "delta":
            step = step_of_version(manifest, self._stream.url)
            try:
                return next(self._walker.walk(iter([step]), mark))
            except StepFailed as failed:
                return self.go(self._guard.mark(), manifest, None, self._note(failed))
        if mark is not None and mark.version > manifest.version:
            mark = None
        return self.go(mark, manifest)

    def take(self, mark: Mark | None, step: Step, manifest: Manifest) -> Version:
        """Take one given step to the version of ``manifest``, and no other.

        Raises:
            ThinwireError: It is not what it should be; the sink is as it was.
        """
        check_chain([step], None if mark is None else mark.link, link_of(manifest))
        try:
            return next(self._walker.walk(iter([step._replace(manifest=manifest)]), mark))
        except StepFailed as failed:
            raise failed.error from failed

    def _note(self, failed: StepFailed) -> ThinwireError:
        """Plan around a failed step; raise what no other way would mend."""
        error = failed.error
        self._on_failure(failed.step.lineage, failed.step.target.version, error)
        if not isinstance(error, FormatError | NotFound | BaseMismatch | TensorMismatch):
            raise error
        # A wrong base is not the step's fault.
        if not isinstance(error, BaseMismatch):
            self.router.avoid(failed.step)
        return error
