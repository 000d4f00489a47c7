"""The one thread that uses the model: takes requests in the order they came, several at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thinwire.engines.transformers.protocol import ApiError, Limits, Wanted
from thinwire.engines.transformers.sampling import Reading, Row, Sampler
from thinwire.engines.transformers.text import TextOf
from thinwire.errors import BaseUnusable, Deadline, ThinwireError
from thinwire.stream.version import Version


@dataclass(frozen=True)
class Piece:
    """What is new of one answer.

    Attributes:
        number: Which answer of the request.
        text: New text.
        start: The number of its first new token.
        stop: One more than that of its last.
        finish: Why the answer ended; None: it has not.
    """

    number: int
    text: str
    start: int
    stop: int
    finish: str | None


@dataclass(eq=False)
class Job:
    """A request that waits for the model, or is being answered.

    Attributes:
        rows: Its answers.
        texts: Their texts.
        wanted: Which versions may answer.
        tell: Called in the worker's thread with each piece, and at the end with None or an error.
        streams: Whether each piece is told; else the last one of each answer.
    """

    rows: list[Row]
    texts: list[TextOf]
    wanted: Wanted
    tell: Callable[[Piece | Exception | None], None]
    streams: bool
    is_ended: bool = False
    _told: dict[int, int] = field(default_factory=dict)

    @property
    def token_area(self) -> int:
        """Tokens that its answers may have, prompts included."""
        return sum(len(row.prompt) + row.options.max_tokens for row in self.rows)

    def cancel(self) -> None:
        """Nobody waits for it any more. From any thread."""
        for row in self.rows:
            row.is_cancelled = True

    def note(self, row: Row) -> None:
        """Tell of a new token."""
        number = self.rows.index(row)
        text = self.texts[number]
        text.add(row.tokens[-1].token)
        if text.is_stopped:
            row.finish = "stop"
        if row.finish is not None:
            text.end()
            if text.is_stopped:
                row.finish = "stop"
        if self.streams or row.finish is not None:
            start = self._told.get(number, 0)
            self._told[number] = len(row.tokens)
            new = text.take(is_last=row.finish is not None)
            self.tell(Piece(number, new, start, len(row.tokens), row.finish))

    def end(self, error: Exception | None = None) -> None:
        """Tell that nothing follows."""
        if not self.is_ended:
            self.is_ended = True
            for row in self.rows:
                row.finish = row.finish or "ended"
            self.tell(error)


class Worker:
    """Samples what is asked for, in a thread of its own.

    Requests that wait are answered together as far as the limits allow. Those that come while a
    batch runs wait for its end.

    Args:
        sampler: The model's sampler.
        reading: Guards the model.
        limits: How much at once.
        is_interruptible: Whether updates may come between two tokens.
        logger: structlog's.
    """

    def __init__(
        self,
        sampler: Sampler,
        reading: Reading,
        limits: Limits,
        *,
        is_interruptible: bool,
        logger: Any,
    ) -> None:
        self._sampler = sampler
        self._reading = reading
        self._limits = limits
        self._is_interruptible = is_interruptible
        self._logger = logger
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="thinwire-sampling", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being answered."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Have a request answered. From any thread."""
        with self._changed:
            is_over = self._is_over
            if not is_over:
                self._waiting.append(job)
                self._changed.notify_all()
        if is_over:
            job.end(ApiError(503, "the server is shutting down", "shutting_down"))

    def close(self) -> None:
        """End after the token that runs; who waits is told."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(60)

    def _run(self) -> None:
        while True:
            jobs = self._next_batch()
            if not jobs:
                return
            try:
                self._answer(jobs)
                error: Exception | None = None
            except Exception as caught:
                error = self._as_error(caught)
            for job in jobs:
                job.end(error)

    def _next_batch(self) -> list[Job]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._is_over:
                for job in self._waiting:
                    job.end(ApiError(503, "the server is shutting down", "shutting_down"))
                return []
            jobs = [self._waiting.popleft()]
            while self._waiting and self._fits(jobs, self._waiting[0]):
                jobs.append(self._waiting.popleft())
            return jobs

    def _fits(self, jobs: list[Job], job: Job) -> bool:
        rows = [row for other in (*jobs, job) for row in other.rows]
        if len(rows) > self._limits.rows or self._is_whole(jobs[0]) != self._is_whole(job):
            return False
        if not self._sampler.can_pad and len({len(row.prompt) for row in rows}) > 1:
            return False
        longest = max(len(row.prompt) + row.options.max_tokens for row in rows)
        # Padding must not make many short requests expensive because of a long one.
        return longest * len(rows) <= 2 * sum(one.token_area for one in (*jobs, job))

    def _is_whole(self, job: Job) -> bool:
        return not self._is_interruptible or job.wanted.exact_version is not None

    def _answer(self, jobs: list[Job]) -> None:
        owner = {id(row): job for job in jobs for row in job.rows}

        def check(version: Version) -> None:
            for job in jobs:
                if not job.wanted.allows(version):
                    job.end(version_conflict(job.wanted, version))

        def on_token(row: Row) -> None:
            job = owner[id(row)]
            job.note(row)
            if self._is_over:
                job.end(ApiError(503, "the server is shutting down", "shutting_down"))

        rows = [row for job in jobs for row in job.rows if not row.is_cancelled]
        self._sampler.run(
            rows,
            self._reading,
            on_token,
            is_interruptible=not self._is_whole(jobs[0]),
            check=check,
        )

    def _as_error(self, error: Exception) -> Exception:
        if isinstance(error, BaseUnusable | Deadline):
            return ApiError(503, str(error), "not_ready")
        self._logger.error("sampling failed", error=repr(error), exc_info=True)
        if isinstance(error, ThinwireError):
            return ApiError(500, str(error), error.code)
        return ApiError(500, "sampling failed; the server's log says why", "sampling_failed")


def version_conflict(wanted: Wanted, version: Version | None) -> ApiError:
    """The answer to a request whose version is not here."""
    name = "min_version" if wanted.exact_version is None else "exact_version"
    asked = wanted.min_version if wanted.exact_version is None else wanted.exact_version
    here = None if version is None else version.version
    return ApiError(
        409,
        f"the request wants {name} {asked}, and version {here} is served",
        "version_unavailable",
        param=name,
        wanted_version=asked,
        served_version=here,
    )
