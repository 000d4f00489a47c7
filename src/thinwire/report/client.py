"""A replica's side of a hub: it tells how far it is, and is woken when there is a version.

Following does not depend on it. A hub that is away, slow or hostile costs a replica nothing but the
wake-ups: versions come from the stream alone, and are looked for by polling as without a hub.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

from thinwire.errors import ThinwireError
from thinwire.report.beating import Sender, start
from thinwire.report.calls import Calls, Place
from thinwire.report.http import Address, Closed
from thinwire.report.listening import Listening
from thinwire.report.messages import DIGEST_CHARS, Heartbeat
from thinwire.report.naming import check_name
from thinwire.report.pacing import Pace
from thinwire.report.state import News, Now, ReplicaState
from thinwire.stream.events import Applied, CaughtUp, Event
from thinwire.stream.version import Version

_LOG = logging.getLogger("thinwire")
# How often the readiness of what serves is looked at: it is no event.
_READY_S = 0.5
# Whether a follower relies on the hub changes no more often: each change wakes it.
_RELY_AGAIN_S = 1.0
# How long the end waits for a thread; it ends with the process at the latest.
_END_S = 3.0


@runtime_checkable
class Following(Protocol):
    """What follows a stream, such as :class:`thinwire.Follower`."""

    def wake(self) -> None:
        """Look now. From any thread."""

    def expect_wakes(self, is_expected: bool) -> None:
        """Whether :meth:`wake` will be called for each version. From any thread."""

    def version(self) -> Version | None:
        """The version that is held; asked before anything else happens, and after events."""


@runtime_checkable
class Driving(Protocol):
    """What keeps an engine at a version, such as :class:`thinwire.engines.driver.Driver`."""

    @property
    def follower(self) -> Following:
        """What feeds it."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves one whole version. From any thread."""


@runtime_checkable
class Serving(Protocol):
    """What serves what it follows, and may have to stop for a while."""

    @property
    def is_ready(self) -> bool:
        """Whether it serves one whole version. From any thread."""


