"""Bearer tokens, and what each of them allows.

A file of tokens has a line for each::

    # role   token                                 name, for people
    read     5f0c1f6f0f7e4f6c9d0f2d3f4f5a6b7c      grafana
    follow   9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d      samplers-eu   replica=eu-* region=eu
    publish  1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed      trainer

``replica=`` and ``region=``, with ``*`` for any letters, say for whom a token of the role "follow"
may speak; without them it is for everybody. A region goes with the names of its replicas: who comes
first with a name says nothing of whose it is, as a hub that was started again knows nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, Self

from thinwire.errors import InvalidArgument, from_os_error
from thinwire.store.http_token import tell_if_open

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
# Of names, and few stars: looking for them takes no time.
_PATTERN = re.compile(r"(?:\*?[A-Za-z0-9._:-]+){0,4}\*?", re.ASCII)
_MAX_PATTERN_LETTERS = 64
_NAME = re.compile(r"(?!(?:region|replica)s?\Z)[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


class Grant(NamedTuple):
    """What somebody may do.

    Attributes:
        roles: As what; none: nothing.
        replica: For replicas that are called so ...
        region: ... while they are in such a region.
    """

    roles: frozenset[Role] = frozenset()
    replica: str = "*"
    region: str = "*"

    def is_for(self, replica: str, region: str | None = None) -> bool:
        """Whether it may speak for a replica; in a region, if one is given."""
        return fnmatchcase(replica, self.replica) and (
            region is None or fnmatchcase(region, self.region)
        )


class NotAllowed(Exception):
    """A request may not do what it asks for.

    Attributes:
        status: HTTP's: 401: who asks is not known, 403: known, and may not.
        message: What is missing.
        hint: What to do next.
    """

    def __init__(self, status: int, message: str, hint: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint


class Tokens:
    """The tokens that are known. Without any, everything is allowed.

    Args:
        known: The role of each token, or all that it allows.

    Raises:
        InvalidArgument: One is too short or too long, or has other than printable ASCII letters.
    """

    def __init__(self, known: Mapping[str, Role | Grant] | None = None) -> None:
        # Digests are compared, all of one length: how long it takes says nothing of a token.
        self._grants: dict[bytes, Grant] = {}
        for token, allowed in (known or {}).items():
            if fault := _token_fault(token):
                raise InvalidArgument(f"a token {fault}")
            grant = Grant(_MAY[allowed]) if isinstance(allowed, Role) else allowed
            self._grants[_digest(token)] = grant

    @classmethod
    def read(cls, path: Path) -> Self:
        """The tokens of a file.

        Raises:
            InvalidArgument: A line is not as the module's docstring shows, or there is none.
            StoreError: It cannot be read.
        """
        known: dict[str, Grant] = {}
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
            if words[1] in known or len(known) >= _MAX_TOKENS:
                raise InvalidArgument(
                    f"{path}, line {number}: the token stands twice, or there are too many",
                    hint=f"One line for each token, at most {_MAX_TOKENS}",
                )
            role = Role(words[0])
            known[words[1]] = Grant(
                _MAY[role], **_bounds(role, words[2:], f"{path}, line {number}")
            )
        if not known:
            raise InvalidArgument(f"{path} holds no token", hint=_HINT)
        return cls(known)

    def __bool__(self) -> bool:
        return bool(self._grants)

    def check(self, authorization: str, role: Role) -> Grant:
        """What the value of an Authorization header allows; a role must be among it.

        Raises:
            NotAllowed: It is not.
        """
        grant = self.grant_of(authorization)
        if not grant.roles:
            known = "this is no token that is known here"
            raise NotAllowed(
                401,
                known if authorization else "a bearer token is needed",
                "Send `Authorization: Bearer TOKEN` with a token of the server's file",
            )
        if role not in grant.roles:
            raise NotAllowed(
                403,
                f"this token may not do that: it takes one of the role {role}",
                f"Use a token whose line in the server's file begins with {role}",
            )
        return grant

    def grant_of(self, authorization: str) -> Grant:
        """What the value of an Authorization header allows."""
        if not self._grants:
            return Grant(frozenset(Role))
        kind, _, given = authorization.partition(" ")
        given = given.strip()
        if kind.lower() != "bearer" or len(given) > _MAX_LETTERS:
            return Grant()
        digest, found = _digest(given), Grant()
        for known, grant in self._grants.items():
            if hmac.compare_digest(known, digest):
                found = grant
        return found


_HINT = f"At least {_MIN_LETTERS} letters and digits without blanks, such as `openssl rand -hex 24`"


def read_token(path: Path) -> str:
    """The one secret in a file.

    Raises:
        InvalidArgument: It holds none.
        StoreError: It cannot be read.
    """
    lines = _lines(path)
    if len(lines) > 1:
        raise InvalidArgument(
            f"{path} holds {len(lines)} lines", hint="Give a file with one token alone"
        )
    token = lines[0].strip() if lines else ""
    if fault := _token_fault(token):
        raise InvalidArgument(f"{path} holds no token: what is there {fault}", hint=_HINT)
    return token


def _bounds(role: Role, words: list[str], where: str) -> dict[str, str]:
    """For whom a token may speak, from what follows it: a name, and NAME=PATTERN."""
    bounds: dict[str, str] = {}
    names: list[str] = []
    for word in words:
        name, equals, pattern = word.partition("=")
        is_known = role is Role.FOLLOW and name in ("region", "replica") and name not in bounds
        is_short = 0 < len(pattern) <= _MAX_PATTERN_LETTERS
        if is_known and is_short and _PATTERN.fullmatch(pattern):
            bounds[name] = pattern
        elif not equals and not names and _NAME.fullmatch(word):
            names.append(word)
        else:
            # What was misspelled must not be taken for no bound at all.
            raise InvalidArgument(
                f"{where}: {word[:_MAX_PATTERN_LETTERS]!r} is neither the token's name nor a bound",
                hint="After a token comes a name for people, one word; after one of the role follow"
                " also replica=eu-* and region=eu",
            )
    if bounds.keys() == {"region"}:
        raise InvalidArgument(
            f"{where}: region={bounds['region']} alone keeps nobody from the names of others",
            hint="Say how the region's replicas are called as well, such as replica=eu-*",
        )
    return bounds


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            tell_if_open(file)
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
