"""Whether an engine may be sent requests, told whenever that changes."""

from __future__ import annotations

import logging
from collections.abc import Callable

_LOG = logging.getLogger("thinwire")


class Readiness:
    """What is known of it, from "no" at the beginning.

    Args:
        on_ready: Told; what it raises is logged.
    """

    def __init__(self, on_ready: Callable[[bool], None] | None) -> None:
        self._on_ready = on_ready
        self._is_ready = False
        self._tell()

    def __bool__(self) -> bool:
        return self._is_ready

    def set(self, is_ready: bool) -> None:
        """It may, or may not."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self._tell()

    def confirm(self) -> None:
        """A look found it as it was: if it may, that is told again."""
        if self._is_ready:
            self._tell()

    def _tell(self) -> None:
        if self._on_ready is not None:
            try:
                self._on_ready(self._is_ready)
            except Exception:
                _LOG.exception("on_ready failed")
