"""Answers as JSON, and the errors among them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_MAX_TEXT = 500


class ErrorFacts(msgspec.Struct, frozen=True):
    """What went wrong.

    Attributes:
        code: One word for programs.
        message: What and where.
        hint: What to do next; may be empty.
    """

    code: str
    message: str
    hint: str = ""


class ErrorBody(msgspec.Struct, frozen=True):
    """What is answered in place of what was asked for."""

    error: ErrorFacts


class ApiError(Exception):
    """A request that is not answered as it was meant.

    Args:
        status: The HTTP status.
        code: One word for programs.
        message: What and where.
        hint: What to do next.
        closes: Whether the connection is to be closed: the rest of the body is not read.
    """

    def __init__(
        self, status: int, code: str, message: str, hint: str = "", *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(ErrorFacts(code, message[:_MAX_TEXT], hint))
        self.closes = closes

    def response(self) -> Response:
        """The answer."""
        response = answer_json(self.body, self.status)
        if self.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        if self.closes:
            response.headers["connection"] = "close"
        return response


def answer_json(facts: Any, status: int = 200) -> Response:
    """Facts as JSON, never kept by anybody in between."""
    return answer_data(msgspec.json.encode(facts), status)


def answer_data(data: bytes, status: int = 200) -> Response:
    """JSON that is encoded already."""
    return Response(
        data,
        status,
        media_type="application/json",
        headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
    )


def answer_nothing(status: int = 204) -> Response:
    """An answer without a body."""
    return Response(None, status, headers={"cache-control": "no-store"})
