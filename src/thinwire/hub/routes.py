"""The hub's own operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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
from thinwire.hub.listening import EventReply, Known, wait_for_newer
from thinwire.hub.operations import Answered, Operation, Reply
from thinwire.hub.replicas import FleetFull
from thinwire.hub.status import Rule, counts_of
from thinwire.report.messages import (
    MAX_HEARTBEAT_BYTES,
    NAME_PATTERN,
    Answer,
    Heartbeat,
    StreamStatus,
    VersionNote,
)
from thinwire.web import Role

MAX_WAIT_S = 60.0
_MAX_LIMIT = 1000
_MAX_VERSION = 10**12 - 1
# While what somebody said of a version cannot be seen in the bucket yet.
_CLOSE_S = 2.0
_LINEAGE_PATTERN = r"^(?:[0-9a-f]{32})?$"

_AFTER = Parameter(
    name="after", kind="string", about="Names after this one.", pattern=NAME_PATTERN, default=""
)
_REGION = Parameter(name="region", kind="string", about="Only this region.", pattern=NAME_PATTERN)
_WAIT = (
    Parameter(
        name="lineage",
        kind="string",
        about="The lineage of what is known.",
        pattern=_LINEAGE_PATTERN,
        default="",
    ),
    Parameter(
        name="after",
        kind="integer",
        about="The version that is known; 0: none.",
        minimum=0,
        maximum=_MAX_VERSION,
        default=0,
    ),
    Parameter(
        name="timeout_s",
        kind="number",
        about="How long to wait.",
        minimum=0,
        maximum=MAX_WAIT_S,
        default=30.0,
    ),
)
_EVENTS = (
    Parameter(
        name="only",
        kind="string",
        about="`versions`: nothing is told of replicas.",
        pattern="^versions$",
    ),
)
_READY = (
    Parameter(
        name="max_staleness_steps",
        kind="integer",
        about="How far behind a replica may be; default: the hub's rule.",
        minimum=0,
        maximum=2**53 - 1,
    ),
    Parameter(name="replica", kind="string", about="Only this one.", pattern=NAME_PATTERN),
    _REGION,
    Parameter(
        name="share",
        kind="number",
        about="How many of all must be ready.",
        minimum=0,
        maximum=1,
        default=1.0,
    ),
    Parameter(
        name="min_count",
        kind="integer",
        about="How many must be ready at least.",
        minimum=1,
        maximum=_MAX_VERSION,
        default=1,
    ),
    Parameter(
        name="published",
        kind="integer",
        about="A version that was published: not ready before the hub has read it, or a later one."
        " How far behind that replicas may be says max_staleness_steps.",
        minimum=0,
        maximum=_MAX_VERSION,
        default=0,
    ),
    Parameter(
        name="lost",
        kind="string",
        about="`ignore`: those that are lost do not count; else they are not ready.",
        pattern="^ignore$",
    ),
)


def _limit(default: int) -> Parameter:
    return Parameter(
        name="limit",
        kind="integer",
        about="How many at most.",
        minimum=1,
        maximum=_MAX_LIMIT,
        default=default,
    )


_LISTED_VERSIONS = (
    _limit(100),
    Parameter(
        name="before",
        kind="integer",
        about="Only versions before this one.",
        minimum=1,
        maximum=_MAX_VERSION,
    ),
)
_LISTED_REPLICAS = (_REGION, _limit(200), _AFTER)
_LISTED_UPDATES = (_limit(200),)


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
        read = Role.READ
        return [
            Operation(
                method="GET",
                path="/health",
                role=None,
                about="Whether the hub answers.",
                act=self._health,
                answers={200: Answered(about="It does.", kind=Health)},
            ),
            Operation(
                method="GET",
                path="/v1/streams",
                role=read,
                about="All streams.",
                act=self._streams,
                answers={200: Answered(about="They are.", kind=Streams)},
            ),
            Operation(
                method="GET",
                path=stream,
                role=read,
                about="A stream: its head, replicas and regions.",
                act=self._stream,
                answers={200: Answered(about="It is.", kind=StreamStatus)},
            ),
            Operation(
                method="GET",
                path=f"{stream}/versions",
                role=read,
                about="A stream's versions, newest first.",
                act=self._versions,
                parameters=_LISTED_VERSIONS,
                answers={200: Answered(about="They are.", kind=Versions)},
            ),
            Operation(
                method="GET",
                path=f"{stream}/wait",
                role=read,
                about="Wait until the head is newer than a version.",
                act=self._wait,
                parameters=_WAIT,
                answers={
                    200: Answered(about="The head.", kind=VersionNote),
                    204: Answered(about="There was no newer one in time."),
                },
                is_open_ended=True,
            ),
            Operation(
                method="GET",
                path=f"{stream}/events",
                role=read,
                about="The head and each version from now on, and that replicas changed.",
                act=self._events,
                parameters=_EVENTS,
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
            Operation(
                method="GET",
                path=f"{stream}/replicas",
                role=read,
                about="A stream's replicas, by name.",
                act=self._replicas,
                parameters=_LISTED_REPLICAS,
                answers={200: Answered(about="They are.", kind=Replicas)},
            ),
            Operation(
                method="GET",
                path=f"{stream}/ready",
                role=read,
                about="Whether replicas are ready and fresh enough.",
                act=self._ready,
                parameters=_READY,
                answers={
                    200: Answered(about="They are.", kind=Readiness),
                    503: Answered(about="They are not.", kind=Readiness),
                },
            ),
            Operation(
                method="GET",
                path=f"{stream}/updates",
                role=read,
                about="Updates that replicas finished, newest first.",
                act=self._updates,
                parameters=_LISTED_UPDATES,
                answers={200: Answered(about="They are.", kind=Updates)},
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
        asked = read_query(request, _LISTED_VERSIONS)
        return answer_json(Versions(board.versions(asked["limit"], asked["before"])))

    async def _wait(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, _WAIT)
        known = Known(asked["lineage"], asked["after"])
        wake = partial(self._wake, board.name, _CLOSE_S)
        return await wait_for_newer(request, board, known, asked["timeout_s"], wake)

    async def _events(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, _EVENTS)
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
        if not board.leave(name):
            raise ApiError(404, "not-found", f"no replica is called {name[:64]!r} here")
        return answer_nothing()

    async def _replicas(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, _LISTED_REPLICAS)
        statuses = board.statuses()
        if asked["region"] is not None:
            statuses = [one for one in statuses if one.beat.region == asked["region"]]
        later = [one for one in statuses if one.beat.replica > asked["after"]]
        shown = later[: asked["limit"]]
        following = shown[-1].beat.replica if len(shown) < len(later) else None
        return answer_json(Replicas(shown, following, counts_of(statuses)))

    async def _ready(self, request: Request) -> Reply:
        board = self._board(request)
        asked = read_query(request, _READY)
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
        asked = read_query(request, _LISTED_UPDATES)
        return answer_json(Updates(board.updates(asked["limit"])))
