"""A hub that says whatever a test wants: what the real one never would, such as hostile names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from thinwire.hub.pages import find_page
from thinwire.report.messages import ReplicaStatus, StreamStatus, UpdateNote, VersionNote

POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class MadeUpHub:
    """What it says.

    Attributes:
        status: Of its only stream.
        versions: Newest first.
        replicas: In order of their names.
        updates: Newest first.
    """

    status: StreamStatus
    versions: list[VersionNote] = field(default_factory=list)
    replicas: list[ReplicaStatus] = field(default_factory=list)
    updates: list[UpdateNote] = field(default_factory=list)

    def app(self) -> Starlette:
        """Makes the application; what the fields hold at a request is what it answers."""
        stream = "/v1/streams/{stream}"
        return Starlette(
            routes=[
                Route("/", lambda request: page("index.html")),
                Route("/static/{name}", lambda request: page(request.path_params["name"])),
                Route("/v1/streams", lambda request: said({"streams": [self.status]})),
                Route(stream, lambda request: said(self.status)),
                Route(f"{stream}/versions", lambda request: said({"versions": self.versions})),
                Route(f"{stream}/updates", lambda request: said({"updates": self.updates})),
                Route(f"{stream}/replicas", self._replicas),
                Route(f"{stream}/events", self._events),
            ]
        )

    def _replicas(self, request: Request) -> Response:
        after = request.query_params.get("after", "")
        limit = int(request.query_params["limit"])
        left = [one for one in self.replicas if one.beat.replica > after]
        more = left[limit - 1].beat.replica if len(left) > limit else None
        return said({"replicas": left[:limit], "next": more, "counts": self.status.counts})

    def _events(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[str]:
            if self.status.head:
                note = msgspec.json.encode(self.status.head).decode()
                yield f"event: version\ndata: {note}\n\n"
            while not await request.is_disconnected():
                yield 'event: replicas\ndata: {"changed": 1}\n\n'
                await asyncio.sleep(1)

        return StreamingResponse(lines(), media_type="text/event-stream")


def said(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def page(name: str) -> Response:
    found = find_page(name)
    if found is None:
        return Response(status_code=404)
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response(found.data, media_type=found.media_type, headers=headers)
