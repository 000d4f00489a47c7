"""What is wrong between a replica and its hub, logged once and not each time."""

from __future__ import annotations

import logging
import time

_LOG = logging.getLogger("thinwire")
# The same again so much later is worth a line.
_AGAIN_S = 600.0
_MAX_REMEMBERED = 32


class Notices:
    """Logs what goes wrong with one thing that is asked of a hub. For one thread.

    Args:
        what: That thing, as in "heartbeats".
        url: The hub.
        work: What goes on without.
    """

    def __init__(self, what: str, url: str, work: str = "following") -> None:
        self._what = what
        self._work = work
        self._url = url
        self._told_s: dict[str, float] = {}
        self._is_wrong = False

    def wrong(self, reason: str) -> None:
        """It does not work."""
        now_s = time.monotonic()
        told_s = self._told_s.get(reason)
        if told_s is not None and now_s - told_s < _AGAIN_S:
            return
        if len(self._told_s) >= _MAX_REMEMBERED:
            self._told_s.clear()
        self._told_s[reason] = now_s
        self._is_wrong = True
        _LOG.warning(
            "the hub %s: %s fail: %s; %s goes on without",
            self._url,
            self._what,
            reason,
            self._work,
        )

    def right(self) -> None:
        """It works."""
        if self._is_wrong:
            self._is_wrong = False
            _LOG.info("the hub %s: %s work again", self._url, self._what)
