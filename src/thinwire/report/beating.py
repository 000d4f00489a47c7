"""Sends heartbeats to a hub: what a replica or a relay says of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import quote

import msgspec

from thinwire.report.calls import Place
from thinwire.report.heads import parse_answer
from thinwire.report.http import Address, Channel, Closed, HubFault
from thinwire.report.messages import Heartbeat
from thinwire.report.notices import Notices

# How long saying good-bye may take.
_GOODBYE_S = 2.0


class Sender:
    """Sends the heartbeats of one replica. For one thread.

    Args:
        address: The hub.
        stream: The stream's name there.
        url: The hub's URL, for log lines.
        timeout_s: How long an answer may take.
        is_closed: Ends a request that runs.
    """

    def __init__(
        self,
        address: Address,
        stream: str,
        url: str,
        timeout_s: float,
        is_closed: threading.Event,
    ) -> None:
        self._address = address
        self._channel = Channel(address, is_closed)
        self._stream = stream
        self._route = f"/v1/streams/{quote(stream, safe='')}"
        self._notices = Notices("heartbeats", url)
        self._timeout_s = timeout_s

    def send(self, beat: Heartbeat) -> tuple[Place, float] | None:
        """Send one; returns the newest version that the hub knows of, and seconds to the next.

        None: it did not arrive, or what the hub answered is none.

        Raises:
            Closed: It was asked to end.
        """
        try:
            found = self._post(beat)
        except HubFault as fault:
            self._notices.wrong(str(fault))
            return None
        self._notices.right()
        return found

    def _post(self, beat: Heartbeat) -> tuple[Place, float]:
        status, data = self._channel.ask(
            "POST",
            f"{self._route}/heartbeats",
            body=msgspec.json.encode(beat),
            timeout_s=self._timeout_s,
        )
        if status != 200:
            own = f", for the replica {beat.replica!r} in the region {beat.region!r}"
            raise HubFault(refusal_of(status, self._stream, f"follow{own}"), status)
        return parse_answer(data)

    def close(
        self,
        last: Heartbeat | None,
        replica: str,
        *,
        is_there: bool,
        within_s: float = _GOODBYE_S,
    ) -> None:
        """Close the connection, having said good-bye where the hub is there.

        Args:
            last: A last heartbeat instead of the good-bye: why it ends.
            replica: Its name.
            is_there: Whether the hub answered the last time.
            within_s: How long there is for it.
        """
        self._channel.close()
        timeout_s = min(_GOODBYE_S, within_s)
        if not is_there or timeout_s <= 0:
            return
        channel = Channel(self._address, threading.Event())
        try:
            if last is None:
                route = f"{self._route}/replicas/{quote(replica, safe='')}"
                channel.ask("DELETE", route, timeout_s=timeout_s)
            else:
                body = msgspec.json.encode(last)
                route = f"{self._route}/heartbeats"
                channel.ask("POST", route, body=body, timeout_s=timeout_s)
        except (HubFault, Closed):
            # It will notice that nothing comes any more.
            pass
        finally:
            channel.close()


def refusal_of(status: int, stream: str, role: str = "follow") -> str:
    """What a status that is no success means, in our own words.

    Args:
        status: The status.
        stream: What the stream was called.
        role: What the token must be of.
    """
    if status == 401:
        return "it does not accept the token (status 401): none was given, or it knows another"
    if status == 403:
        return f"it does not accept the token (status 403): it takes one of the role {role}"
    if status == 404:
        return f"it does not know the stream {stream!r} (status 404)"
    return f"it answers with status {status}"


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that no exit waits for."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
