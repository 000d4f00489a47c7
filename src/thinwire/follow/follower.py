"""The rollout's side: find the newest version, plan the way there, take it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from thinwire.errors import (
    BaseMismatch,
    Deadline,
    HistoryPruned,
    InvalidArgument,
    LineageChanged,
    NotFound,
    ThinwireError,
)
from thinwire.follow.cache import DEFAULT_LIMIT_BYTES, BlockCache
from thinwire.follow.fetch import DEFAULT_MEMORY_BYTES, Fetcher
from thinwire.follow.guard import Guard
from thinwire.follow.leases import LeaseKeeper
from thinwire.follow.looks import Looks
from thinwire.follow.opening import open_stream
from thinwire.follow.presence import Outage
from thinwire.follow.selection import Selection
from thinwire.follow.sink import CheckpointSink, Sink
from thinwire.follow.steps import Step
from thinwire.follow.stream import Stream
from thinwire.follow.travel import Traveller
from thinwire.follow.walking import Walker
from thinwire.stream.events import CaughtUp, Observer, Observers, Progressed
from thinwire.stream.records import Manifest
from thinwire.stream.version import Version

_MAX_CHASES = 4


class Follower:
    """Keeps a sink exactly at a version of a stream.

    Use it as a context manager, or call :meth:`close`. One thread uses a follower at a time; only
    :meth:`wake`, :meth:`expect_wakes` and :meth:`stop` may be called from others.

    Args:
        stream: The stream, or its URL.
        sink: What to write into: a :class:`CheckpointSink`, or a folder's path for one.
        tensors: Shell patterns of the tensors to hold, such as ``["model.layers.0.*"]``: only the
            blocks that they need are fetched. None: everything.
        base: Where a copy of the model is that a stream begins with by reference.
        accept_new_lineages: Whether to go along when the trainer restarts from older weights; None:
            as the stream's policy says.
        cache_dir: A folder of fetched blocks that several followers on one host share.
        cache_limit_bytes: What the cache may take.
        memory_limit_bytes: What fetching may hold in memory.
        lease: Whether to tell the stream which version is still needed here, where that can be
            written.
        observer: Told of every event.

    Raises:
        BaseUnusable: Another follower or publisher uses the sink.
    """

    def __init__(
        self,
        stream: Stream | str | os.PathLike[str],
        sink: Sink | str | os.PathLike[str],
        *,
        tensors: Sequence[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        accept_new_lineages: bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit_bytes: int = DEFAULT_LIMIT_BYTES,
        memory_limit_bytes: int = DEFAULT_MEMORY_BYTES,
        lease: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self.stream = stream if isinstance(stream, Stream) else open_stream(stream)
        self.sink: Sink = CheckpointSink(sink) if isinstance(sink, str | os.PathLike) else sink
        self._observers = Observers(observer)
        selection = Selection(tensors or ())
        cache = None if cache_dir is None else BlockCache(cache_dir, cache_limit_bytes)
        store = self.stream.store
        fetcher = Fetcher(store, cache=cache, memory_limit_bytes=memory_limit_bytes)
        self._walker = Walker(self.stream, self.sink, fetcher, selection, base, self._observers)
        self._guard = Guard(self.stream, self.sink, selection, accept_new_lineages)
        self._traveller = Traveller(
            self.stream, self._guard, self._walker, self._refuse, self._lease, self._reached
        )
        self._leases = LeaseKeeper(store) if lease else None
        self._looks = Looks(
            self.catch_up,
            self._guard.doubt,
            lambda: self.sink.mark() is None,
            lambda error: self._refuse("", 0, error),
        )
        self._outage = Outage(self.stream.url)
        self._is_closed = False
        self._wanted_version = 0
        self._owning = ExitStack()
        self._owning.enter_context(self.sink.own())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the sink and end the lease."""
        self.stop()
        self._is_closed = True
        self._owning.close()
        if self._leases is not None:
            self._leases.end()

    @property
    def base(self) -> str | os.PathLike[str] | None:
        """Where a copy of the model is that a stream begins with by reference."""
        return self._walker.base

    @base.setter
    def base(self, path: str | os.PathLike[str] | None) -> None:
        self._walker.base = path

    @property
    def relayed_bytes(self) -> int:
        """What of the bytes that were fetched a relay gave. From any thread."""
        return int(getattr(self.stream.store, "relayed_bytes", 0))

    def version(self) -> Version | None:
        """The version that the sink holds; asks the stream nothing.

        Raises:
            LineageChanged: It is one of another stream, as far as was read.
        """
        mark = self._guard.held()
        return None if mark is None else mark.to_version()

    def catch_up(
        self,
        target: int | Literal["latest"] = "latest",
        *,
        reset: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Version:
        """Bring the sink to a version, by the fewest bytes.

        Args:
            target: A version's number, or "latest".
            reset: Allow to go backwards, and over to another lineage.
            on_bytes: Called with the bytes of a whole version as they arrive.

        Returns:
            The version that the sink now holds.

        Raises:
            NotFound: There is no such stream or version, or nothing was published yet.
            Unavailable: The store does not answer, or the stream that was there is not.
            HistoryPruned: The version cannot be reached any more.
            LineageChanged: The stream went on in a new lineage, or back, and that is not allowed.
            VersionGap: The chain of manifests is broken.
            SignatureInvalid: A manifest is not signed by a pinned key.
            FormatError, ApplyError, StoreError: Something is not what it should be, and no other
                way led to the target. The sink is at a whole version in any case.
        """
        if self._is_closed:
            raise InvalidArgument("this follower was closed", hint="Open another one")
        if target != "latest" and (not isinstance(target, int) or isinstance(target, bool)):
            raise InvalidArgument(
                f"the target is {target!r}", hint='Give a version\'s number, or "latest"'
            )
        with self._outage:
            found = self._chase(target, reset, on_bytes)
        self._lease(found.lineage, found.version)
        if target == "latest":
            self._observers.on_event(
                CaughtUp(
                    url=self.stream.url,
                    lineage=found.lineage,
                    version=found.version,
                    step=found.step,
                )
            )
        return found

    def check_known(self) -> None:
        """Make sure that the version that the sink holds is in the stream.

        Raises:
            LineageChanged: The stream was replaced, or set back.
        """
        mark = self._guard.mark()
        if mark is not None:
            self._guard.doubt()
            self._guard.check_known(mark)

    def bring_to(self, manifest: Manifest) -> Version:
        """Bring the sink to a version whose manifest is known, forwards or backwards.

        For those who look after streams: nothing is asked about lineages or directions.

        Raises:
            ThinwireError: As :meth:`catch_up`.
        """
        self._traveller.router.forget()
        return self._traveller.bring_to(self._guard.mark(), manifest)

    def take(self, step: Step, manifest: Manifest) -> Version:
        """Take one given step to the version of ``manifest``, and no other.

        Raises:
            ThinwireError: It is not what it should be; the sink is as it was.
        """
        return self._traveller.take(self._guard.mark(), step, manifest)

    def prove(self) -> bool:
        """Compare what the sink holds, read in full, with its version.

        Returns:
            Whether they were right; where not, the version was fetched again. True also where the
            sink holds none.

        Raises:
            InvalidArgument: The sink holds a part of the model; the manifest's digest is of all.
            ThinwireError: They were wrong, and the version cannot be fetched.
        """
        mark = self._guard.mark()
        if mark is None:
            return True
        self._guard.check_whole()
        self._observers.on_event(
            Progressed(
                url=self.stream.url, lineage=mark.lineage, version=mark.version, phase="prove"
            )
        )
        if self._guard.is_right(mark):
            return True
        manifest = self.stream.require(mark.lineage, mark.link)
        error = BaseMismatch(
            f"{self.sink} does not hold version {mark.version} any more: someone changed it",
            hint="Follow into an empty folder",
            version=mark.version,
        )
        self._refuse(mark.lineage, mark.version, error)
        self._traveller.router.forget()
        self._traveller.go(None, manifest, None, error)
        return False

    def wait_for(self, version: int, timeout_s: float, *, poll_s: float = 1.0) -> Version:
        """Follow until the sink holds ``version`` or a later one.

        Raises:
            Deadline: It did not within ``timeout_s``.
            ThinwireError: As :meth:`catch_up`, but for failures that may pass.
        """
        deadline_s = time.monotonic() + timeout_s
        held = self.version()
        if held is not None and held.version >= version:
            return held
        for found in self._looks.updates(poll_s, deadline_s):
            if found is not None and found.version >= version:
                return found
        held = self.version()
        raise Deadline(
            f"version {version} did not come within {timeout_s:g} s; here is "
            f"{'none' if held is None else held.version}",
            hint="Is the publisher running? `thinwire log URL` shows what there is",
            version=version,
        )

    def follow(self, *, poll_s: float = 1.0) -> Iterator[Version]:
        """Yield each version that the sink was brought to, until :meth:`stop`.

        Behind by several, it goes to the newest at once. Failures of the store that may pass are
        told to the observer and tried again; all others are raised.

        Args:
            poll_s: The shortest time between two looks. Once the usual time between versions is
                known, looks are fewer; while wakes are expected, they are rare.
        """
        for found in self._looks.updates(poll_s, float("inf")):
            assert found is not None
            yield found

    def watch(self, *, poll_s: float = 1.0, idle_s: float = 1.0) -> Iterator[Version | None]:
        """As :meth:`follow`, and yield None every ``idle_s`` while there is nothing new.

        For callers who look after something else as well. It makes no more looks.
        """
        yield from self._looks.updates(poll_s, float("inf"), idle_s)

    def renew_lease(self) -> None:
        """Tell the stream that the version held here is still needed; rarely more than that.

        For those who bring a sink on step by step, or are busy between two steps.
        """
        mark = self._guard.mark()
        if mark is not None:
            self._lease(mark.lineage, mark.version)

    def wake(self) -> None:
        """Make :meth:`follow` look now. From any thread, or a signal handler."""
        self._looks.wakes.wake()

    def expect_wakes(self, is_expected: bool) -> None:
        """Say whether somebody calls :meth:`wake` when there is a version, as a hub does.

        While that is so :meth:`follow` looks by itself only every half a minute or so, and so finds
        what it was not called for. From any thread.
        """
        self._looks.wakes.expect(is_expected)

    def stop(self) -> None:
        """End :meth:`follow` after the step that runs. From any thread, or a signal handler."""
        self._looks.stop()
        self.stream.end_waits()

    def _chase(
        self,
        target: int | Literal["latest"],
        reset: bool,
        on_bytes: Callable[[int], None] | None,
    ) -> Version:
        for _ in range(_MAX_CHASES - 1):
            try:
                return self._catch_up(target, reset, on_bytes)
            except (HistoryPruned, NotFound):
                # The newest version may have moved on, and what led to it been pruned, meanwhile.
                head = self.stream.tip().head if target == "latest" else None
                if head is None or head.version == self._wanted_version:
                    raise
        return self._catch_up(target, reset, on_bytes)

    def _catch_up(
        self,
        target: int | Literal["latest"],
        reset: bool,
        on_bytes: Callable[[int], None] | None,
    ) -> Version:
        mark = self._guard.mark()
        self._traveller.router.forget()
        last: ThinwireError | None = None
        if mark is not None:
            if reset:
                self._guard.doubt()
            try:
                self._guard.check_known(mark)
            except LineageChanged:
                if not reset:
                    raise
                # Of this stream, but not in it any more: nothing to go on from.
                self._guard.mark()
                mark = None
        if mark is not None and target == "latest" and not reset:
            following = self.stream.manifest(mark.lineage, mark.version + 1)
            if following is None:
                return mark.to_version()
            if following.kind != "end":
                found, following, last = self._traveller.follow_on(mark, following, on_bytes)
                if found is not None:
                    self._guard.trust()
                    return found
            tip = self.stream.tip(following)
        else:
            tip = self.stream.tip()
        if tip.head is None:
            raise NotFound(
                f"nothing was published to {self.stream.url} yet",
                hint="Wait for the first version, as follow() and wait_for() do",
            )
        wanted = tip.head
        if target != "latest":
            wanted = self._traveller.router.find(target, tip.head)
        self._wanted_version = wanted.version
        if mark is not None and not reset:
            self._guard.check_direction(mark, wanted)
        if mark is not None and mark.version > wanted.version:
            mark = None
        return self._traveller.go(mark, wanted, on_bytes, last)

    def _reached(self, version: Version) -> bool:
        self._guard.trust()
        self._lease(version.lineage, version.version)
        return self._looks.is_stopped

    def _lease(self, lineage: str, version: int) -> None:
        error = self._leases.renew(lineage, version) if self._leases else None
        if error is not None:
            self._refuse(lineage, version, error)

    def _refuse(self, lineage: str, version: int, error: ThinwireError) -> None:
        self._observers.refuse(self.stream.url, lineage, version, error)
