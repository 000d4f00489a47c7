"""A server with the hot-load routes of Fireworks and CoreWeave, for tests of what calls them.

::

    server = HotLoadServer(Fleet(["a", "b"], load=load))
    with serving(server) as endpoint:
        client = HotLoad("acme", "m", "d", key=server.key, endpoint=endpoint)

It refuses what the services' pages do not allow, and really loads snapshots where the fleet has a
``load`` (see :mod:`thinwire.testing.hot_load_fleet`). Replicas go one stage further with each
question for the status. What the pages leave open is chosen here: names of stages, statuses of
refusals, the fields of a hint. It is neither service, and passing here proves nothing about them.
Listens on 127.0.0.1 only. Needs starlette and uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from thinwire.testing.hot_load_checks import (
    Refusal,
    fields_of,
    identity_of,
    incremental_of,
    json_of,
)
from thinwire.testing.hot_load_fleet import DOWNLOADING, FAILED, IDLE, Fleet, Snapshot

MODEL = "accounts/acme/models/m"
DEPLOYMENT = "accounts/acme/deployments/d"
DEPLOYMENT_ID = "22222222-2222-4222-8222-222222222222"
MAX_CHAIN_DELTAS = 128

_STOP_WITHIN_S = 30.0
_FORMATS = {"arc_v1", "arc_v2", "arc_v3", "xor_one_to_one_zlib", "xor_one_to_one_zstd"}
_COREWEAVE = "/v1alpha1/inference/hotLoads"
_UUID_CHARS = 36

_Endpoint = Callable[[Request], Awaitable[Response]]


class Call(NamedTuple):
    """A call that came in.

    Attributes:
        method: Its method.
        path: Its path.
        body: Its JSON; None: none.
    """

    method: str
    path: str
    body: Any


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one call gets in place of its answer.

    Attributes:
        method: Only a call with this method gets it; "": the next one.
        path: Only a call whose path ends so gets it.
        status: The answer's status.
        body: Its body.
        kind: Its content type.
        is_late: Do first what the call asks.
        is_cut: Break the connection in the middle of the answer.
        delay_s: Wait before.
    """

    method: str = ""
    path: str = ""
    status: int = 500
    body: bytes = b'{"error": "made to fail"}'
    kind: str = "application/json"
    is_late: bool = False
    is_cut: bool = False
    delay_s: float = 0.0


