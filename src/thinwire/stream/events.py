"""What happens on a stream, for whoever watches: logs, metrics, dashboards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from thinwire.errors import ThinwireError
from thinwire.stream.version import Version

_LOG = logging.getLogger("thinwire")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something happened to a version of a stream; ``url`` holds no credential."""

    url: str
    lineage: str
    version: int


@dataclass(frozen=True, kw_only=True)
class Published(Event):
    """A version is committed. ``wall_s`` runs from the call of publish to the commit."""

    step: int | None
    payload_bytes: int
    raw_bytes: int
    changed_count: int
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Progressed(Event):
    """Something is on its way to a version: told as a phase begins, then a few times a second.

    What ends it is :class:`Fetched`, :class:`Applied`, :class:`EngineUpdated` or a failure.
    ``total_bytes`` is 0 where it is not known.
    """

    phase: Literal["fetch", "apply", "update", "prove"]
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CaughtUp(Event):
    """A look at the stream ended with the sink at the newest version; told after each."""

    step: int | None


@dataclass(frozen=True, kw_only=True)
class Fetched(Event):
    """A delta or an anchor is here and verified. ``cached_bytes`` did not cross the network."""

    kind: str
    payload_bytes: int
    cached_bytes: int
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Applied(Event):
    """A sink is at a version. ``age_s``: since it was published, by the publisher's clock."""

    kind: str
    base: int | None
    wall_s: float
    age_s: float
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """Something of the stream was not used; ``code`` is that of the error."""

    code: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Maintained(Event):
    """The maintainer made or removed something: "merge", "anchor", "prune", "collect"."""

    kind: str
    object_count: int
    payload_bytes: int


@dataclass(frozen=True, kw_only=True)
class EngineUpdated(Event):
    """An engine serves a version.

    ``phases`` has the seconds of each step in order, ``pause_s`` is from the pause to the
    resumption, ``way`` is "changes" or "attach", ``cache`` the cache policy carried out;
    ``is_proved``: whether what it holds was compared with the version, None where it shows nothing.
    """

    engine: str
    label: str
    way: str
    changed_count: int
    phases: Mapping[str, float]
    pause_s: float
    cache: str
    is_proved: bool | None
    age_s: float
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineFailed(Event):
    """An engine did not get to a version; it serves ``served``, or nothing that is known."""

    engine: str
    code: str
    reason: str
    is_ready: bool
    served: int | None
    retry_s: float


class Observer(Protocol):
    """Told of every event, in the thread where it happens: be quick and do not raise."""

    def on_event(self, event: Event) -> None:
        """Take note of an event."""


class Refusals:
    """Passes on refusals only: for copies of the model that serve nobody."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_event(self, event: Event) -> None:
        """Tell of a refusal."""
        if isinstance(event, Refused):
            self._observer.on_event(event)


class Observers:
    """Several observers as one. None is no observer."""

    def __init__(self, *observers: Observer | None) -> None:
        self._observers = [observer for observer in observers if observer is not None]

    @property
    def is_nobody(self) -> bool:
        """Whether nobody would be told: what is only for watching can be left out."""
        return not self._observers

    def on_event(self, event: Event) -> None:
        """Tell each of them. What one of them raises is logged: it must not decide what happens."""
        for observer in self._observers:
            try:
                observer.on_event(event)
            except Exception:
                _LOG.exception("an observer failed on %s", type(event).__name__)

    def published(self, url: str, version: Version, wall_s: float) -> None:
        """Tell of a version that was committed."""
        self.on_event(
            Published(
                url=url,
                lineage=version.lineage,
                version=version.version,
                step=version.step,
                payload_bytes=version.payload_bytes,
                raw_bytes=version.raw_bytes,
                changed_count=version.changed_count,
                wall_s=wall_s,
            )
        )

    def refuse(self, url: str, lineage: str, version: int, error: ThinwireError) -> None:
        """Tell of what is not used; no lineage and version 0 where it is nothing in particular."""
        self.on_event(
            Refused(url=url, lineage=lineage, version=version, code=error.code, reason=str(error))
        )
