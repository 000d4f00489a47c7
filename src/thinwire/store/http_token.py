"""The bearer token of a relay, from the environment."""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from urllib.parse import SplitResult

from thinwire.errors import InvalidArgument, from_os_error

_LOG = logging.getLogger("thinwire")
TOKEN_VARIABLE = "THINWIRE_HTTP_TOKEN"
TOKEN_FILE_VARIABLE = "THINWIRE_HTTP_TOKEN_FILE"
_MAX_TOKEN_LETTERS = 512
# Files that were warned of: two options may name one.
_TOLD: set[str] = set()


def token_for(parts: SplitResult, environment: Mapping[str, str]) -> str:
    """The token to bring to a server; empty: none.

    Args:
        parts: Of the server's URL.
        environment: Where it, or the name of a file that holds it, is.

    Raises:
        InvalidArgument: It is none.
        StoreError: Its file cannot be read.
    """
    token = _token(environment)
    if token and parts.scheme.lower() == "http" and not is_near(str(parts.hostname)):
        _LOG.warning(
            "the token goes to %s in clear, over http://: whoever is in between can read it",
            parts.hostname,
        )
    return token


def is_near(host: str) -> bool:
    """Whether nobody can be in between: it is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tell_if_open(file: BufferedReader) -> None:
    """Warn where everybody on this machine may read a file of secrets.

    Of a signing key that is an error. These come from a mount as well, whose mode is not theirs.
    """
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if mode & 0o007 and file.name not in _TOLD:
        _TOLD.add(file.name)
        _LOG.warning(
            "everybody on this machine may use the token in %s (its mode is %o): chmod 600",
            file.name,
            mode,
        )


def _token(environment: Mapping[str, str]) -> str:
    token = environment.get(TOKEN_VARIABLE, "")
    name, source = environment.get(TOKEN_FILE_VARIABLE, ""), TOKEN_VARIABLE
    if not token and name:
        source = name
        try:
            with Path(name).open("rb") as file:
                tell_if_open(file)
                token = file.read(_MAX_TOKEN_LETTERS + 2).decode("ascii", "replace")
        except OSError as error:
            raise from_os_error(error, "cannot read", name) from error
    lines = token.splitlines()
    if len(lines) > 1:
        raise InvalidArgument(
            f"{source} holds {len(lines)} lines", hint="Give a file with one token alone"
        )
    token = token.strip()
    is_plain = token.isascii() and token.isprintable() and " " not in token
    # An empty variable is none; an empty file is one that somebody forgot to fill.
    is_missing = not token and source != TOKEN_VARIABLE
    if is_missing or not is_plain or len(token) > _MAX_TOKEN_LETTERS:
        raise InvalidArgument(
            f"{source} holds no token", hint="A token is printable ASCII letters on one line"
        )
    return token
