"""What a driver tells its observer: updates and failures of the engine, refusals of the stream."""

from __future__ import annotations

import time
from typing import Literal

from thinwire.engines.walk import Served
from thinwire.errors import ThinwireError
from thinwire.stream.events import (
    EngineFailed,
    EngineUpdated,
    Observer,
    Observers,
    Progressed,
)
from thinwire.stream.version import Version


class Teller:
    """Makes events of what a driver does.

    Args:
        observer: Told of them.
        engine: The engine's name.
        url: The stream.
    """

    def __init__(self, observer: Observer | None, engine: str, url: str) -> None:
        self._observers = Observers(observer)
        self._engine = engine
        self._url = url

    def began(self, phase: Literal["update", "prove"], version: Version) -> None:
        """The engine is on its way to a version, or is being asked whether it is there."""
        self._observers.on_event(
            Progressed(url=self._url, lineage=version.lineage, version=version.version, phase=phase)
        )

    def updated(self, served: Served) -> None:
        """The engine serves a version."""
        version = served.version
        self._observers.on_event(
            EngineUpdated(
                url=self._url,
                lineage=version.lineage,
                version=version.version,
                engine=self._engine,
                label=served.label,
                way=served.way,
                changed_count=served.changed_count,
                phases=dict(served.phases),
                pause_s=served.pause_s,
                cache=served.cache,
                is_proved=served.is_proved,
                age_s=time.time() - version.created_ms / 1000,
                step=version.step,
            )
        )

    def failed(
        self,
        version: Version | None,
        error: ThinwireError,
        *,
        is_ready: bool,
        served: Version | None,
        retry_s: float,
    ) -> None:
        """The engine did not get to a version; None: it was only asked how it is."""
        self._observers.on_event(
            EngineFailed(
                url=self._url,
                lineage="" if version is None else version.lineage,
                version=0 if version is None else version.version,
                engine=self._engine,
                code=error.code,
                reason=str(error),
                is_ready=is_ready,
                served=None if served is None else served.version,
                retry_s=retry_s,
            )
        )

    def refused(self, error: ThinwireError) -> None:
        """The stream cannot be followed at the moment."""
        self._observers.refuse(self._url, "", 0, error)
