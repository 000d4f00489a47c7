"""Events as structured log lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thinwire.stream.events import (
    CaughtUp,
    EngineFailed,
    Event,
    Fetched,
    Progressed,
    Refused,
)


class LogObserver:
    """Logs what happened under the event's name, its facts as fields.

    How far something is, and what a look found, is not logged. What was refused is a warning, what
    was fetched is for debugging, all else is information. The same refusal again and again, as of a
    store that is away for a while, is a warning once.

    Args:
        logger: A structlog logger; None: structlog's, as the process has set it up.
    """

    def __init__(self, logger: Any = None) -> None:
        if logger is None:
            import structlog

            logger = structlog.get_logger("thinwire")
        self._logger = logger
        self._refusal: Event | None = None

    def on_event(self, event: Event) -> None:
        """Log it."""
        refusal = self._refusal
        if isinstance(event, CaughtUp) and refusal is not None and not refusal.version:
            # What was refused there was a look: the next one is another.
            self._refusal = None
        if isinstance(event, Progressed | CaughtUp):
            return
        facts = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(event).items()
        }
        if not event.lineage:
            del facts["lineage"]
        if not event.version:
            del facts["version"]
        getattr(self._logger, self._level(event))(type(event).__name__.lower(), **facts)

    def _level(self, event: Event) -> str:
        if isinstance(event, Fetched):
            return "debug"
        if isinstance(event, EngineFailed):
            return "warning"
        if not isinstance(event, Refused):
            self._refusal = None
            return "info"
        is_repeated = event == self._refusal
        self._refusal = event
        return "debug" if is_repeated else "warning"
