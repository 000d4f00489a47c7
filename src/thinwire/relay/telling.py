"""Tells a hub of a relay, and is woken by it; without a hub, looks alone find new versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.relay.relay import StreamRelay
from thinwire.report.beating import Sender, start
from thinwire.report.calls import Place
from thinwire.report.http import Address, Closed
from thinwire.report.listening import Listening
from thinwire.report.messages import Fault, Heartbeat
from thinwire.report.naming import check_name

_FIRST_INTERVAL_S = 5.0
_LONGEST_INTERVAL_S = 60.0
_TIMEOUT_S = 10.0
_END_S = 3.0


class Telling:
    """One stream's relay at one hub.

    Args:
        url: The hub.
        relay: The relay.
        replica: Its name there, the same after a restart.
        stream: What the stream is called there.
        token: The bearer token, of the role "follow"; empty: none.
        region: Where the relay is.

    Raises:
        InvalidArgument: The URL or a name is malformed.
    """

    def __init__(
        self,
        url: str,
        relay: StreamRelay,
        *,
        replica: str,
        stream: str,
        token: str = "",
        region: str = "",
    ) -> None:
        self._address = Address.of(url, token)
        self._url = url
        self._relay = relay
        self._replica = check_name("the relay's name", replica)
        self._stream = check_name("the stream's name at the hub", stream)
        self._region = check_name("the region", region) if region else ""
        self._started_ms = time.time_ns() // 1_000_000
        self._is_closed = threading.Event()
        self._named = Place()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Do so meanwhile."""
        listening = Listening(
            self._address,
            self._stream,
            self._url,
            self._is_closed,
            on_head=self._on_head,
            # What cut the hub off may have cut off the store: it looks at once as well.
            on_connected=self._relay.watch.expect_wakes,
        )
        threads = [start(self._beat, "thinwire-report"), start(listening.run, "thinwire-listen")]
        try:
            yield
        finally:
            self._is_closed.set()
            self._relay.watch.expect_wakes(False)
            end_s = time.monotonic() + _END_S
            for thread in threads:
                thread.join(max(0.0, end_s - time.monotonic()))

    def _on_head(self, head: Place) -> None:
        if head != self._named:
            self._named = head
            self._relay.watch.wake()

    def _beat(self) -> None:
        sender = Sender(self._address, self._stream, self._url, _TIMEOUT_S, self._is_closed)
        is_there = False
        interval_s = _FIRST_INTERVAL_S
        try:
            while not self._is_closed.is_set():
                answer = sender.send(self._heartbeat())
                is_there = answer is not None
                if answer is not None:
                    head, interval_s = answer
                    self._on_head(head)
                self._is_closed.wait(min(max(interval_s, 1.0), _LONGEST_INTERVAL_S))
        except Closed:
            pass
        finally:
            sender.close(None, self._replica, is_there=is_there)

    def _heartbeat(self) -> Heartbeat:
        upstream, head, blocks = self._relay.upstream, self._relay.watch.head, self._relay.blocks
        away_s = upstream.away_s
        fault = None
        if away_s is not None:
            fault = Fault(
                "unavailable",
                f"the store does not answer since {away_s:.0f} s",
                time.time_ns() // 1_000_000,
            )
        return Heartbeat(
            replica=self._replica,
            kind="relay",
            region=self._region,
            lineage=head.lineage if head else "",
            version=head.version if head else 0,
            step=head.step if head else None,
            is_ready=True,
            fetched_bytes=upstream.fetched_bytes,
            cached_bytes=max(0, blocks.asked_bytes - blocks.fetched_bytes),
            served_bytes=self._relay.served_bytes,
            started_ms=self._started_ms,
            fault=fault,
        )
