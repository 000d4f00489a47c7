"""A server that answers as SGLang's published routes do, for tests of what talks to them.

::

    python -m thinwire.testing.sglang_server --model FOLDER --port 30000

It holds real weights of a folder and answers ``/generate`` from them (see
:mod:`thinwire.testing.sglang_scheduler`). What each route does was read in SGLang's source; it is
no SGLang, and passing here proves nothing about a real one. ``POST /test`` sets a
:class:`thinwire.testing.sglang_scheduler.Behaviour`, a fault, or (``reset``) everything back to
what it was at the start; ``GET /test`` tells what was called. Listens on 127.0.0.1 only. Needs
starlette and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from thinwire.testing.process import end_with_stdin, running_module
from thinwire.testing.sglang_scheduler import Behaviour, Request, Scheduler

VERSION = "0.5.9"
_ADMIN = {
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/get_weights_by_name",
}


class Server:
    """The outer half: what SGLang calls the tokenizer manager, and its routes.

    Args:
        folder: The model's folder.
        api_key: Asked of ordinary routes, and of control routes where there is no admin key.
        admin_key: Asked of control routes.
        seed: The random seed that it reports; None: another one at each start.
        behaviour: What its release does.
        version: The release that it reports.
        tokenizer_workers: How many of them it reports.
        is_older: Have ``/get_model_info`` and ``/get_server_info`` only, and no timeout at
            ``/flush_cache``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        seed: int | None = None,
        behaviour: Behaviour | None = None,
        version: str = VERSION,
        tokenizer_workers: int = 1,
        is_older: bool = False,
    ) -> None:
        self._keys = (api_key, admin_key)
        self._is_older = is_older
        self.scheduler = Scheduler(folder, behaviour or Behaviour())
        self.args: dict[str, Any] = {
            "model_path": str(folder),
            "served_model_name": str(folder),
            "load_format": "auto",
            "weight_version": "default",
            "random_seed": random.randint(0, 1 << 30) if seed is None else seed,
            "tp_size": 1,
            "dp_size": 1,
            "quantization": None,
            "hicache_storage_backend": None,
            "tokenizer_worker_num": tokenizer_workers,
            "version": version,
        }
        self._args_at_start = dict(self.args)
        self._is_paused = False
        self._resumed = asyncio.Condition()
        self._in_flight = 0
        self._is_updating = False
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._load_result: asyncio.Future[tuple[bool, str]] | None = None
        self._calls: list[str] = []

    def app(self) -> Starlette:
        """The application, with the scheduler's loop in its lifespan."""
        both, get, post = ["GET", "POST"], ["GET"], ["POST"]
        routes = [
            ("/health", self._health, get),
            ("/get_model_info", self._model_info, get),
            ("/get_server_info", self._server_info, get),
            ("/generate", self._generate, ["POST", "PUT"]),
            ("/flush_cache", self._flush_cache, both),
            ("/pause_generation", self._pause, post),
            ("/continue_generation", self._continue, post),
            ("/update_weights_from_disk", self._update, post),
            ("/update_weight_version", self._update_version, post),
            ("/get_weights_by_name", self._show, both),
            ("/test", self._test, both),
        ]
        if not self._is_older:
            routes += [
                ("/model_info", self._model_info, get),
                ("/server_info", self._server_info, get),
            ]
        return Starlette(
            routes=[
                Route(path, self._guarded(path, endpoint), methods=methods)
                for path, endpoint, methods in routes
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.scheduler.run())
        yield
        task.cancel()

    def _guarded(self, path: str, endpoint: Any) -> Any:
        """Ask for the key that a route's level asks for, and note the call."""
        api_key, admin_key = self._keys
        expected = (admin_key or api_key) if path in _ADMIN else api_key

        async def guarded(request: HttpRequest) -> Response:
            if path not in {"/health", "/test"}:
                given = request.headers.get("authorization", "")
                if expected and not secrets.compare_digest(given, f"Bearer {expected}"):
                    return JSONResponse({"error": "Unauthorized"}, status_code=401)
                self._calls.append(path)
            answer: Response = await endpoint(request)
            return answer

        return guarded

    async def _health(self, _: HttpRequest) -> Response:
        return Response()

    async def _model_info(self, _: HttpRequest) -> Response:
        shown = {key: self.args[key] for key in ("model_path", "weight_version")}
        return JSONResponse({**shown, "tokenizer_path": shown["model_path"], "is_generation": True})

    async def _server_info(self, _: HttpRequest) -> Response:
        state = await self.scheduler.ask("state")
        return JSONResponse({**self.args, "status": "ready", "internal_states": [state]})

    async def _generate(self, http: HttpRequest) -> Response:
        body = await http.json()
        wanted = int(body.get("sampling_params", {}).get("max_new_tokens", 16))
        prompt = str(body.get("text", body.get("input_ids")))
        request = Request(
            uuid.uuid4().hex, prompt, wanted, lambda: str(self.args["weight_version"])
        )
        if body.get("stream"):
            return StreamingResponse(self._events(request), media_type="text/event-stream")
        return JSONResponse([answer async for answer in self._answers(request)][-1])

    async def _events(self, request: Request) -> AsyncIterator[str]:
        async for answer in self._answers(request):
            yield f"data: {json.dumps(answer)}\n\n"
        yield "data: [DONE]\n\n"

    async def _answers(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Wait at the door, then hold the reader's lock until the answer is whole."""
        async with self._resumed:
            await self._resumed.wait_for(lambda: not self._is_paused)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_updating)
            self._in_flight += 1
        try:
            self.scheduler.send("generate", request)
            while True:
                out = await request.out.get()
                yield {
                    "text": " ".join(out["tokens"]),
                    "meta_info": {
                        "id": request.rid,
                        "finish_reason": out["finish_reason"],
                        "completion_tokens": len(out["tokens"]),
                        "weight_version": out["weight_version"],
                    },
                }
                if out["finish_reason"] is not None:
                    return
        finally:
            self.scheduler.send("abort", request.rid)
            self._in_flight -= 1
            # Where the caller has gone this is cancelled, and may not wait for the lock itself.
            task = asyncio.create_task(self._tell_changed())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _flush_cache(self, http: HttpRequest) -> Response:
        timeout_s = 0.0 if self._is_older else float(http.query_params.get("timeout", 0))
        success, message = await self.scheduler.ask("flush", timeout_s)
        text = "Cache flushed.\n" if success else message or "Flush cache failed.\n"
        return PlainTextResponse(text, status_code=200 if success else 400)

    async def _pause(self, http: HttpRequest) -> Response:
        mode = (await http.json()).get("mode", "abort")
        if mode not in {"abort", "retract", "in_place"}:
            return JSONResponse({"message": f"Invalid mode: {mode!r}"}, status_code=400)
        async with self._resumed:
            self._is_paused = True
            if mode != "abort":
                self.scheduler.send("pause", mode)
            while mode == "abort":
                self.scheduler.send("abort", "")
                if not self._in_flight:
                    break
                # A second, in SGLang.
                await asyncio.sleep(0.05)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: HttpRequest) -> Response:
        async with self._resumed:
            self._is_paused = False
            self.scheduler.send("continue")
            self._resumed.notify_all()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, http: HttpRequest) -> Response:
        body = await http.json()
        if body.get("abort_all_requests"):
            self.scheduler.send("abort", "")
        folder = body["model_path"]
        fault = self.scheduler.behaviour.fault
        takes_lock = not self._is_paused
        if takes_lock:
            async with self._changed:
                self._is_updating = True
                await self._changed.wait_for(lambda: not self._in_flight)
        # One place for the result, as in SGLang: where a load is asked for while another runs, the
        # first result is taken for the second one's, and the first caller is never answered.
        self._load_result = asyncio.get_running_loop().create_future()
        message_to = {"folder": folder, "flush_cache": body.get("flush_cache", True)}
        self.scheduler.send("load", message_to, self._loaded)
        success, message = await self._load_result
        if success:
            self.args["model_path"] = self.args["served_model_name"] = folder
            self.args["load_format"] = body.get("load_format", self.args["load_format"])
            self.args["weight_version"] = body.get("weight_version") or self.args["weight_version"]
        if takes_lock:
            async with self._changed:
                self._is_updating = False
                self._changed.notify_all()
        return JSONResponse(
            {"success": success, "message": message, "num_paused_requests": 0},
            status_code=200 if success or fault == "lie" else 400,
        )

    def _loaded(self, result: tuple[bool, str]) -> None:
        if self._load_result is not None and not self._load_result.done():
            self._load_result.set_result(result)

    async def _update_version(self, http: HttpRequest) -> Response:
        body = await http.json()
        if body.get("abort_all_requests", True):
            self.scheduler.send("abort", "")
        self.args["weight_version"] = body["new_version"]
        return JSONResponse({"success": True, "new_version": body["new_version"]})

    async def _show(self, http: HttpRequest) -> Response:
        body = await http.json()
        shown = await self.scheduler.ask(
            "show", {"name": body["name"], "truncate_size": body.get("truncate_size", 100)}
        )
        if shown is None:
            error = {"error": {"message": "Get parameter by name failed"}}
            return JSONResponse(error, status_code=400)
        return JSONResponse(shown)

    async def _test(self, http: HttpRequest) -> Response:
        if http.method == "POST":
            changes = await http.json()
            if changes.pop("reset", False):
                await self._reset()
            for name, value in changes.items():
                holder: Any = self.args if name in self.args else vars(self.scheduler.behaviour)
                holder[name] = value
            self._calls.clear()
        state = await self.scheduler.ask("state") if http.method == "GET" else {}
        return JSONResponse({"calls": self._calls, "in_flight": self._in_flight, **state})

    async def _reset(self) -> None:
        self.args = dict(self._args_at_start)
        async with self._resumed:
            self._is_paused = False
            await self.scheduler.ask("reset")
            self._resumed.notify_all()