class HotLoadServer:
    """One deployment, behind the routes of both services.

    Attributes:
        calls: What came in, also what was refused.
        hints: Files that were announced: identities and names.
        faults: What the next calls get.

    Args:
        fleet: Its replicas.
        key: The key that is asked for.
        takes_reset: Whether ``reset_prompt_cache`` is known.
        takes_hints: Whether the hint route exists.
        page_replicas: The most replicas in one page at CoreWeave.
    """

    def __init__(
        self,
        fleet: Fleet | None = None,
        *,
        key: str = "a-key-of-tests",
        takes_reset: bool = True,
        takes_hints: bool = True,
        page_replicas: int = 1000,
    ) -> None:
        self.fleet = fleet or Fleet()
        self.key = key
        self.calls: list[Call] = []
        self.hints: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self._takes_reset = takes_reset
        self._takes_hints = takes_hints
        self._page_replicas = page_replicas
        self._operations: dict[str, dict[str, Any]] = {}

    def app(self) -> Starlette:
        """The application."""
        fireworks = "/hot_load/v1/models/hot_load"
        routes: list[tuple[str, str, _Endpoint]] = [
            ("GET", fireworks, self._status),
            ("POST", fireworks, self._signal),
            ("POST", f"{fireworks}/hint", self._hint),
            ("POST", _COREWEAVE, self._create),
            ("GET", f"{_COREWEAVE}/{{id}}", self._operation),
            ("GET", f"{_COREWEAVE}/{{id}}/replicas", self._replicas),
        ]
        return Starlette(
            routes=[
                Route(path, self._guarded(endpoint), methods=[method])
                for method, path, endpoint in routes
            ]
        )

    def _guarded(self, endpoint: _Endpoint) -> _Endpoint:
        async def guarded(request: Request) -> Response:
            self.calls.append(Call(request.method, request.url.path, await _shown_body(request)))
            fault = self._next_fault(request)
            if fault is None:
                return await self._answer(endpoint, request)
            await asyncio.sleep(fault.delay_s)
            if fault.is_late:
                await self._answer(endpoint, request)
            return _faulty(fault)

        return guarded

    def _next_fault(self, request: Request) -> Fault | None:
        for place, fault in enumerate(self.faults):
            is_meant = fault.method in {"", request.method}
            if is_meant and request.url.path.endswith(fault.path):
                return self.faults.pop(place)
        return None

    async def _answer(self, endpoint: _Endpoint, request: Request) -> Response:
        try:
            self._check_key(request)
            return await endpoint(request)
        except Refusal as refusal:
            body = {"code": refusal.code, "message": str(refusal)}
            return JSONResponse(body, status_code=refusal.status)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given, f"Bearer {self.key}"):
            raise Refusal(401, "unauthenticated", "the key is missing, or wrong")

    def _check_names(self, request: Request) -> None:
        for header, name in (("fireworks-model", MODEL), ("fireworks-deployment", DEPLOYMENT)):
            given = request.headers.get(header)
            if given is None:
                raise Refusal(400, "invalid_argument", f"the header {header} is missing")
            if given != name:
                raise Refusal(404, "not_found", f"{header} {given!r} is not known")

    async def _status(self, request: Request) -> Response:
        self._check_names(request)
        self.fleet.step()
        replicas = []
        for one in self.fleet.replicas.values():
            state: dict[str, Any] = {"stage": self.fleet.stages.get(one.stage, one.stage)}
            if one.target is not None:
                state["target_snapshot_identity"] = one.target
            if one.error:
                state["error"] = one.error
            replicas.append(
                {
                    "replica_id": one.name,
                    "readiness": one.is_ready,
                    "current_snapshot_identity": one.identity,
                    "loading_state": state,
                    "loaded_adapters": [],
                }
            )
        return JSONResponse({"replicas": replicas})

    async def _signal(self, request: Request) -> Response:
        self._check_names(request)
        known = {"identity": True, "incremental_snapshot_metadata": False, "validation": False}
        if self._takes_reset:
            known["reset_prompt_cache"] = False
        body = fields_of(await json_of(request), known)
        identity = identity_of(body["identity"])
        if identity in self.fleet.ledger:
            raise Refusal(400, "invalid_argument", f"the identity {identity!r} was used before")
        if body.get("reset_prompt_cache", "all") not in {"all", "none", "new_session"}:
            raise Refusal(400, "invalid_argument", "reset_prompt_cache: all, none or new_session")
        if "validation" in body:
            ignored = fields_of(body["validation"], {"extra_fields_ignore": True})
            names = ignored["extra_fields_ignore"]
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise Refusal(400, "invalid_argument", "extra_fields_ignore: a list of names")
        metadata = body.get("incremental_snapshot_metadata")
        snapshot = Snapshot(identity)
        if metadata is not None:
            snapshot = incremental_of(
                self.fleet,
                identity,
                metadata,
                ("previous_snapshot_identity", "compression_format", "checksum_format"),
                (_FORMATS, {"alder32"}),
            )
        self.fleet.start(snapshot)
        return JSONResponse({})

    async def _hint(self, request: Request) -> Response:
        self._check_names(request)
        if not self._takes_hints:
            raise Refusal(404, "not_found", "no such route")
        body = fields_of(await json_of(request), {"identity": True, "filename": True})
        identity, name = identity_of(body["identity"]), body["filename"]
        if not isinstance(name, str) or not name or "/" in name:
            raise Refusal(400, "invalid_argument", f"no file is called {name!r}")
        self.hints.append((identity, name))
        return JSONResponse({})

    async def _create(self, request: Request) -> Response:
        known = {"deploymentId": True, "identity": True, "type": True, "hotLoadId": False}
        known |= {"promptCachePolicy": False, "incrementalSnapshotMetadata": False}
        body = fields_of(await json_of(request), known)
        if body["deploymentId"] != DEPLOYMENT_ID:
            raise Refusal(404, "not_found", f"no deployment {body['deploymentId']!r}")
        identity, operation_id = identity_of(body["identity"]), body.get("hotLoadId", "")
        if not isinstance(operation_id, str) or len(operation_id) != _UUID_CHARS:
            raise Refusal(400, "invalid_argument", "hotLoadId must be a UUID")
        if operation_id in self._operations:
            raise Refusal(409, "already_exists", f"the hot-load {operation_id} exists")
        if any(self._state(one) in {"PENDING", "IN_PROGRESS"} for one in self._operations.values()):
            raise Refusal(400, "failed_precondition", "another hot-load is unfinished")
        policies = {f"PROMPT_CACHE_POLICY_{name}" for name in ("PRESERVE", "RESET_ALL")}
        if body.get("promptCachePolicy", "PROMPT_CACHE_POLICY_PRESERVE") not in policies:
            raise Refusal(400, "invalid_argument", "promptCachePolicy is not known")
        snapshot = self._coreweave_snapshot(identity, body)
        self.fleet.start(snapshot)
        chain = [{"identity": one.identity} for one in self.fleet.chain(identity)]
        spec = {**body, "id": operation_id, "snapshotChain": chain}
        del spec["hotLoadId"]
        operation = self._operations[operation_id] = {"spec": spec, "polls": 0, "end": ""}
        return JSONResponse({"hotLoad": self._described(operation)})

    def _coreweave_snapshot(self, identity: str, body: dict[str, Any]) -> Snapshot:
        metadata = body.get("incrementalSnapshotMetadata")
        kind = body["type"]
        if kind not in {"SNAPSHOT_TYPE_FULL", "SNAPSHOT_TYPE_INCREMENTAL"}:
            raise Refusal(400, "invalid_argument", f"the type {kind!r} is not known")
        if (kind == "SNAPSHOT_TYPE_INCREMENTAL") != (metadata is not None):
            raise Refusal(400, "invalid_argument", "only an incremental snapshot has metadata")
        if metadata is None:
            return Snapshot(identity)
        snapshot = incremental_of(
            self.fleet,
            identity,
            metadata,
            ("previousSnapshotIdentity", "compressionFormat", "checksumFormat"),
            ({"COMPRESSION_FORMAT_ZSTD"}, {"CHECKSUM_FORMAT_ADLER32"}),
        )
        # The full one at its beginning is no delta, and the new one is.
        if snapshot.base is not None and len(self.fleet.chain(snapshot.base)) > MAX_CHAIN_DELTAS:
            raise Refusal(400, "failed_precondition", f"more than {MAX_CHAIN_DELTAS} deltas")
        return snapshot

    async def _operation(self, request: Request) -> Response:
        operation = self._operation_of(request)
        self.fleet.step()
        operation["polls"] += 1
        return JSONResponse({"hotLoad": self._described(operation)})

    async def _replicas(self, request: Request) -> Response:
        self._operation_of(request)
        token, asked = request.query_params.get("pageToken", "0"), "maxPageSize"
        size = min(int(request.query_params.get(asked, "50")) or 50, self._page_replicas)
        if not token.isdecimal() or size < 0:
            raise Refusal(400, "invalid_argument", "the page token or size is none")
        names = sorted(self.fleet.replicas)
        shown = names[int(token) : int(token) + size]
        states = {IDLE: "READY", FAILED: "FAILED"}
        replicas = [
            {
                "zone": "z",
                "name": name,
                "state": states.get(self.fleet.replicas[name].stage, "UPDATING"),
                "currentSnapshotIdentity": self.fleet.replicas[name].identity or "",
            }
            for name in shown
        ]
        last = int(token) + len(shown)
        following = {"nextPageToken": str(last)} if last < len(names) else {}
        return JSONResponse({"replicas": replicas, **following})

    def _operation_of(self, request: Request) -> dict[str, Any]:
        operation = self._operations.get(request.path_params["id"])
        if operation is None:
            raise Refusal(404, "not_found", "no such hot-load")
        return operation

    def _state(self, operation: dict[str, Any]) -> str:
        replicas = self.fleet.replicas.values()
        target = operation["spec"]["identity"]
        if not operation["end"] and not self.fleet.is_loading():
            is_done = all(one.is_at(target) for one in replicas)
            operation["end"] = "COMPLETED" if is_done else "FAILED"
        early = all(one.stage == DOWNLOADING for one in replicas) and operation["polls"] < 2
        return operation["end"] or ("PENDING" if early else "IN_PROGRESS")

    def _described(self, operation: dict[str, Any]) -> dict[str, Any]:
        errors = [one.error for one in self.fleet.replicas.values() if one.error]
        conditions = [
            {"type": "Loaded", "status": "False", "reason": "LoadFailed", "message": error}
            for error in errors
        ]
        state = f"HOT_LOAD_STATE_{self._state(operation)}"
        return {
            "spec": operation["spec"],
            "status": {"state": state, "conditions": conditions},
        }


async def _shown_body(request: Request) -> Any:
    try:
        return json.loads(await request.body() or b"null")
    except ValueError:
        return None


def _faulty(fault: Fault) -> Response:
    if not fault.is_cut:
        return Response(fault.body, status_code=fault.status, media_type=fault.kind)

    async def broken() -> AsyncIterator[bytes]:
        yield fault.body
        raise ConnectionError("made to break")

    length = {"content-length": str(len(fault.body) + 100)}
    return StreamingResponse(broken(), fault.status, headers=length, media_type=fault.kind)


@contextmanager
def serving(server: HotLoadServer) -> Iterator[str]:
    """The server in a thread of this process: its endpoint; stopped at the end."""
    import uvicorn

    config = uvicorn.Config(server.app(), log_level="critical", lifespan="off")
    running = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        # A call that comes before the thread runs waits in the socket's queue.
        listening.listen()
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield endpoint
        finally:
            running.should_exit = running.force_exit = True
            thread.join(_STOP_WITHIN_S)
