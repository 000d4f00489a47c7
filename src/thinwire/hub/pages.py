"""The dashboard's files: a fixed table, read once; no path comes from a request."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

_HTML = "text/html; charset=utf-8"
_CSS = "text/css; charset=utf-8"
_SCRIPT = "text/javascript; charset=utf-8"
_ICON = "image/svg+xml"

_MEDIA_TYPES = {
    "index.html": _HTML,
    "icon.svg": _ICON,
    "colours.css": _CSS,
    "page.css": _CSS,
    "panels.css": _CSS,
    "activity.js": _SCRIPT,
    "dom.js": _SCRIPT,
    "figures.js": _SCRIPT,
    "fleet.js": _SCRIPT,
    "format.js": _SCRIPT,
    "hub.js": _SCRIPT,
    "line.js": _SCRIPT,
    "live.js": _SCRIPT,
    "main.js": _SCRIPT,
    "refresh.js": _SCRIPT,
    "replica_list.js": _SCRIPT,
    "settings.js": _SCRIPT,
    "staleness.js": _SCRIPT,
    "theme.js": _SCRIPT,
    "tip.js": _SCRIPT,
    "token.js": _SCRIPT,
    "updates.js": _SCRIPT,
    "versions_chart.js": _SCRIPT,
}


class Page(NamedTuple):
    """A file of the dashboard.

    Attributes:
        data: Its bytes.
        media_type: What a browser is told that it is.
    """

    data: bytes
    media_type: str


def find_page(name: str) -> Page | None:
    """Finds a file of the dashboard by its name, as the table has it.

    Args:
        name: Such as ``index.html``; whatever else a request may have said finds nothing.
    """
    media_type = _MEDIA_TYPES.get(name)
    return None if media_type is None else Page(_read(name), media_type)


@cache
def _read(name: str) -> bytes:
    return (files("thinwire.hub") / "static" / name).read_bytes()
