"""Bearer tokens, and what each of them allows.

A file of tokens has a line for each::

    # role   token                                 name, for people
    read     5f0c1f6f0f7e4f6c9d0f2d3f4f5a6b7c      grafana
    follow   9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d      samplers-eu
    publish  1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed      trainer
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from pathlib import Path
from typing import Self

from thinwire.errors import InvalidArgument, from_os_error

_MAX_FILE_BYTES = 1 << 20
_MAX_TOKENS = 1000
_MIN_LETTERS = 16
_MAX_LETTERS = 512


class Role(StrEnum):
    """What a token is for; whoever follows or publishes may read too."""

    READ = "read"
    FOLLOW = "follow"
    PUBLISH = "publish"


_MAY = {
    Role.READ: frozenset({Role.READ}),
    Role.FOLLOW: frozenset({Role.READ, Role.FOLLOW}),
    Role.PUBLISH: frozenset({Role.READ, Role.PUBLISH}),
}


class Tokens:
    """The tokens that are known. Without any, everything is allowed.

    Args:
        roles: The role of each token.

    Raises:
        InvalidArgument: One is too short or too long, or has other than printable ASCII letters.
    """

    def __init__(self, roles: dict[str, Role] | None = None) -> None:
        # Digests are compared, all of one length: how long it takes says nothing of a token.
        self._roles = {}
        for token, role in (roles or {}).items():
            if fault := _token_fault(token):
                raise InvalidArgument(f"a token of the role {role} {fault}")
            self._roles[_digest(token)] = role

    @classmethod
    def read(cls, path: Path) -> Self:
        """The tokens of a file.

        Raises:
            InvalidArgument: A line is not as the module's docstring shows, or there is none.
            StoreError: It cannot be read.
        """
        roles: dict[str, Role] = {}
        for number, line in enumerate(_lines(path), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            # Neither the line nor the token is repeated: a log is no place for it.
            if len(words) < 2 or words[0] not in tuple(Role):
                raise InvalidArgument(
                    f"{path}, line {number}: no role and token",
                    hint="Write `read`, `follow` or `publish`, a blank, and the token",
                )
            if fault := _token_fault(words[1]):
                raise InvalidArgument(f"{path}, line {number}: the token {fault}", hint=_HINT)
            if words[1] in roles or len(roles) >= _MAX_TOKENS:
                raise InvalidArgument(
                    f"{path}, line {number}: the token stands twice, or there are too many",
                    hint=f"One line for each token, at most {_MAX_TOKENS}",
                )
            roles[words[1]] = Role(words[0])
        if not roles:
            raise InvalidArgument(f"{path} holds no token", hint=_HINT)
        return cls(roles)

    def __bool__(self) -> bool:
        return bool(self._roles)

    def roles_of(self, authorization: str) -> frozenset[Role]:
        """What the value of an Authorization header allows."""
        if not self._roles:
            return frozenset(Role)
        kind, _, given = authorization.partition(" ")
        given = given.strip()
        if kind.lower() != "bearer" or len(given) > _MAX_LETTERS:
            return frozenset()
        digest, found = _digest(given), frozenset[Role]()
        for known, role in self._roles.items():
            if hmac.compare_digest(known, digest):
                found = _MAY[role]
        return found


_HINT = f"At least {_MIN_LETTERS} letters and digits without blanks, such as `openssl rand -hex 24`"


def read_token(path: Path) -> str:
    """The one secret in a file.

    Raises:
        InvalidArgument: It holds none.
        StoreError: It cannot be read.
    """
    lines = _lines(path)
    token = lines[0].strip() if len(lines) == 1 else ""
    if _token_fault(token):
        raise InvalidArgument(f"{path} holds no token", hint=f"One line. {_HINT}")
    return token


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise from_os_error(error, "cannot read", path) from error
    if len(data) > _MAX_FILE_BYTES or not data.isascii():
        raise InvalidArgument(f"{path} is no file of tokens", hint=_HINT)
    return data.decode().strip().splitlines()


def _token_fault(token: str) -> str | None:
    if not _MIN_LETTERS <= len(token) <= _MAX_LETTERS:
        return f"has {len(token)} letters, not {_MIN_LETTERS} to {_MAX_LETTERS}"
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "has blanks, or letters that are not printable ASCII"
    return None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
