"""A copy of a stream in another system's format, kept current.

A mirror is a follower whose sink, besides its own folder, writes every version to a destination:
what an engine that was built for that system reads. The destination's version is committed first
and the folder's mark switches second; whatever interrupts it, the same version is written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from thinwire.errors import (
    Deadline,
    EngineError,
    HistoryPruned,
    LineageChanged,
    NotFound,
    StoreError,
    ThinwireError,
)
from thinwire.follow import Follower, Stream
from thinwire.interop.mirror_record import MirroredVersion
from thinwire.interop.mirror_sink import MirrorSink, set_back
from thinwire.stream.version import Version

# A stream that was set back shows no newer version: so look for our own now and then.
_LOOKS_PER_DOUBT = 64
_MAX_PAUSE_S = 300.0
# What no waiting mends: the key, the rights, the names.
_LASTING = (401, 403, 404)


class Mirror:
    """Keeps a destination at the newest version of a stream, one version after the other.

    Use it as a context manager. Unlike a plain follower it leaves no version out where it can help
    it, since a chain of step deltas is what the formats know; only where so many are missing that
    full weights would be due anyway does it go to the newest at once.

    Args:
        stream: The stream.
        sink: The folder and the destination.
        follower_options: As for :class:`thinwire.Follower`.

    Raises:
        BaseUnusable: Another follower uses the folder.
    """

    def __init__(self, stream: Stream, sink: MirrorSink, **follower_options: Any) -> None:
        self.stream = stream
        self.sink = sink
        self._follower = Follower(stream, sink, **follower_options)
        self._is_stopped = threading.Event()
        self._look_count = 0
        sink.between = self._keep_alive

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        self.stop()
        self._follower.close()

    def stop(self) -> None:
        """End :meth:`run` after the version that is being written. From any thread."""
        self._is_stopped.set()
        self._follower.stop()
        self.sink.stop()

    def catch_up(self, *, from_oldest: bool = False) -> Iterator[tuple[Version, MirroredVersion]]:
        """Write every version up to the newest; yields each with what it became.

        Args:
            from_oldest: Begin with the oldest version that can still be reached, where nothing was
                mirrored yet, and leave none out.

        Raises:
            NotFound: Nothing was published yet.
            LineageChanged: The stream was replaced or set back, or began a new lineage that was not
                to be followed.
            ThinwireError: As :meth:`thinwire.Follower.catch_up`, or the destination failed.
        """
        held = self._begin(from_oldest)
        yield from self._tell(held)
        while not self._is_stopped.is_set():
            following = self.stream.manifest(held.lineage, held.version + 1)
            if following is None:
                return
            if following.kind == "end":
                # Whether to go along is the follower's to decide.
                after = self._jump()
                if after.manifest == held.manifest:
                    return
                held = after
            elif not from_oldest and self._is_far_behind(held):
                held = self._jump()
            else:
                try:
                    held = self._follower.bring_to(following)
                    self._keep_alive()
                except (HistoryPruned, NotFound):
                    # Behind what the stream keeps: there is a way to the newest, if to anything.
                    held = self._jump()
            self.sink.deliver()
            yield from self._tell(held)

    def run(
        self, *, poll_s: float = 1.0, on_failure: Callable[[ThinwireError], None] | None = None
    ) -> Iterator[tuple[Version, MirroredVersion]]:
        """Yield each version that was written, until :meth:`stop`.

        Failures that may pass, of stores and of a deployment, are told to ``on_failure`` and tried
        again after growing pauses; all others are raised.

        Args:
            poll_s: The time between two looks, in seconds.
            on_failure: Told of every failure that may pass.
        """
        pause_s = poll_s
        while not self._is_stopped.is_set():
            try:
                for told in self.catch_up():
                    yield told
                    pause_s = poll_s
                pause_s = poll_s
            except (StoreError, EngineError, Deadline) as error:
                if self._is_stopped.is_set():
                    return
                is_early = isinstance(error, NotFound) and self._follower.version() is None
                if not (error.retryable or is_early or _may_pass(error)):
                    raise
                if on_failure is not None:
                    on_failure(error)
                if not is_early:
                    pause_s = min(2 * pause_s, max(poll_s, _MAX_PAUSE_S))
            self._is_stopped.wait(pause_s)

    def _begin(self, from_oldest: bool) -> Version:
        """Bring the folder to where the destination is, without writing; then write what it holds.

        Raises:
            LineageChanged: The stream is not the one that was mirrored, or behind it.
        """
        held = self._follower.version()
        does_doubt = self._look_count % _LOOKS_PER_DOUBT == 0
        if held is not None and does_doubt:
            self._check_known()
        self._look_count += 1
        newest = self.sink.destination.newest
        if held is None:
            with self.sink.quiet():
                is_first = newest is None and from_oldest
                held = self._oldest() if is_first else self._follower.catch_up()
        elif newest is not None and held.version < newest.version:
            held = self._come_to(held, newest.version)
        if newest is not None and held.version < newest.version:
            raise set_back(self.sink.destination.store.url, newest.version)
        self.sink.deliver()
        if self._look_count == 1:
            self.sink.destination.prune()
        if does_doubt:
            self.sink.destination.check_pointer()
        return held

    def _check_known(self) -> None:
        try:
            self._follower.check_known()
        except LineageChanged as error:
            raise LineageChanged(
                error.message,
                hint="Was it meant? Then mirror it into another work folder and destination",
                **error.context,
            ) from error

    def _come_to(self, held: Version, version: int) -> Version:
        """Bring the folder to the version that the destination is at, or beyond it."""
        manifest = self.stream.manifest(held.lineage, version)
        if manifest is None or manifest.kind == "end":
            return self._jump()
        with self.sink.quiet():
            return self._follower.bring_to(manifest)

    def _jump(self) -> Version:
        with self.sink.quiet():
            return self._follower.catch_up()

    def _is_far_behind(self, held: Version) -> bool:
        if not self.sink.destination.is_full_due(2):
            far = self.stream.manifest(held.lineage, held.version + 2)
            if far is None:
                return False
        head = self.stream.tip().head
        behind = 0 if head is None else head.version - held.version
        return self.sink.destination.is_full_due(behind)

    def _tell(self, held: Version) -> Iterator[tuple[Version, MirroredVersion]]:
        """Yield the newest version, unless the caller was told of it and came back from that."""
        destination = self.sink.destination
        newest = destination.newest
        if newest is not None and destination.record.told != (newest.name or "begun"):
            yield held, newest
            destination.note_told(newest.name or "begun")

    def _keep_alive(self) -> None:
        """Tell the stream that its versions from here on are still needed."""
        self._follower.renew_lease()

    def _oldest(self) -> Version:
        """Bring the folder to the oldest version that can still be reached."""
        head = self.stream.tip().head
        if head is None:
            raise NotFound(f"nothing was published to {self.stream.url} yet", hint="Publish first")
        candidates = {head.first, *self.stream.listed_anchors(head.lineage), head.version}
        for version in sorted(candidates):
            try:
                return self._follower.catch_up(version, reset=True)
            except (HistoryPruned, NotFound):
                continue
        raise HistoryPruned(
            f"no version of {self.stream.url} can be reached", hint="`thinwire fsck` shows more"
        )


def _may_pass(error: ThinwireError) -> bool:
    """Whether a deployment may take the same version later."""
    return isinstance(error, EngineError) and error.context.get("status") not in _LASTING
