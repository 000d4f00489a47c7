"""Fireworks' hot-load routes, so that a trainer that calls them switches by URL.

A deployment is a stream, called by the last part of its name. A snapshot is a version: the one
whose metadata holds its identity; else ``version_N`` is the version N, and ``step_N`` the newest
one of the trainer's step N. Weights come from the stream alone: a signal makes the hub look, and
names the version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from starlette.requests import Request

from thinwire.hub.answers import ApiError, answer_json
from thinwire.hub.asking import Parameter, read_body, read_query
from thinwire.hub.board import Board
from thinwire.hub.bodies import (
    MAX_FACADE_BYTES,
    LoadedReplica,
    LoadedReplicas,
    LoadingState,
    Snapshot,
    SnapshotHint,
)
from thinwire.hub.operations import Answered, Operation, Reply
from thinwire.report.messages import ReplicaStatus
from thinwire.web import Role

_PATH = "/hot_load/v1/models/hot_load"
_DEPLOYMENT = "fireworks-deployment"
_MODEL = "fireworks-model"
# How long what was announced may take to show in the bucket.
_CLOSE_S = 30.0
_NUMBERED = re.compile(r"(version|step)[_-]([0-9]{1,12})", re.ASCII)
_STAGES = {"idle": "idle", "fetch": "downloading"}
_SHOWN_CHARS = 64
_HEADER_PATTERN = r"^[!-~]{1,512}$"
_HEADERS = (
    Parameter(
        name=_MODEL, kind="string", about="The model.", pattern=_HEADER_PATTERN, is_required=True
    ),
    Parameter(
        name=_DEPLOYMENT,
        kind="string",
        about="The deployment; its last part names the stream.",
        pattern=_HEADER_PATTERN,
        is_required=True,
    ),
)


class Facade:
    """Answers as a deployment does.

    Args:
        boards: The streams by name.
        wake: Has a stream's bucket looked at, and closely for so many seconds.
    """

    def __init__(self, boards: Mapping[str, Board], wake: Callable[[str, float], None]) -> None:
        self._boards = boards
        self._wake = wake

    def operations(self) -> list[Operation]:
        """All of them."""
        return [
            Operation(
                method="POST",
                path=_PATH,
                role=Role.PUBLISH,
                about="A snapshot is in the bucket: serve it (Fireworks' signal).",
                act=self._signal,
                headers=_HEADERS,
                body=Snapshot,
                answers={200: Answered(about="It is being looked for.", kind=dict[str, str])},
            ),
            Operation(
                method="GET",
                path=_PATH,
                role=Role.READ,
                about="What replicas serve and load, in Fireworks' words.",
                act=self._status,
                headers=_HEADERS,
                answers={200: Answered(about="It is that.", kind=LoadedReplicas)},
            ),
            Operation(
                method="POST",
                path=f"{_PATH}/hint",
                role=Role.PUBLISH,
                about="A file of a snapshot is in the bucket (Fireworks' hint).",
                act=self._hint,
                headers=_HEADERS,
                body=SnapshotHint,
                answers={200: Answered(about="It is being looked for.", kind=dict[str, str])},
            ),
        ]

    def _board(self, request: Request) -> Board:
        read_query(request, ())
        for header in _HEADERS:
            if header.name not in request.headers:
                raise ApiError(400, "invalid-argument", f"the header {header.name} is missing")
            header.read(request.headers[header.name])
        name = request.headers[_DEPLOYMENT].rpartition("/")[2]
        board = self._boards.get(name)
        if board is None:
            raise ApiError(
                404,
                "not-found",
                f"{_DEPLOYMENT} {name[:_SHOWN_CHARS]!r} is no stream here",
                "A deployment's last part is the name of its stream",
            )
        return board

    async def _signal(self, request: Request) -> Reply:
        board = self._board(request)
        snapshot = await read_body(request, Snapshot, MAX_FACADE_BYTES)
        if snapshot.reset_prompt_cache is not None:
            raise ApiError(
                400,
                "invalid-argument",
                "reset_prompt_cache: Extra inputs are not permitted",
                "What becomes of cached prompts is chosen where a replica is attached",
            )
        board.signalled = snapshot.identity
        is_there = version_of(board, snapshot.identity) is not None
        self._wake(board.name, 0.0 if is_there else _CLOSE_S)
        return answer_json({})

    async def _hint(self, request: Request) -> Reply:
        board = self._board(request)
        await read_body(request, SnapshotHint, MAX_FACADE_BYTES)
        self._wake(board.name, _CLOSE_S)
        return answer_json({})

    async def _status(self, request: Request) -> Reply:
        board = self._board(request)
        wanted = board.signalled
        number = version_of(board, wanted) if wanted else None
        if number is not None:
            board.call(number, wanted)
        # A replica that is lost is none of the deployment's any more.
        here = [
            one for one in board.statuses() if one.beat.kind == "replica" and one.state != "lost"
        ]
        return answer_json(LoadedReplicas([_shown(board, one, wanted, number) for one in here]))


def version_of(board: Board, identity: str) -> int | None:
    """The version that an identity names; None: none that is there."""
    note = board.find_identity(identity)
    if note is not None:
        return note.version
    found = _NUMBERED.fullmatch(identity)
    if found is None:
        return None
    number = int(found[2])
    if found[1] == "step":
        note = board.find_step(number)
        return None if note is None else note.version
    latest = board.latest
    return number if latest is not None and 1 <= number <= latest.note.version else None


def _shown(board: Board, one: ReplicaStatus, wanted: str, number: int | None) -> LoadedReplica:
    """A replica in Fireworks' words.

    Args:
        board: The stream.
        one: The replica.
        wanted: The snapshot that was signalled last; empty: none was.
        number: The version that this is; None: it is not there yet.
    """
    beat = one.beat
    held = board.called(beat.version) if beat.version and one.staleness_steps is not None else None
    target = board.called(beat.target) if beat.target not in (0, beat.version) else None
    if wanted and (number is None or number > beat.version):
        target = wanted
    stage = _STAGES.get(beat.phase, "loading")
    if stage == "idle" and target is not None:
        stage = "pending"
    return LoadedReplica(
        replica_id=beat.replica,
        readiness=held is not None and one.state in ("ready", "updating"),
        current_snapshot_identity=held,
        loading_state=LoadingState(
            stage=stage,
            target_snapshot_identity=target,
            # Never the stage "error": a replica tries again, it gives no version up.
            error="" if beat.fault is None else f"{beat.fault.code}: {beat.fault.message}",
        ),
        loaded_adapters=[],
    )
