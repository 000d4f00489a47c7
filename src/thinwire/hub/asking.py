"""What requests ask: parameters and bodies, within limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from thinwire.hub.answers import ApiError

_BODY_WITHIN_S = 30.0
_INTEGER = re.compile(r"-?[0-9]{1,16}")
# As JSON writes them, or a person; floats have up to 17 digits after some zeros.
_NUMBER = re.compile(r"[+-]?[0-9]{1,17}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,3})?")
_SHOWN_CHARS = 60

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a query.

    Attributes:
        name: Its name.
        kind: What its value is.
        about: What it means.
        minimum: Of a number.
        maximum: Of a number.
        pattern: Of a string.
        is_required: Whether it must be there.
        default: What holds where it is not.
    """

    name: str
    kind: Literal["integer", "number", "string"]
    about: str
    minimum: float | None = None
    maximum: float | None = None
    pattern: str = ""
    is_required: bool = False
    default: Any = None

    def read(self, text: str) -> Any:
        """The value.

        Raises:
            ApiError: It is none.
        """
        if self.kind == "string":
            if re.search(self.pattern, text) is None or text.endswith("\n"):
                raise self._fault(text, f"must match {self.pattern}")
            return text
        form = _INTEGER if self.kind == "integer" else _NUMBER
        if form.fullmatch(text) is None:
            raise self._fault(
                text, f"must be {'an' if self.kind == 'integer' else 'a'} {self.kind}"
            )
        value = int(text) if self.kind == "integer" else float(text)
        is_within = (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )
        if not is_within:
            raise self._fault(text, f"must be from {self.minimum} to {self.maximum}")
        return value

    def _fault(self, text: str, what: str) -> ApiError:
        shown = text[:_SHOWN_CHARS]
        return ApiError(422, "invalid-argument", f"the parameter {self.name} {what}, not {shown!r}")


def read_query(request: Request, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The parameters of a request's query by name, with defaults.

    Raises:
        ApiError: One is not known, comes twice, is missing or malformed.
    """
    known = {parameter.name: parameter for parameter in parameters}
    values = {name: parameter.default for name, parameter in known.items()}
    given: set[str] = set()
    for name, text in request.query_params.multi_items():
        # A limit that was misspelled must not be taken for none.
        if name not in known:
            raise ApiError(
                400,
                "invalid-argument",
                f"there is no parameter {name[:_SHOWN_CHARS]!r} here",
                f"Known are {', '.join(known) or 'none'}",
            )
        if name in given:
            raise ApiError(400, "invalid-argument", f"the parameter {name} comes twice")
        given.add(name)
        values[name] = known[name].read(text)
    for name, parameter in known.items():
        if parameter.is_required and name not in given:
            raise ApiError(400, "invalid-argument", f"the parameter {name} is missing")
    return values


async def read_body(request: Request, kind: type[_T], limit_bytes: int) -> _T:
    """A request's body, decoded from JSON.

    Raises:
        ApiError: It is too long or too slow, is no JSON, or a field is not what it should be.
    """
    kind_given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind_given != "application/json":
        # A web page elsewhere cannot say so without having asked (CORS), which is not granted.
        raise ApiError(
            415, "invalid-argument", "the body is not said to be JSON", "Send application/json"
        )
    data = await _read(request, limit_bytes)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(422, "invalid-argument", f"the body will not do: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid-argument", f"the body is no JSON: {error}") from None


async def _read(request: Request, limit_bytes: int) -> bytes:
    size = request.headers.get("content-length", "")
    if size.isdecimal() and int(size[:20]) > limit_bytes:
        raise _too_long(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            async for part in request.stream():
                body += part
                if len(body) > limit_bytes:
                    raise _too_long(limit_bytes)
    except TimeoutError:
        raise ApiError(408, "deadline", "the body did not come in time", closes=True) from None
    return bytes(body)


def _too_long(limit_bytes: int) -> ApiError:
    return ApiError(
        413, "limit-exceeded", f"a body here has at most {limit_bytes} bytes", closes=True
    )
