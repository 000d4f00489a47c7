"""The publisher's side of a hub: it is told of each commit, so that it looks at once."""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType
from typing import Self
from urllib.parse import quote

import msgspec

from thinwire.report.beating import refusal_of, start
from thinwire.report.calls import Place
from thinwire.report.http import Address, Channel, Closed, HubFault
from thinwire.report.naming import check_name
from thinwire.report.notices import Notices
from thinwire.report.pacing import retry_s
from thinwire.stream.events import Event, Published

# A hub looks by itself, too: nobody waits longer for a signal that comes so late.
_GIVE_UP_S = 60.0


class HubNotifier:
    """Tells a hub of published versions. An observer; a context manager, for a last signal::

        with HubNotifier("http://hub:8765", "my-run", token=token) as notifier:
            publisher = Publisher(url, folder, observer=notifier)

    It never delays a publish, and whatever goes wrong with the hub is logged: hub and followers
    then see the version by looking. Only its end waits for the last signal: four seconds at most.

    Args:
        url: The hub: ``http://`` or ``https://``.
        stream: What the stream is called there.
        token: The bearer token, of the role "publish"; empty: none.
        timeout_s: How long the hub may take for an answer.

    Raises:
        InvalidArgument: The URL, the token or the name is malformed.
    """

    def __init__(self, url: str, stream: str, *, token: str = "", timeout_s: float = 5.0) -> None:
        self._address = Address.of(url, token)
        check_name("the stream's name at the hub", stream)
        self._stream = stream
        self._route = f"/v1/streams/{quote(stream, safe='')}/signal"
        self._notices = Notices("signals", url, "publishing")
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._place: Place | None = None  # what the hub is still to be told
        self._is_ending = False
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def on_event(self, event: Event) -> None:
        """Take note of a published version."""
        if not isinstance(event, Published):
            return
        with self._changed:
            if self._is_ending:
                return
            self._place = Place(event.lineage, event.version)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = start(self._run, "thinwire-signal")

    def close(self, timeout_s: float = 3.0) -> None:
        """End, after the last version was told or the time is over."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            self._is_closed.set()
            thread.join(1.0)

    def _run(self) -> None:
        channel = Channel(self._address, self._is_closed)
        try:
            while (place := self._next()) is not None:
                self._tell(channel, place)
        except Closed:
            pass
        finally:
            channel.close()

    def _next(self) -> Place | None:
        with self._changed:
            self._changed.wait_for(lambda: self._place is not None or self._is_ending)
            return self._place

    def _tell(self, channel: Channel, place: Place) -> None:
        """Tell the hub of a version; newer ones take its place where that does not work at once."""
        end_s = time.monotonic() + _GIVE_UP_S
        failure_count = 0
        while not self._is_closed.is_set():
            try:
                self._signal(channel, place)
            except HubFault as fault:
                self._notices.wrong(str(fault))
                failure_count += 1
                wait_s = retry_s(failure_count, random.random())
                is_final = 400 <= fault.status < 500
            else:
                self._notices.right()
                break
            if is_final or self._is_ending or time.monotonic() + wait_s > end_s:
                break
            self._is_closed.wait(wait_s)
            with self._changed:
                place = self._place or place
        with self._changed:
            if self._place == place:
                self._place = None

    def _signal(self, channel: Channel, place: Place) -> None:
        body = msgspec.json.encode(place._asdict())
        status, _ = channel.ask("POST", self._route, body=body, timeout_s=self._timeout_s)
        if status not in (200, 202, 204):
            raise HubFault(refusal_of(status, self._stream, "publish"), status)
