"""HTTP connections that cannot be held open by saying nothing.

uvicorn waits for a request's head, and for a reader of its answer, without end. Here both have
deadlines. The way to end a connection is the transport's: what its application does is cancelled
as it is when a client goes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# From the connection, or the end of an answer, to the end of the next request's head.
HEAD_WITHIN_S = 30.0
# How long an answer's reader may take nothing at all.
READ_WITHIN_S = 60.0


class GuardedProtocol(H11Protocol):
    """One connection."""

    head_within_s = HEAD_WITHIN_S
    read_within_s = READ_WITHIN_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timers."""
        self._cancel(self._head_timer)
        self._cancel(self._read_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came in; a head that is whole ends the wait for it."""
        try:
            super().data_received(data)
        except (h11.LocalProtocolError, UnicodeDecodeError):
            # Rubbish in the middle of an answer, or in a path: there is nothing to be said to it.
            self.transport.abort()
            return
        # A body whose request was answered before it came is waited for no longer than a head.
        is_late = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if self.conn.their_state is h11.IDLE or is_late:
            if self._head_timer is None:
                self._await_head()
        else:
            self._cancel(self._head_timer)
            self._head_timer = None

    def pause_writing(self) -> None:
        """The reader of the answer is slow."""
        super().pause_writing()
        self._cancel(self._read_timer)
        self._read_timer = self.loop.call_later(self.read_within_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The reader goes on."""
        super().resume_writing()
        self._cancel(self._read_timer)
        self._read_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_within_s, self.transport.abort)

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