class HubClient:
    """Reports a replica to a hub, and has it woken. An observer of its follower::

        hub = HubClient("http://hub:8765", "my-run", replica="host-1")
        with Follower(url, folder, observer=hub) as follower, hub.reporting(follower):
            for version in follower.follow():
                ...

    Args:
        url: The hub: ``http://`` or ``https://``.
        stream: What the stream is called there.
        replica: This replica's name: one of its own, and the same after a restart.
        token: The bearer token, of the role "follow"; empty: none.
        region: Where the replica is.
        engine: What holds the weights: "folder", "torch", "vllm", "sglang" ...
        timeout_s: How long the hub may take for an answer.

    Raises:
        InvalidArgument: The URL, the token or a name is malformed.
    """

    def __init__(
        self,
        url: str,
        stream: str,
        *,
        replica: str,
        token: str = "",
        region: str = "",
        engine: str = "folder",
        timeout_s: float = 10.0,
    ) -> None:
        self._address = Address.of(url, token)
        self._url = url
        self._stream = check_name("the stream's name at the hub", stream)
        self._replica = check_name("the replica's name", replica)
        if region:
            check_name("the region", region)
        check_name("the engine's name", engine)
        self._timeout_s = timeout_s
        # What is below is used by the thread that follows, and by two of ours.
        self._changed = threading.Condition()
        self._state = ReplicaState(replica, region=region, engine=engine, now=_now())
        self._calls = Calls()
        self._pace = Pace()
        self._following: Following | None = None
        self._serving: Serving | None = None
        self._is_relied_on = False
        self._was_reported = False
        self._relied_s = -_RELY_AGAIN_S
        self._is_there = True
        self._last: Heartbeat | None = None
        self._end_s = 0.0

    def on_event(self, event: Event) -> None:
        """Take note of an event."""
        now = _now()
        held_digest = self._digest_of(event)
        with self._changed:
            if held_digest is not None:
                self._state.held_digest = held_digest
            if not self._was_reported and isinstance(event, CaughtUp):
                self._was_reported = True
                _LOG.warning("the hub %s hears nothing: call HubClient.reporting", self._url)
            news = self._state.take(event, now)
            if news is News.CHANGE:
                self._pace.changed(now.s)
            elif news is News.PROGRESS:
                self._pace.progressed(now.s)
            if news is not News.NONE:
                self._changed.notify_all()
            if isinstance(event, Applied | CaughtUp):
                self._calls.held(Place(event.lineage, event.version))
                if isinstance(event, CaughtUp):
                    self._calls.looked()
                self._call()

    def _digest_of(self, event: Event) -> str | None:
        """The digest of what is held since an event; empty: it is not known; None: as before."""
        following, held_before = self._following, self._state.held
        if following is None or not isinstance(event, Applied | CaughtUp):
            return None
        if isinstance(event, CaughtUp) and held_before == Place(event.lineage, event.version):
            return None
        with suppress(ThinwireError):
            held = following.version()
            if held is not None and (held.lineage, held.version) == (event.lineage, event.version):
                return held.manifest[:DIGEST_CHARS]
        return ""

    @contextmanager
    def reporting(self, replica: Following | Driving) -> Iterator[None]:
        """Report it, and have it woken, meanwhile.

        Where the block ends by an error of thinwire's, the hub is told so; else that it left.
        """
        driving = replica if isinstance(replica, Driving) else None
        serving = replica if isinstance(replica, Serving) else None
        following = replica if isinstance(replica, Following) else replica.follower
        held = following.version()
        is_closed = threading.Event()
        with self._changed:
            self._was_reported = True
            self._calls, self._pace = Calls(), Pace()
            self._is_relied_on, self._is_there, self._last = False, True, None
            self._following, self._serving = following, serving
            self._state.begin(
                Place() if held is None else Place(held.lineage, held.version),
                None if held is None else held.step,
                "" if held is None else held.manifest[:DIGEST_CHARS],
                is_driven=driving is not None,
                is_asked=serving is not None,
            )
            self._calls.held(self._state.held)
        listening = Listening(
            self._address,
            self._stream,
            self._url,
            is_closed,
            on_head=self._on_head,
            on_connected=self._on_connected,
        )
        threads = [
            start(lambda: self._beat(is_closed), "thinwire-report"),
            start(listening.run, "thinwire-listen"),
        ]
        try:
            yield
        except ThinwireError as error:
            with self._changed:
                self._state.fail(error.code, error.message, _now())
                self._last = self._state.beat(_now())
            raise
        finally:
            self._end(is_closed, threads)

    def _end(self, is_closed: threading.Event, threads: list[threading.Thread]) -> None:
        with self._changed:
            self._end_s = end_s = time.monotonic() + _END_S
            is_closed.set()
            self._changed.notify_all()
            following, self._following = self._following, None
        if following is not None:
            following.expect_wakes(False)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _beat(self, is_closed: threading.Event) -> None:
        sender = Sender(self._address, self._stream, self._url, self._timeout_s, is_closed)
        try:
            while (beat := self._next_beat(is_closed)) is not None:
                answer = sender.send(beat)
                with self._changed:
                    self._is_there = answer is not None
                    if answer is None:
                        self._pace.failed()
                        continue
                    head, interval_s = answer
                    self._state.arrived(beat.updates)
                    self._pace.arrived(interval_s)
                    self._calls.hinted(head)
                    self._call()
        except Closed:
            pass
        finally:
            # Later than that the name may be in use again: nobody must say good-bye in it.
            left_s = self._end_s - time.monotonic()
            sender.close(self._last, self._replica, is_there=self._is_there, within_s=left_s)

    def _next_beat(self, is_closed: threading.Event) -> Heartbeat | None:
        """Wait until a heartbeat is due, and make it; None: it is over."""
        jitter = random.random()
        with self._changed:
            while not is_closed.is_set():
                now = _now()
                serving = self._serving
                if serving is not None and self._state.note_ready(serving.is_ready):
                    self._pace.changed(now.s)
                self._call()
                wait_s = self._pace.due_s(jitter) - now.s
                if wait_s <= 0:
                    self._pace.sending(now.s)
                    # Of what reads through a relay.
                    self._state.relayed_bytes = getattr(self._following, "relayed_bytes", 0)
                    return self._state.beat(now)
                if serving is not None:
                    wait_s = min(wait_s, _READY_S)
                if self._is_relied_on != self._calls.is_relied_on:
                    wait_s = min(wait_s, _RELY_AGAIN_S)
                ring_s = self._calls.ring_s(now.s)
                if ring_s is not None:
                    wait_s = min(wait_s, ring_s)
                self._changed.wait(wait_s)
        return None

    def _on_head(self, head: Place) -> None:
        with self._changed:
            self._calls.named(head)
            self._call()

    def _on_connected(self, is_connected: bool) -> None:
        with self._changed:
            self._calls.connected(is_connected)
            if is_connected:
                # A hub that was started again knows nothing of us.
                self._pace.returned(time.monotonic())
                self._changed.notify_all()
            self._call()

    def _call(self) -> None:
        """Do what the calls ask for. The lock is held."""
        following = self._following
        if following is None:
            return
        now_s = time.monotonic()
        is_relied_on = self._calls.is_relied_on
        # To look often again is always allowed at once.
        may_change = not is_relied_on or now_s >= self._relied_s + _RELY_AGAIN_S
        if self._is_relied_on != is_relied_on and may_change:
            self._is_relied_on, self._relied_s = is_relied_on, now_s
            following.expect_wakes(is_relied_on)
        if self._calls.ring_s(now_s) == 0:
            self._calls.rang(now_s)
            following.wake()


def _now() -> Now:
    return Now(time.monotonic(), time.time_ns() // 1_000_000)
