"""Looks for new versions, so that what followers are going to ask for is there before they do."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from concurrent.futures import Future

from thinwire.errors import FormatError, StreamError, ThinwireError, Unavailable
from thinwire.follow import Stream
from thinwire.relay.blocks import SPAN_BYTES, Block, Blocks
from thinwire.relay.needs import UpstreamLease
from thinwire.relay.records import Records
from thinwire.relay.upstream import Upstream
from thinwire.stream import keys
from thinwire.stream.places import Place, objects_of
from thinwire.stream.polling import MAX_WAIT_S, Cadence
from thinwire.stream.records import Manifest

_LOG = logging.getLogger("thinwire")
# Behind by more, followers take merged deltas, and only those they ask for are worth a download.
_MOST_STEPS = 4
_AHEAD_BYTES = 8 * SPAN_BYTES
# Of all that can be kept; more would push out what is in use.
_LARGEST_SHARE = 0.5
_FETCH_WITHIN_S = 3600.0
_CHECK_S = 30.0
_ANSWER_WITHIN_S = 30.0
_IDENTITY = Place("stream", keys.STREAM)


class Watch:
    """A thread that looks for new versions of one stream, and fetches what leads to them.

    Args:
        upstream: The store.
        records: The stream's records.
        blocks: Its blocks.
        lease: What is renewed now and then.
        stream: The stream, read through the records.
        poll_s: The shortest time between two looks.
        fetches: Whether what leads to a new version is fetched before anybody asks.
        largest_bytes: Objects beyond this are fetched only when somebody asks.

    Attributes:
        head: The newest version seen; None: none yet.
    """

    def __init__(
        self,
        upstream: Upstream,
        records: Records,
        blocks: Blocks,
        lease: UpstreamLease,
        stream: Stream,
        *,
        poll_s: float,
        fetches: bool,
        largest_bytes: int,
    ) -> None:
        self._upstream = upstream
        self._records = records
        self._blocks = blocks
        self._lease = lease
        self._poll_s = poll_s
        self._fetches = fetches
        self._largest_bytes = int(largest_bytes * _LARGEST_SHARE)
        self._stream = stream
        self._cadence = Cadence()
        self._woken = threading.Event()
        self._is_called = False
        self._is_stopped = False
        self._is_renewing = False
        self._failures = 0
        self._told = ""
        self._checked_s = time.monotonic()
        self._wanted: deque[Manifest] = deque(maxlen=_MOST_STEPS)
        self._is_wanted = threading.Event()
        self._threads: list[threading.Thread] = []
        self.head: Manifest | None = None

    def start(self) -> None:
        """Begin."""
        if self._records.held_back(_IDENTITY) is not None:
            # Of an earlier run; so is what the first looks find, perhaps.
            self._upstream.expect_stream()
            self._checked_s -= _CHECK_S
        runs = [("thinwire-watch", self._run)]
        if self._fetches:
            runs.append(("thinwire-ahead", self._fetch))
        for name, run in runs:
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def wake(self) -> None:
        """Look now: somebody says that there is a new version, or a need. From any thread."""
        self._records.look_again()
        self._upstream.hurry()
        self._woken.set()

    def expect_wakes(self, is_expected: bool) -> None:
        """Whether :meth:`wake` will be called for each version: then looks are few."""
        self._is_called = is_expected
        self.wake()

    def stop(self) -> None:
        """End; a look that runs is not waited for."""
        self._is_stopped = True
        self._woken.set()
        self._is_wanted.set()

    def _run(self) -> None:
        while not self._is_stopped:
            self._try()
            wait_s = self._cadence.wait_s(
                time.monotonic(), self._poll_s, random.random(), is_called=self._is_called
            )
            if self._failures:
                wait_s = max(wait_s, self._poll_s * 2 ** min(self._failures, 5))
            if self._woken.wait(min(wait_s, MAX_WAIT_S)):
                self._woken.clear()

    def _try(self) -> None:
        """Look once; what goes wrong is said once, and no look is the last one."""
        try:
            self._renew()
            self._check_held()
            self._look()
        except Unavailable:
            # Told by the upstream itself.
            return
        except (ThinwireError, TimeoutError) as error:
            self._failures += 1
            if isinstance(error, FormatError | StreamError):
                # Of a stream that was replaced nothing fits any more.
                self.head = None
            told = str(error) or "no answer in time"
            if told != self._told:
                self._told = told
                _LOG.warning("cannot look for new versions: %s", told)
            return
        except Exception:
            # A bug must not leave followers without their looks.
            _LOG.exception("looking for new versions failed")
            self._failures += 1
            return
        if self._told:
            self._told = ""
            _LOG.warning("looking for new versions works again")
        self._failures = 0

    def _check_held(self) -> None:
        """See now and then whether the newest version is still there.

        Of a stream that was replaced, or set back, looks for the next one would wait for ever.
        """
        head, now_s = self.head, time.monotonic()
        if head is None or now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        key = keys.manifest(head.lineage, head.version)
        place = Place("manifest", key, head.lineage, version=head.version)
        try:
            if not self._records.is_gone(place, _ANSWER_WITHIN_S):
                return
            # Where the stream is gone as well, the store is away: that is Unavailable.
            self._records.is_gone(_IDENTITY, _ANSWER_WITHIN_S)
        except (FormatError, StreamError):
            # It is of another stream, or another one.
            pass
        _LOG.warning(
            "version %d (%s) is not in %s any more: the stream was replaced or set back",
            head.version,
            head.lineage,
            self._upstream.url,
        )
        self._records.forget_lineage(head.lineage)
        self._cadence = Cadence()
        self.head = None

    def _look(self) -> None:
        found: list[Manifest] = []
        at = self.head
        if at is None:
            # The stream that was there when last asked may not be the one that is there now.
            self._stream.forget()
        while at is not None and len(found) <= _MOST_STEPS:
            following = self._stream.manifest(at.lineage, at.version + 1)
            if following is None or following.kind == "end":
                break
            found.append(following)
            at = following
        if (
            at is None
            or len(found) > _MOST_STEPS
            or (self._stream.manifest(at.lineage, at.version + 1) is not None)
        ):
            tip = self._stream.tip(at)
            found = [tip.head] if tip.head is not None and tip.head != self.head else []
        if not found:
            return
        before, self.head = self.head, found[-1]
        steps = 0 if before is None else found[-1].version - before.version
        self._cadence.note(found[-1].created_ms / 1000, time.monotonic(), steps)
        # So that joiners find it near, also when the store is away.
        self._wanted.extend(found)
        self._is_wanted.set()

    def _renew(self) -> None:
        """Renew the lease on another thread: it may hang."""
        if self._is_renewing:
            return
        self._is_renewing = True

        def renew() -> None:
            try:
                self._lease.renew()
            finally:
                self._is_renewing = False

        self._upstream.asides.submit(renew)

    def _fetch(self) -> None:
        while not self._is_stopped:
            self._is_wanted.wait()
            self._is_wanted.clear()
            while self._wanted and not self._is_stopped:
                manifest = self._wanted.popleft()
                try:
                    self._fetch_version(manifest)
                except (ThinwireError, TimeoutError) as error:
                    _LOG.info("version %d is not fetched ahead: %s", manifest.version, error)
                except Exception:
                    _LOG.exception("fetching version %d ahead failed", manifest.version)

    def _fetch_version(self, manifest: Manifest) -> None:
        if manifest.kind != "delta" or manifest.payload_bytes > self._largest_bytes:
            return
        for key, record in objects_of(manifest).items():
            waiting: deque[tuple[Future[bytes], int]] = deque()
            waiting_bytes = 0
            for number in range(len(record.blocks)):
                block = Block(key, record, number)
                flight = self._blocks.hasten(block, len(record.blocks))
                if flight is None:
                    continue
                waiting.append((flight, block.size_bytes))
                waiting_bytes += block.size_bytes
                while waiting_bytes > _AHEAD_BYTES and not self._is_stopped:
                    first, size_bytes = waiting.popleft()
                    first.result(_FETCH_WITHIN_S)
                    waiting_bytes -= size_bytes
            for flight, _ in waiting:
                flight.result(_FETCH_WITHIN_S)
