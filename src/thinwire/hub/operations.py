"""What a hub can be asked, as a table: for routes, roles, limits and their description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from thinwire.hub.answers import ApiError, answer_nothing
from thinwire.hub.asking import Parameter
from thinwire.web import Grant, NotAllowed, Role, Tokens, is_local_host


class Reply(Protocol):
    """A response: an ASGI application with a status."""

    status_code: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""


Act = Callable[[Request], Awaitable[Reply]]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One of an operation's answers.

    Attributes:
        about: When it comes.
        kind: The struct that its JSON holds; None: it has no JSON.
        media_type: Of what is no JSON; empty: it has no body.
    """

    about: str
    kind: Any = None
    media_type: str = ""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A method of a path.

    Attributes:
        method: The method; GET answers HEAD as well.
        path: The path, with names in braces.
        role: Whose token it needs; None: nobody's.
        about: What it does, one sentence.
        act: Does it.
        answers: By status; what goes wrong everywhere is left out.
        parameters: Of its query.
        headers: That it reads.
        body: The struct that its body holds; None: it reads none.
        is_open_ended: Whether the answer may take long, so that HEAD does not wait for it.
    """

    method: str
    path: str
    role: Role | None
    about: str
    act: Act
    answers: Mapping[int, Answered]
    parameters: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    body: Any = None
    is_open_ended: bool = False


@dataclass(frozen=True)
class Guard:
    """What all operations share.

    Attributes:
        tokens: Who may do what.
        count: Called for each answer with path, method and status.
        refuse: Called with path and reason of what a token does not allow.
        fail: Called with what nobody foresaw.
    """

    tokens: Tokens
    count: Callable[[str, str, int], None]
    refuse: Callable[[str, str], None]
    fail: Callable[[str, Exception], None]

    def check_host(self, request: Request) -> None:
        """Whether a request was meant for here, where no token says so.

        Raises:
            ApiError: A web page elsewhere may have made a browser send it.
        """
        if self.tokens or is_local_host(request.headers.get("host", "")):
            return
        raise ApiError(
            421,
            "access-denied",
            "without tokens this hub answers to names of this machine only",
            "Ask for localhost or 127.0.0.1, or give the hub --tokens",
        )

    def check(self, request: Request, role: Role | None) -> Grant:
        """What a request may do, which must be what needs a role.

        Raises:
            ApiError: It may not.
        """
        if role is None:
            return Grant()
        try:
            return self.tokens.check(request.headers.get("authorization", ""), role)
        except NotAllowed as refused:
            raise ApiError(refused.status, "access-denied", refused.message, refused.hint) from None


def routes_of(operations: Sequence[Operation], guard: Guard) -> list[Route]:
    """A route for each path."""
    by_path: dict[str, list[Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, []).append(operation)
    return [Route(path, _Path(path, found, guard)) for path, found in by_path.items()]


class _Path:
    """A path with its methods, as an ASGI application."""

    def __init__(self, path: str, operations: Sequence[Operation], guard: Guard) -> None:
        self._path = path
        self._guard = guard
        self._operations = {operation.method: operation for operation in operations}
        self._methods = {*self._operations, "OPTIONS"}
        if "GET" in self._operations:
            self._methods.add("HEAD")
        self._allow = ", ".join(sorted(self._methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        # Of methods anybody may make up any number: they are no label.
        method = request.method if request.method in self._methods else "other"
        try:
            reply = await self._reply(request)
        except ApiError as error:
            reply = error.response()
            if error.status == 405:
                reply.headers["allow"] = self._allow
            if error.status == 403:
                self._guard.refuse(self._path, str(error))
        except ClientDisconnect:
            self._guard.count(self._path, method, 499)
            return
        except Exception as error:
            self._guard.fail(self._path, error)
            reply = ApiError(500, "error", "this is a bug of the hub; its log says more").response()
        self._guard.count(self._path, method, reply.status_code)
        await reply(scope, receive, send)

    async def _reply(self, request: Request) -> Reply:
        self._guard.check_host(request)
        if request.method == "OPTIONS":
            return Response(None, 204, headers={"allow": self._allow})
        name = "GET" if request.method == "HEAD" else request.method
        operation = self._operations.get(name)
        if operation is None:
            raise ApiError(
                405, "invalid-argument", "this path knows no such method", f"Use {self._allow}"
            )
        request.state.grant = self._guard.check(request, operation.role)
        if request.method == "HEAD" and operation.is_open_ended:
            return answer_nothing(200)
        return await operation.act(request)


def refuse_path(guard: Guard) -> ASGIApp:
    """What answers where there is no path."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        guard.count("other", "other", 404)
        error = ApiError(404, "not-found", "there is no such path here", "See /openapi.json")
        await error.response()(scope, receive, send)

    return refuse
