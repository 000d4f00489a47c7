"""A server that answers as the Hugging Face Hub does for buckets, for tests of what talks to it.

::

    python -m thinwire.testing.hf_server --port 30000 --cdn-port 30001

The Hub and the Xet storage behind it answer at one port, the place that downloads are redirected to
at the other. It speaks what huggingface_hub's bucket functions and hf-xet call: create, info, tree,
paths-info, batch, resolve, tokens, and uploads of xorbs and shards. What each does was read in
their documents and sources; it is no Hub, and passing here proves nothing about the real one.
Hashes are taken as they come.

``POST /test`` queues faults by route, ``GET /test`` tells what was called. Listens on 127.0.0.1
only and holds everything in memory. Needs starlette and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from thinwire.testing.hf_xorbs import decode_shard, decode_xorb
from thinwire.testing.process import end_with_stdin, running_module

WRITE_TOKEN = "hf_local_write"
READ_TOKEN = "hf_local_read"
_LISTED_AT_ONCE = 1_000
_XET_TOKENS = {"read": "xet_local_read", "write": "xet_local_write"}
_TOKEN_LIFE_S = 3600
_EMPTY = "0" * 64


class Kept(NamedTuple):
    """A file of a bucket; both times are unix milliseconds."""

    xet_hash: str
    modified_ms: int
    uploaded_ms: int


def _iso(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03}Z"


class Server:
    """The Hub, its storage and its CDN.

    Args:
        hub: The Hub's own URL.
        cdn: The URL of the place that downloads are redirected to.
        buckets: Those that exist, as NAMESPACE/NAME.
    """

    def __init__(self, hub: str, cdn: str, buckets: list[str]) -> None:
        self._hub, self._cdn = hub, cdn
        self._buckets: dict[str, dict[str, Kept]] = {bucket: {} for bucket in buckets}
        self._xorbs: dict[str, list[bytes]] = {}
        self._contents: dict[str, bytes] = {_EMPTY: b""}
        self._signature = secrets.token_hex(8)
        self._faults: dict[str, list[Any]] = defaultdict(list)
        self._calls: list[dict[str, Any]] = []

    def hub_app(self) -> Starlette:
        """What answers as the Hub and as the Xet storage."""
        api = "/api/buckets/{space}/{name}"
        routes = [
            ("info", api, self._info, ["GET", "POST"]),
            ("tree", api + "/tree", self._tree, ["GET"]),
            ("tree", api + "/tree/{prefix:path}", self._tree, ["GET"]),
            ("paths-info", api + "/paths-info", self._paths_info, ["POST"]),
            ("batch", api + "/batch", self._batch, ["POST"]),
            ("token", api + "/xet-{kind}-token", self._token, ["GET"]),
            ("resolve", "/buckets/{space}/{name}/resolve/{path:path}", self._resolve, ["GET"]),
            ("xorb", "/cas/v1/xorbs/default/{hash}", self._xorb, ["POST"]),
            ("shard", "/cas/v{version:int}/shards", self._shard, ["POST"]),
        ]
        return Starlette(routes=[Route("/test", self._test, methods=["GET", "POST"])] + [
            Route(path, self._guarded(name, endpoint), methods=methods)
            for name, path, endpoint, methods in routes
        ])  # fmt: skip

    def cdn_app(self) -> Starlette:
        """What answers where downloads are redirected to."""
        return Starlette(routes=[Route("/xet/{hash}", self._guarded("cdn", self._serve))])

    def _guarded(self, name: str, endpoint: Any) -> Any:
        """Note the call, play a fault, and ask for the token that the route wants."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            call = {"route": name, "method": request.method, "path": request.url.path}
            self._calls.append({**call, "range": request.headers.get("range"), "token": given})
            fault = self._faults[name].pop(0) if self._faults[name] else None
            if isinstance(fault, int):
                return _echo(request, fault)
            if name in {"xorb", "shard"}:
                if given != _XET_TOKENS["write"]:
                    return JSONResponse({"error": "no such token"}, 401)
            elif name != "cdn":
                if given not in {WRITE_TOKEN, READ_TOKEN}:
                    return _refusal(401, "", "Invalid username or password.")
                writes = name == "batch" or request.url.path.endswith("xet-write-token")
                if writes and given != WRITE_TOKEN:
                    return _refusal(403, "", "This token may not write")
                bucket = "{space}/{name}".format(**request.path_params)
                if bucket not in self._buckets and request.method + name != "POSTinfo":
                    return _refusal(404, "RepoNotFound", "Repository not found")
            request.state.fault = fault
            answer: Response = await endpoint(request)
            return answer

        return guarded

    def _files(self, request: Request) -> dict[str, Kept]:
        return self._buckets["{space}/{name}".format(**request.path_params)]

    async def _info(self, request: Request) -> Response:
        bucket = "{space}/{name}".format(**request.path_params)
        if request.method == "POST":
            if bucket in self._buckets:
                return _refusal(409, "", "You already created this bucket")
            self._buckets[bucket] = {}
            return JSONResponse({"url": f"{self._hub}/buckets/{bucket}"})
        files = self._buckets[bucket]
        size = sum(len(self._contents[kept.xet_hash]) for kept in files.values())
        about = {"id": bucket, "private": True, "createdAt": _iso(0), "size": size}
        return JSONResponse({**about, "totalFiles": len(files)})

    def _shown(self, path: str, kept: Kept) -> dict[str, Any]:
        times = {"mtime": _iso(kept.modified_ms), "uploadedAt": _iso(kept.uploaded_ms)}
        size = len(self._contents[kept.xet_hash])
        return {"type": "file", "path": path, "size": size, "xetHash": kept.xet_hash, **times}

    async def _tree(self, request: Request) -> Response:
        if request.state.fault is not None:
            return JSONResponse(request.state.fault)
        prefix = request.path_params.get("prefix", "")
        after = request.query_params.get("cursor", "")
        files = self._files(request)
        # A plain beginning of the path, not a folder, as the Hub has it. In no promised order.
        paths = sorted(path for path in files if path.startswith(prefix) and path > after)
        page, rest = paths[:_LISTED_AT_ONCE], paths[_LISTED_AT_ONCE:]
        headers = {}
        if rest:
            following = request.url.include_query_params(cursor=page[-1])
            headers["Link"] = f'<{following}>; rel="next"'
        return JSONResponse(
            [self._shown(path, files[path]) for path in reversed(page)], headers=headers
        )

    async def _paths_info(self, request: Request) -> Response:
        asked, files = (await request.json())["paths"], self._files(request)
        return JSONResponse([self._shown(path, files[path]) for path in asked if path in files])

    async def _batch(self, request: Request) -> Response:
        files, failed = self._files(request), []
        lines = [json.loads(line) for line in (await request.body()).splitlines()]
        for line in lines if request.state.fault != "drop" else []:
            path, wrong = line["path"], ""
            if request.state.fault == "fail" or line.get("xetHash", _EMPTY) not in self._contents:
                wrong = f"it cannot be done, {request.headers['authorization']}"
            elif line["type"] == "addFile":
                files[path] = Kept(line["xetHash"], line["mtime"], time.time_ns() // 1_000_000)
            elif files.pop(path, None) is None:
                wrong = "there is no such file"
            if wrong:
                failed.append({"path": path, "error": wrong})
        status = 422 if lines and len(failed) == len(lines) else 200
        return JSONResponse({"success": not failed, "failed": failed}, status)

    async def _token(self, request: Request) -> Response:
        token, ends_s = _XET_TOKENS[request.path_params["kind"]], int(time.time()) + _TOKEN_LIFE_S
        cas = f"{self._hub}/cas"
        # hf-xet reads the body; huggingface_hub 1.5 reads the headers itself.
        headers = {"X-Xet-Cas-Url": cas, "X-Xet-Access-Token": token}
        headers["X-Xet-Token-Expiration"] = str(ends_s)
        return JSONResponse({"accessToken": token, "exp": ends_s, "casUrl": cas}, headers=headers)

    async def _resolve(self, request: Request) -> Response:
        kept = self._files(request).get(request.path_params["path"])
        if kept is None:
            return _refusal(404, "EntryNotFound", "Entry not found")
        bucket = "{space}/{name}".format(**request.path_params)
        token_url = f"{self._hub}/api/buckets/{bucket}/xet-read-token"
        headers = {
            "X-Xet-Hash": kept.xet_hash,
            "X-Linked-Size": str(len(self._contents[kept.xet_hash])),
            "Link": f'<{token_url}>; rel="xet-auth"',
            "Location": f"{self._cdn}/xet/{kept.xet_hash}?signature={quote(self._signature)}",
        }
        return Response(status_code=302, headers=headers)

    async def _serve(self, request: Request) -> Response:
        if request.query_params.get("signature") != self._signature:
            return _echo(request, 403)
        if "authorization" in request.headers:
            return _echo(request, 400)  # as signed URLs do: only one way to prove who asks
        data, fault = self._contents[request.path_params["hash"]], request.state.fault
        if fault == "gzip":
            return Response(data, headers={"Content-Encoding": "gzip"})
        if fault == "endless":
            return StreamingResponse(iter(lambda: bytes(1 << 20), None))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        start, last = (int(found[1]), int(found[2])) if found else (0, len(data) - 1)
        piece, headers = data[start : last + 1], {}
        if found is None or fault == "no-range":
            return Response(data)
        if start >= len(data):
            return Response(status_code=416, headers={"Content-Range": f"bytes */{len(data)}"})
        if fault == "other-range":
            start += 1
        headers["Content-Range"] = f"bytes {start}-{start + len(piece) - 1}/{len(data)}"
        if fault == "cut":
            headers["Content-Length"] = str(len(piece))
            return StreamingResponse(iter([piece[: len(piece) // 2]]), 206, headers)
        return Response(piece, 206, headers)

    async def _xorb(self, request: Request) -> Response:
        name, data = request.path_params["hash"], await request.body()
        is_new = name not in self._xorbs
        try:
            self._xorbs[name] = decode_xorb(data)
        except (ValueError, IndexError, struct.error) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"was_inserted": is_new})

    async def _shard(self, request: Request) -> Response:
        try:
            for name, terms in decode_shard(await request.body()).items():
                self._contents[name] = b"".join(self._term(*term) for term in terms)
        except (KeyError, ValueError, struct.error) as error:
            return JSONResponse({"error": str(error)}, 400)
        if request.path_params["version"] == 1:
            return JSONResponse({"result": 1})
        return Response(json.dumps({"type": "result"}) + "\n", media_type="application/x-ndjson")

    def _term(self, xorb: str, size: int, first: int, last: int) -> bytes:
        piece = b"".join(self._xorbs[xorb][first:last])
        if len(piece) != size:
            raise ValueError("a term has another length than its chunks")
        return piece

    async def _test(self, request: Request) -> Response:
        calls = self._calls
        if request.method == "POST":
            self._faults.clear()
            self._faults.update(await request.json())
            self._calls = []
        return JSONResponse({"calls": calls})


def _refusal(status: int, code: str, message: str) -> Response:
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return JSONResponse({"error": message}, status, headers=headers)


def _echo(request: Request, status: int) -> Response:
    """A refusal that repeats what was sent, as careless servers do."""
    said = "; ".join(f"{name}: {value}" for name, value in request.headers.items())
    return _refusal(status, "", f"{request.url} {said}")


@contextmanager
def running(port: int, cdn_port: int, *buckets: str) -> Iterator[str]:
    """The server in a process of its own: the Hub's URL; killed at the end.

    Args:
        port: A free port.
        cdn_port: Another one.
        buckets: Those that exist at the start, as NAMESPACE/NAME.

    Raises:
        RuntimeError: It ended, or did not answer in time.
    """
    arguments = ["--cdn-port", str(cdn_port), *buckets]
    with running_module("thinwire.testing.hf_server", port, arguments, "/test") as endpoint:
        yield endpoint


async def _serve_both(server: Server, port: int, cdn_port: int) -> None:
    import uvicorn

    await asyncio.gather(*(
        uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=at, log_level="warning", access_log=False)
        ).serve()
        for app, at in ((server.cdn_app(), cdn_port), (server.hub_app(), port))
    ))  # fmt: skip


def main() -> None:
    """Run the server until it is killed."""
    parser = argparse.ArgumentParser(description="A server with the Hub's bucket calls, for tests.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cdn-port", type=int, required=True)
    parser.add_argument("--until-stdin-ends", action="store_true")
    parser.add_argument("bucket", nargs="*", help="a bucket that exists, as NAMESPACE/NAME")
    given = parser.parse_args()
    if given.until_stdin_ends:
        end_with_stdin()
    hub, cdn = (f"http://127.0.0.1:{port}" for port in (given.port, given.cdn_port))
    asyncio.run(_serve_both(Server(hub, cdn, given.bucket), given.port, given.cdn_port))


if __name__ == "__main__":
    main()
