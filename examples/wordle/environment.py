"""The environment: the game over HTTP, for as many sessions as are open at once.

    python examples/wordle/environment.py PORT WORDS

POST /sessions {"seed": n} opens a session: {"session", "observation"}. POST /sessions/ID/step
{"guess": text} plays: {"observation", "reward", "done"}. A session is closed when it is done, or
after a while without a guess. GET /stats says how many there were at once; GET /health answers.
It listens on loopback only,
and secrets are among the first WORDS of the list.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from game import START, WORDS, Game, secret_of
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from thinwire.web import Listener

MAX_SESSIONS = 1024
MAX_IDLE_S = 300.0
MAX_BODY_BYTES = 1024
MAX_GUESS_CHARS = 16
MAX_SEED = 2**53

Act = Callable[[Request], Awaitable[dict[str, Any]]]


class Refused(Exception):
    """A request that cannot be met: an HTTP status, a word for programs, and why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Reset(msgspec.Struct):
    seed: int


class _Guess(msgspec.Struct):
    guess: str


class Sessions:
    """All games that are open, those that are idle the longest first.

    Args:
        words: Those of the game.
        now_s: The clock.
    """

    def __init__(
        self, words: Sequence[str] = WORDS, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._words = words
        self._now_s = now_s
        self._open: OrderedDict[str, tuple[Game, float]] = OrderedDict()
        self._busy_s = 0.0
        self._changed_s = self._began_s = now_s()
        self.peak_count = self.opened_count = self.expired_count = 0

    def open(self, seed: int) -> dict[str, Any]:
        """A new game, whose secret is that of the seed.

        Raises:
            Refused: Too many are open.
        """
        self._expire()
        if len(self._open) >= MAX_SESSIONS:
            raise Refused(429, "too_many_sessions", f"{MAX_SESSIONS} sessions are open")
        self._note()
        session = secrets.token_hex(8)
        self._open[session] = (Game(secret_of(seed, self._words), self._words), self._now_s())
        self.opened_count += 1
        self.peak_count = max(self.peak_count, len(self._open))
        return {"session": session, "observation": START}

    def step(self, session: str, guess: str) -> dict[str, Any]:
        """Play a guess.

        Raises:
            Refused: There is no such session, or not any more.
        """
        self._expire()
        if session not in self._open:
            raise Refused(404, "no_session", "no such session is open: it is done, or expired")
        game, _ = self._open[session]
        outcome = game.step(guess)
        if outcome.done:
            self._note()
            del self._open[session]
        else:
            self._open[session] = (game, self._now_s())
            self._open.move_to_end(session)
        return outcome._asdict()

    def stats(self) -> dict[str, Any]:
        """How many sessions there are and were."""
        self._expire()
        self._note()
        lasted_s = self._changed_s - self._began_s
        return {
            "open": len(self._open),
            "peak": self.peak_count,
            "mean": self._busy_s / lasted_s if lasted_s > 0 else 0.0,
            "opened": self.opened_count,
            "expired": self.expired_count,
        }

    def _expire(self) -> None:
        while self._open:
            session, (_, used_s) = next(iter(self._open.items()))
            if self._now_s() - used_s <= MAX_IDLE_S:
                return
            self._note()
            del self._open[session]
            self.expired_count += 1

    def _note(self) -> None:
        """Before their number changes: for how long it was what it is, from the first one on."""
        now_s = self._now_s()
        if not self.opened_count:
            self._began_s = now_s
        else:
            self._busy_s += len(self._open) * (now_s - self._changed_s)
        self._changed_s = now_s


def make_app(sessions: Sessions) -> Starlette:
    """The ASGI application."""

    async def reset(request: Request) -> dict[str, Any]:
        asked = await _body(request, _Reset)
        if not 0 <= asked.seed < MAX_SEED:
            raise Refused(400, "invalid_value", f"a seed is from 0 to {MAX_SEED - 1}")
        return sessions.open(asked.seed)

    async def step(request: Request) -> dict[str, Any]:
        asked = await _body(request, _Guess)
        if len(asked.guess) > MAX_GUESS_CHARS:
            raise Refused(400, "invalid_value", f"a guess has at most {MAX_GUESS_CHARS} letters")
        return sessions.step(request.path_params["session"], asked.guess)

    async def stats(request: Request) -> dict[str, Any]:
        return sessions.stats()

    async def health(request: Request) -> dict[str, Any]:
        return {"status": "ok"}

    return Starlette(
        routes=[
            Route("/sessions", _answered(reset), methods=["POST"]),
            Route("/sessions/{session}/step", _answered(step), methods=["POST"]),
            Route("/stats", _answered(stats)),
            Route("/health", _answered(health)),
        ]
    )


def _answered(act: Act) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers in JSON, refusals too."""

    async def answer(request: Request) -> Response:
        try:
            status, facts = 200, await act(request)
        except Refused as error:
            status, facts = error.status, {"error": {"code": error.code, "message": error.message}}
        except ClientDisconnect:
            return Response(status_code=499)
        return Response(msgspec.json.encode(facts), status, media_type="application/json")

    return answer


async def _body(request: Request, kind: type[Any]) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, "too_large", f"a body has at most {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(body), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(400, "invalid_json", str(error)[:200]) from None


if __name__ == "__main__":
    port, word_count = map(int, sys.argv[1:])
    Listener(make_app(Sessions(WORDS[:word_count])), "127.0.0.1", port).run()
