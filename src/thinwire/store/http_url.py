"""What the URL of a server that is asked over HTTP may hold."""

from __future__ import annotations

from urllib.parse import urlsplit


def url_problem(url: str) -> str:
    """What keeps a URL from being ``http[s]://HOST[:PORT][/PATH]``; empty: nothing.

    Whoever repeats it must not where there is an "@" in it: it may hold a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "is not an address"
    if parts.scheme not in {"http", "https"}:
        return "begins with neither http:// nor https://"
    if not parts.hostname or port == 0:
        return "names no host, or no port"
    if parts.username is not None or parts.password is not None:
        return "has a user or a password in it"
    if parts.query or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        return "has more than a host, a port and a path"
    return ""
