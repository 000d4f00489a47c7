"""What a stream and a replica are called at a hub, where nobody said so."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from urllib.parse import unquote, urlsplit

from thinwire.errors import InvalidArgument
from thinwire.report.messages import NAME_PATTERN

_NAME = re.compile(NAME_PATTERN)
_MAX_CHARS = 64
_DIGEST_BYTES = 4


def check_name(what: str, name: str) -> str:
    """The name, where a hub can know something by it.

    Raises:
        InvalidArgument: It cannot.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidArgument(
            f"{what} is {name[:80]!r}",
            hint=f"Choose a name of at most {_MAX_CHARS} letters, digits, dots, colons, dashes and "
            "underscores that begins with a letter or a digit",
        )
    return name


def stream_name(url: str | os.PathLike[str]) -> str:
    """What a stream is called where nobody gave it a name: the last part of its URL.

    Raises:
        InvalidArgument: That is no name.
    """
    text = os.fspath(url)
    path = unquote(urlsplit(text).path) if "://" in text else str(Path(text).resolve())
    name = path.rstrip("/").rpartition("/")[2] or (urlsplit(text).hostname or "")
    if _NAME.fullmatch(name) is None:
        raise InvalidArgument(
            f"the last part of the stream's URL is {name[:80]!r}, which no hub has as a name",
            hint="Say what it is called: --hub-stream NAME for who follows and publishes, "
            "--stream NAME=URL for a hub or a relay",
        )
    return name


def named_streams(given: Sequence[str]) -> dict[str, str]:
    """URLs by name, from ``NAME=URL``, or ``URL``, whose name is that of :func:`stream_name`.

    Raises:
        InvalidArgument: A name is none, or comes twice.
    """
    urls: dict[str, str] = {}
    for text in given:
        name, is_named, url = text.partition("=")
        # A path may have the sign, too.
        if not is_named or "/" in name:
            name, url = stream_name(text), text
        check_name(f"the stream's name in {text[:80]!r}", name)
        if not url:
            raise InvalidArgument(
                f"no URL comes after {text[:80]!r}", hint="Write NAME=URL, or the URL alone"
            )
        if name in urls:
            raise InvalidArgument(
                f"two streams are called {name!r}", hint="Give one of them another: NAME=URL"
            )
        urls[name] = url
    return urls


def replica_name(place: str | os.PathLike[str]) -> str:
    """A name that is the same after a restart: this host's, and a digest of where the weights are.

    Args:
        place: What is there once on this host: the folder, or the engine's address.
    """
    text = os.fspath(place)
    if "://" not in text:
        text = str(Path(text).absolute())
    digest = blake2b(text.encode(errors="surrogateescape"), digest_size=_DIGEST_BYTES).hexdigest()
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "host"
    return f"{host[: _MAX_CHARS - len(digest) - 1]}-{digest}"
