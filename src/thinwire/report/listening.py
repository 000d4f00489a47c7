"""Holds a hub's wake-up connection open: server-sent events, or one long poll after the other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from urllib.parse import quote, urlencode

from thinwire.report.beating import refusal_of
from thinwire.report.calls import Place
from thinwire.report.event_lines import EventLines
from thinwire.report.heads import parse_head
from thinwire.report.http import Address, Channel, Closed, HubFault
from thinwire.report.notices import Notices
from thinwire.report.pacing import retry_s

# A hub says that it is alive every 15 s.
_SILENCE_S = 40.0
_POLL_S = 25.0
_POLL_SPARE_S = 10.0
_POLL_GAP_S = 0.2
# After so long of polls, events are tried again.
_POLLS_S = 600.0
# A connection that ends earlier counts as one that failed.
_GOOD_S = 10.0
# What a hub may send: more than any has to say, and less than what keeps a processor busy.
_BURST_BYTES = 1 << 20
_BYTES_PER_S = 64 << 10


class Listening:
    """Listens to one stream's versions until it is closed. Made for a thread of its own.

    Args:
        address: The hub.
        stream: The stream's name there.
        url: The hub's URL, for log lines.
        is_closed: Ends it.
        on_head: Told of each version that the hub names.
        on_connected: Told whether calls would arrive, when that changes.
    """

    def __init__(
        self,
        address: Address,
        stream: str,
        url: str,
        is_closed: threading.Event,
        on_head: Callable[[Place], None],
        on_connected: Callable[[bool], None],
    ) -> None:
        self._channel = Channel(address, is_closed)
        self._stream = stream
        self._route = f"/v1/streams/{quote(stream, safe='')}"
        self._notices = Notices("wake-ups", url)
        self._is_closed = is_closed
        self._on_head = on_head
        self._on_connected = on_connected
        self._named = Place()
        self._is_heard = False

    def run(self) -> None:
        """Listen. Whatever goes wrong is tried again, more and more seldom."""
        failure_count = 0
        does_poll = False
        while not self._is_closed.is_set():
            start_s = time.monotonic()
            self._is_heard = False
            try:
                if does_poll:
                    self._poll(start_s + _POLLS_S)
                    does_poll = False
                else:
                    self._follow_events()
            except HubFault as fault:
                is_refused = fault.status in (401, 403, 404)
                reason = refusal_of(fault.status, self._stream) if is_refused else str(fault)
                self._notices.wrong(reason)
                # Proxies hold events back, and a hub may have none. Where polls fail, neither does.
                does_poll = not does_poll and not self._is_heard and fault.status not in (401, 403)
            except Closed:
                break
            finally:
                self._hear(False)
            is_good = time.monotonic() - start_s >= _GOOD_S
            failure_count = 1 if is_good else failure_count + 1
            self._is_closed.wait(retry_s(failure_count, random.random()))
        self._channel.close()

    def _follow_events(self) -> None:
        lines = EventLines()
        start_s = time.monotonic()
        size_bytes = 0
        for piece in self._channel.stream(
            f"{self._route}/events?only=versions", silence_s=_SILENCE_S
        ):
            size_bytes += len(piece)
            if size_bytes > _BURST_BYTES + (time.monotonic() - start_s) * _BYTES_PER_S:
                raise HubFault("it sends more than there can be to say")
            for event in lines.feed(piece):
                if event.kind == "version":
                    self._name(parse_head(event.data))
            self._hear(True)
        # A hub that ends is no fault to be told of at once: it may be started again.

    def _poll(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            after = self._named
            query = urlencode(
                {"lineage": after.lineage, "after": after.version, "timeout_s": f"{_POLL_S:g}"}
            )
            asked_s = time.monotonic()
            status, data = self._channel.ask(
                "GET", f"{self._route}/wait?{query}", timeout_s=_POLL_S + _POLL_SPARE_S
            )
            if status == 200:
                self._hear(True)
                self._name(parse_head(data))
                is_new = self._named != after
            elif status == 204:
                self._hear(True)
                is_new = time.monotonic() - asked_s >= _POLL_S / 2
            else:
                raise HubFault(refusal_of(status, self._stream), status)
            if not is_new:
                raise HubFault("it answers at once with nothing new")
            if self._is_closed.wait(_POLL_GAP_S):
                raise Closed

    def _name(self, head: Place) -> None:
        self._named = head
        self._on_head(head)

    def _hear(self, is_heard: bool) -> None:
        if is_heard:
            self._notices.right()
        if is_heard != self._is_heard:
            self._is_heard = is_heard
            self._on_connected(is_heard)
