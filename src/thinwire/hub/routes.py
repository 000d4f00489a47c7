"""The hub's own operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request

from thinwire.hub.answers import ApiError, answer_json, answer_nothing
from thinwire.hub.asking import Parameter, read_body, read_query
from thinwire.hub.board import Board
from thinwire.hub.bodies import (
    MAX_SIGNAL_BYTES,
    Health,
    Readiness,
    Replicas,
    Signal,
    Streams,
    Updates,
    Versions,
)
from thinwire.hub.operations import Act, Answered, Operation, Reply
from thinwire.hub.parameters import (
    EVENTS,
    LISTED_REPLICAS,
    LISTED_UPDATES,
    LISTED_VERSIONS,
    READY,
    WAIT,
)
from thinwire.hub.replicas import FleetFull
from thinwire.hub.status import Rule, counts_of
from thinwire.hub.waiting import EventReply, Known, wait_for_newer
from thinwire.report.messages import (
    MAX_HEARTBEAT_BYTES,
    Answer,
    Heartbeat,
    StreamStatus,
    VersionNote,
)
from thinwire.web import Grant, Role

# While what somebody said of a version cannot be seen in the bucket yet.
_CLOSE_S = 2.0


def _check_own(request: Request, replica: str, region: str | None = None) -> None:
    """Whether a request's token may speak for a replica.

    Raises:
        ApiError: It may not.
    """
    grant: Grant = request.state.grant
    if grant.is_for(replica, region):
        return
    where = "" if region is None else f" in the region {region!r}"
    raise ApiError(
        403,
        "access-denied",
        f"this token speaks for replica={grant.replica} region={grant.region}, not for"
        f" {replica[:64]!r}{where}",
        "Use its own token, or change the line of this one in the hub's file",
    )


def _showing(
    path: str, about: str, act: Act, kind: Any, parameters: tuple[Parameter, ...] = ()
) -> Operation:
    """What shows something to whoever may read."""
    return Operation(
        method="GET",
        path=path,
        role=Role.READ,
        about=about,
        act=act,
        parameters=parameters,
        answers={200: Answered(about="What was asked for.", kind=kind)},
    )


class Routes:
    """Answers from what boards know.

    Args:
        boards: The streams by name.
        wake: Has a stream's bucket looked at, and closely for so many seconds.
        rule: When replicas are ready, where nothing else is asked.
    """

    def __init__(
        self,
        boards: Mapping[str, Board],
        wake: Callable[[str, float], None],
        rule: Rule,
    ) -> None:
        self._boards = boards
        self._wake = wake
        self._rule = rule

    def operations(self) -> list[Operation]:
        """All of them."""
        stream = "/v1/streams/{stream}"
        return [
            Operation(
                method="GET",
                path="/health",
                role=None,
                about="Whether the hub answers.",
                act=self._health,
                answers={200: Answered(about="It does.", kind=Health)},
            ),
            _showing("/v1/streams", "All streams.", self._streams, Streams),
            _showing(
                stream, "A stream: its head, replicas and regions.", self._stream, StreamStatus
            ),
            _showing(
                f"{stream}/versions",
                "A stream's versions, newest first.",
                self._versions,
                Versions,
                LISTED_VERSIONS,
            ),
            _showing(
                f"{stream}/replicas",
                "A stream's replicas, by name; as they were up to a second ago.",
                self._replicas,
                Replicas,
                LISTED_REPLICAS,
            ),
            _showing(
                f"{stream}/updates",
                "Updates that replicas finished, newest first.",
                self._updates,
                Updates,
                LISTED_UPDATES,
            ),
            Operation(
                method="GET",
                path=f"{stream}/ready",
                role=Role.READ,
                about="Whether replicas are ready and fresh enough.",
                act=self._ready,
                parameters=READY,
                answers={
                    200: Answered(about="They are.", kind=Readiness),
                    503: Answered(about="They are not.", kind=Readiness),
                },
            ),
            Operation(
                method="GET",
                path=f"{stream}/wait",
                role=Role.READ,
                about="Wait until the head is newer than a version.",
                act=self._wait,
                parameters=WAIT,
                answers={
                    200: Answered(about="The head.", kind=VersionNote),
                    204: Answered(about="There was no newer one in time."),
                },
                is_open_ended=True,
            ),
            Operation(
                method="GET",
                path=f"{stream}/events",
                role=Role.READ,
                about="The head and each version from now on, and that replicas changed.",
                act=self._events,
                parameters=EVENTS,
                answers={200: Answered(about="Events.", media_type="text/event-stream")},
                is_open_ended=True,
            ),
            Operation(
                method="POST",
                path=f"{stream}/signal",
                role=Role.PUBLISH,
                about="A version was committed: look at the bucket now.",
                act=self._signal,
                body=Signal,
                answers={202: Answered(about="It is being looked at.")},
            ),
            Operation(
                method="POST",
                path=f"{stream}/heartbeats",
                role=Role.FOLLOW,
                about="What a replica or a relay says of itself.",
                act=self._beat,
                body=Heartbeat,
                answers={200: Answered(about="The head, and when to say more.", kind=Answer)},
            ),
            Operation(
                method="DELETE",
                path=f"{stream}/replicas/{{replica}}",
                role=Role.FOLLOW,
                about="A replica left.",
                act=self._leave,
                answers={204: Answered(about="It is forgotten.")},
            ),
        ]

    def _board(self, request: Request) -> Board:
        name = request.path_params["stream"]
        board = self._boards.get(name)
        if board is None:
            raise ApiError(
                404,
                "not-found",
                f"no stream is called {name[:64]!r} here",
                f"Known are {', '.join(sorted(self._boards))[:300]}",
            )
        return board

    async def _health(self, request: Request) -> Reply:
        return answer_json(Health("ok"))

    async def _streams(self, request: Request) -> Reply:
        read_query(request, ())
        boards = sorted(self._boards.items())
        return answer_json(Streams([board.status() for _, board in boards]))

    async def _stream(self, request: Request) -> Reply:
        read_query(request, ())
        return answer_json(self._board(request).status())

    async def _versions(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, LISTED_VERSIONS)
        return answer_json(Versions(board.versions(asked["limit"], asked["before"])))

    async def _wait(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, WAIT)
        known = Known(asked["lineage"], asked["after"])
        wake = partial(self._wake, board.name, _CLOSE_S)
        return await wait_for_newer(request, board, known, asked["timeout_s"], wake)

    async def _events(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, EVENTS)
        return EventReply(board, hears_replicas=asked["only"] is None)

    async def _signal(self, request: Request) -> Reply:
        board = self._board(request)
        signal = await read_body(request, Signal, MAX_SIGNAL_BYTES)
        latest = board.latest
        is_known = latest is not None and signal.version <= latest.note.version
        self._wake(board.name, 0.0 if is_known else _CLOSE_S)
        return answer_nothing(202)

    async def _beat(self, request: Request) -> Reply:
        board = self._board(request)
        beat = await read_body(request, Heartbeat, MAX_HEARTBEAT_BYTES)
        _check_own(request, beat.replica, beat.region)
        try:
            answer = board.beat(beat)
        except FleetFull as error:
            raise ApiError(
                429, "limit-exceeded", str(error), "Run another hub for some of them"
            ) from None
        if board.may_be_ahead(beat.replica):
            self._wake(board.name, 0.0)
        return answer_json(answer)

    async def _leave(self, request: Request) -> Reply:
        board = self._board(request)
        name = request.path_params["replica"]
        _check_own(request, name)
        if not board.leave(name):
            raise ApiError(404, "not-found", f"no replica is called {name[:64]!r} here")
        return answer_nothing()

    async def _replicas(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, LISTED_REPLICAS)
        statuses = board.statuses()
        if asked["region"] is not None:
            statuses = [one for one in statuses if one.beat.region == asked["region"]]
        later = [one for one in statuses if one.beat.replica > asked["after"]]
        shown = later[: asked["limit"]]
        following = shown[-1].beat.replica if len(shown) < len(later) else None
        return answer_json(Replicas(shown, following, counts_of(statuses)))

    async def _ready(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, READY)
        rule = self._rule
        if asked["max_staleness_steps"] is not None:
            rule = rule._replace(max_staleness_steps=asked["max_staleness_steps"])
        rule = rule._replace(
            share=asked["share"],
            min_count=asked["min_count"],
            published=asked["published"],
            ignores_lost=asked["lost"] is not None,
        )
        # Before the replicas are looked at: what they are measured against is no older.
        head_version = 0 if board.latest is None else board.latest.note.version
        if rule.published > head_version:
            self._wake(board.name, _CLOSE_S)
        if asked["replica"] is not None:
            one = board.replica(asked["replica"])
            if one is None:
                raise ApiError(404, "not-found", f"no replica is called {asked['replica']!r} here")
            statuses = [one]
        else:
            statuses = board.statuses()
        if asked["region"] is not None:
            statuses = [one for one in statuses if one.beat.region == asked["region"]]
        verdict = board.judge(statuses, rule, head_version, is_one=asked["replica"] is not None)
        return answer_json(verdict, 200 if verdict.is_ready else 503)

    async def _updates(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, LISTED_UPDATES)
        return answer_json(Updates(board.updates(asked["limit"])))
