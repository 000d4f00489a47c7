"""Logs on stderr: for people on a terminal, JSON lines elsewhere; metrics beside them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from thinwire.cli.output import printable

if TYPE_CHECKING:
    from thinwire.stream.events import Observer


class LogLevel(StrEnum):
    """From which importance on something is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def make_logger(level: LogLevel) -> Any:
    """A structlog logger for stderr."""
    import structlog

    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if sys.stderr.isatty():
        processors += [_printable, structlog.dev.ConsoleRenderer()]
    else:
        processors.append(structlog.processors.JSONRenderer(default=str))
    number = logging.getLevelNamesMapping()[level.upper()]
    return structlog.wrap_logger(
        _Stderr(),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
    )


@contextmanager
def observing(
    level: LogLevel, metrics_port: int | None = None, *, follows: bool = True
) -> Iterator[tuple[Any, Any]]:
    """A logger, and an observer that logs to it and feeds the metrics endpoint, if asked for."""
    from thinwire.observe import LogObserver

    logger = make_logger(level)
    with _forwarding(logger):
        yield from _observing(logger, LogObserver(logger), metrics_port, follows)


def _observing(
    logger: Any, logs: Observer, metrics_port: int | None, follows: bool
) -> Iterator[tuple[Any, Any]]:
    from thinwire.stream.events import Observers

    if metrics_port is None:
        yield logger, Observers(logs)
        return
    from thinwire.observe.prometheus import (
        LOOPBACK,
        PrometheusObserver,
        make_registry,
        serve_metrics,
    )

    metrics = PrometheusObserver(make_registry(), follows=follows)
    with serve_metrics(metrics_port, metrics.registry) as port:
        logger.info("metrics", at=f"http://{LOOPBACK}:{port}/metrics")
        yield logger, Observers(logs, metrics)


@contextmanager
def _forwarding(logger: Any) -> Iterator[None]:
    """Send what the library logs by the standard module through ``logger`` as well."""

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = None if record.exc_info is None else repr(record.exc_info[1])
            more = {} if error is None else {"error": error}
            getattr(logger, record.levelname.lower(), logger.info)(record.getMessage(), **more)

    library, handler = logging.getLogger("thinwire"), Forward(logging.INFO)
    level = library.level
    library.addHandler(handler)
    library.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        library.removeHandler(handler)
        library.setLevel(level)


def _printable(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = printable(value)
    return fields


class _Stderr:
    """Where lines go. Looked up each time: progress bars put something of theirs in its place."""

    def msg(self, text: str) -> None:
        # Whoever reads the log may have gone; that must not end the work.
        with suppress(OSError, ValueError):
            # One write: threads that log at once must not tear each other's lines.
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    debug = info = warning = error = msg
