"""What the hot-load services' pages ask of a request, as our test server checks it."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from thinwire.testing.hot_load_fleet import Fleet, Snapshot

_MAX_BODY_BYTES = 1 << 20
_MAX_IDENTITY_CHARS = 128


class Refusal(Exception):
    """A call that the service's pages do not allow."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def identity_of(value: Any) -> str:
    """A snapshot's identity.

    Raises:
        Refusal: It is none.
    """
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_IDENTITY_CHARS:
        raise Refusal(400, "invalid_argument", "the identity is no text, empty or too long")
    if "/" in value or value in {".", ".."}:
        raise Refusal(400, "invalid_argument", f"the identity {value!r} is no path segment")
    return value


def fields_of(value: Any, known: dict[str, bool]) -> dict[str, Any]:
    """A table with these fields only; True: it must be there.

    Raises:
        Refusal: It is none.
    """
    if not isinstance(value, dict):
        raise Refusal(400, "invalid_argument", "no table of fields")
    for name in value:
        if name not in known:
            raise Refusal(400, "invalid_argument", f"{name}: Extra inputs are not permitted")
    for name, must_be in known.items():
        if must_be and name not in value:
            raise Refusal(400, "invalid_argument", f"{name}: Field required")
    return value


async def json_of(request: Request) -> Any:
    """A request's body.

    Raises:
        Refusal: It is not JSON, or does not say so.
    """
    if "json" not in request.headers.get("content-type", ""):
        raise Refusal(400, "invalid_argument", "the content type is not application/json")
    if int(request.headers.get("content-length", "0")) > _MAX_BODY_BYTES:
        raise Refusal(413, "invalid_argument", "the body is too long")
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise Refusal(400, "invalid_argument", "the body is not JSON") from error


def incremental_of(
    fleet: Fleet,
    identity: str,
    metadata: Any,
    names: tuple[str, str, str],
    allowed: tuple[set[str], set[str]],
) -> Snapshot:
    """An incremental snapshot that may follow what the fleet serves.

    Args:
        fleet: The replicas.
        identity: The snapshot's.
        metadata: What was sent of it.
        names: What the service calls the base, the compression and the checksum.
        allowed: The compressions and checksums that it knows.

    Raises:
        Refusal: It may not.
    """
    fields = fields_of(metadata, dict.fromkeys(names, True))
    base, compression, checksum = (fields[name] for name in names)
    for name, value, values in zip(names[1:], (compression, checksum), allowed, strict=True):
        if value not in values:
            raise Refusal(400, "invalid_argument", f"{name}: one of {sorted(values)}")
    if base not in fleet.ledger or base != fleet.current():
        raise Refusal(
            400,
            "failed_precondition",
            f"{names[0]} is {base!r}, and {fleet.current()!r} is served",
        )
    return Snapshot(identity, base, compression, checksum)