@contextmanager
def running(folder: str | os.PathLike[str], port: int, *arguments: str) -> Iterator[str]:
    """The server in a process of its own: its endpoint; killed at the end.

    Args:
        folder: The model's folder.
        port: A free port.
        arguments: Further ones of the command line.

    Raises:
        RuntimeError: It ended, or did not answer in time.
    """
    model = ["--model", os.fspath(folder), *arguments]
    with running_module("thinwire.testing.sglang_server", port, model, "/health") as endpoint:
        yield endpoint


def main() -> None:
    """Run the server until it is killed."""
    import uvicorn

    parser = argparse.ArgumentParser(description="A server with SGLang's routes, for tests.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--admin-api-key")
    parser.add_argument("--random-seed", type=int)
    parser.add_argument("--version", default=VERSION)
    parser.add_argument("--tokenizer-worker-num", type=int, default=1)
    parser.add_argument("--older", action="store_true", help="the older names of routes only")
    parser.add_argument("--token-s", type=float, default=0.02, help="how long a step takes")
    parser.add_argument("--flushes-retracted", action="store_true")
    parser.add_argument("--ignores-no-flush", action="store_true")
    parser.add_argument("--until-stdin-ends", action="store_true")
    given = parser.parse_args()
    if given.until_stdin_ends:
        end_with_stdin()
    server = Server(
        given.model,
        api_key=given.api_key,
        admin_key=given.admin_api_key,
        seed=given.random_seed,
        behaviour=Behaviour(
            token_s=given.token_s,
            flushes_retracted=given.flushes_retracted,
            ignores_no_flush=given.ignores_no_flush,
        ),
        version=given.version,
        tokenizer_workers=given.tokenizer_worker_num,
        is_older=given.older,
    )
    uvicorn.run(server.app(), host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
