"""The inner half of :mod:`thinwire.testing.sglang_server`: weights, requests and one loop.

It does what SGLang's scheduler does as far as updates of weights can tell: messages are taken one
after the other between two steps, a pause stops the steps and not the messages, a load blocks
both. Instead of a model there is a digest: every token is a hash of the weights' digest now, of
the weights' digest that its KV was computed with, of the prompt and of the token's place. So an
answer shows which weights made it, and a stale or a mixed cache shows too.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.checkpoint.folder import Checkpoint
from thinwire.errors import ThinwireError

Reply = Callable[[Any], None]


def digest_of_folder(folder: str | os.PathLike[str]) -> str:
    """The digest that a server has which holds exactly the weights of ``folder``."""
    return Weights(Path(folder)).digest


def token_of(weights: str, kv: str, prompt: str, place: int) -> str:
    """The token at ``place`` of an answer, by the digests of the weights and of its KV's weights.

    An answer wholly of one version has that version's digest in both.
    """
    text = f"{weights} {kv} {prompt} {place}"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class Weights:
    """The tensors of a folder, copied into memory as a loader does."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, tuple[str, tuple[int, ...], bytearray]] = {}
        self.load(folder)

    @property
    def digest(self) -> str:
        """Of all their bytes, as they are now."""
        state = hashlib.blake2b(digest_size=16)
        for name in sorted(self.tensors):
            dtype, shape, data = self.tensors[name]
            state.update(f"{name} {dtype} {shape}".encode())
            state.update(data)
        return state.hexdigest()

    def load(self, folder: Path, *, part: float = 1.0) -> None:
        """Copy a folder's tensors in, one after the other; of them only the first ``part``."""
        tensors = Checkpoint.open(folder, ignore_subfolders=True).tensors
        for name in sorted(tensors)[: round(len(tensors) * part)]:
            stored = tensors[name]
            self.tensors[name] = (stored.dtype, stored.shape, bytearray(stored.data))

    def show(self, name: str, truncate_size: int) -> Any:
        """A tensor as nested lists of floats, its first rows; None for what cannot be shown."""
        dtype, shape, data = self.tensors.get(name, ("", (), bytearray()))
        if dtype == "BF16":
            words = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
            values = words.view(np.float32)
        elif dtype in {"F16", "F32"}:
            values = np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float32)
        else:
            return None
        return values.reshape(shape).tolist()[:truncate_size]


@dataclass
class Request:
    """One request: where its tokens go, and what was computed for it so far.

    ``label`` is asked for the weight version that goes with what is told.
    """

    rid: str
    prompt: str
    wanted: int
    label: Callable[[], str]
    out: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    tokens: list[str] = field(default_factory=list)
    kv: str = ""
    is_ending: bool = False

    def tell(self, finish: dict[str, Any] | None) -> None:
        """Hand on what there is so far; ``finish`` is None while it goes on."""
        label = self.label()
        self.out.put_nowait(
            {"tokens": list(self.tokens), "finish_reason": finish, "weight_version": label}
        )


@dataclass
class Behaviour:
    """What differs between SGLang's releases, and the faults of one test.

    Attributes:
        token_s: How long one step takes.
        flushes_retracted: A flush succeeds while requests wait that a pause took back: what
            sgl-project/sglang#33784 proposes and the branch sglang-miles has.
        ignores_no_flush: A load flushes whether asked to or not, as older releases do.
        fault: What the next load does: "begin" fails before anything is touched; "half" fails
            half-way and then reloads, as SGLang does, from the *new* path; "mixed" fails half-way
            and leaves it so; "lie" leaves half and answers 200; "skip" loads nothing and answers
            that all is well; "partly" loads half and answers that all is well; "hang" takes
            ``hang_s`` first; "die" ends the process half-way.
        hang_s: How long a hanging load hangs.
        loses_requests: The next pause loses every request: they are never answered.
    """

    token_s: float = 0.02
    flushes_retracted: bool = False
    ignores_no_flush: bool = False
    fault: str = ""
    hang_s: float = 5.0
    loses_requests: bool = False


class Scheduler:
    """Holds the weights and the requests, and steps."""

    def __init__(self, folder: Path, behaviour: Behaviour) -> None:
        self._folder = folder
        self._at_start = replace(behaviour)
        self.behaviour = behaviour
        self.weights = Weights(folder)
        self.digest = self.weights.digest
        self.is_paused = False
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.prefixes: dict[str, str] = {}
        self._inbox: asyncio.Queue[tuple[str, Any, Reply]] = asyncio.Queue()
        self._pending_flush: tuple[float, Reply] | None = None

    async def ask(self, kind: str, message: Any = None) -> Any:
        """Send a message and wait for its reply."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def reply(value: Any) -> None:
            if not future.done():
                future.set_result(value)

        self._inbox.put_nowait((kind, message, reply))
        return await future

    def send(self, kind: str, message: Any = None, reply: Reply = lambda _: None) -> None:
        """Send a message and do not wait: what comes next comes after it."""
        self._inbox.put_nowait((kind, message, reply))

    async def run(self) -> None:
        """The event loop: messages, then a step. An exception in it ends the whole server."""
        try:
            while True:
                await self._take_messages()
                self._check_pending_flush()
                if not self.is_paused:
                    self._step()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            print(f"Scheduler hit an exception: {error!r}", flush=True)
            os._exit(1)

    async def _take_messages(self) -> None:
        is_busy = not self.is_paused and bool(self.running or self.waiting)
        wait_s = self.behaviour.token_s if is_busy or self._pending_flush else 1.0
        end_s = time.monotonic() + wait_s
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                kind, message, reply = await asyncio.wait_for(self._inbox.get(), left_s)
            except TimeoutError:
                return
            reply_now = await self._handle(kind, message, reply)
            if reply_now is not _LATER:
                reply(reply_now)
            if not is_busy and self._inbox.empty():
                return

    async def _handle(self, kind: str, message: Any, reply: Reply) -> Any:
        if kind == "generate":
            self.waiting.append(message)
        elif kind == "abort":
            self._abort(message)
        elif kind == "pause":
            self._pause(message)
        elif kind == "continue":
            self.is_paused = False
        elif kind == "flush":
            return self._ask_flush(message, reply)
        elif kind == "load":
            return await self._load(**message)
        elif kind == "show":
            return self.weights.show(**message)
        elif kind == "reset":
            self._reset()
        elif kind == "state":
            return {
                "waiting": len(self.waiting),
                "running": len(self.running),
                "weights": self.digest,
                "prefixes": len(self.prefixes),
            }
        return None

    def _reset(self) -> None:
        """Be as after the start."""
        self.behaviour = replace(self._at_start)
        self.weights.load(self._folder)
        self.digest = self.weights.digest
        self.is_paused = False
        self.prefixes.clear()
        for request in self.waiting + self.running:
            request.tell({"type": "abort", "message": "The server was reset"})
        self.running, self.waiting = [], []

    def _step(self) -> None:
        for request in self.waiting:
            # The prefill: a known prompt takes the KV that is there, whatever weights made it.
            request.kv = self.prefixes.get(request.prompt, self.digest)
        self.running += self.waiting
        self.waiting = []
        for request in list(self.running):
            if request.is_ending:
                self.running.remove(request)
                request.tell({"type": "abort", "message": "Aborted"})
                continue
            request.tokens.append(
                token_of(self.digest, request.kv, request.prompt, len(request.tokens))
            )
            if len(request.tokens) < request.wanted:
                request.tell(None)
                continue
            self.running.remove(request)
            self.prefixes[request.prompt] = request.kv
            request.tell({"type": "length", "length": request.wanted})

    def _abort(self, rid: str) -> None:
        """End one request, or all for an empty rid; one at work with the next step only."""
        for request in [one for one in self.waiting if rid in {"", one.rid}]:
            self.waiting.remove(request)
            request.tell({"type": "abort", "message": "Abort in waiting queue"})
        for request in self.running:
            request.is_ending |= rid in {"", request.rid}

    def _pause(self, mode: str) -> None:
        self.is_paused = True
        if self.behaviour.loses_requests:
            self.behaviour.loses_requests = False
            self.running, self.waiting = [], []
        if mode == "retract":
            # Their KV is given back, but for what the tree has of it; they wait as new ones do.
            self.waiting = self.running + self.waiting
            self.running = []

    def _is_idle(self) -> bool:
        if self.is_paused and self.behaviour.flushes_retracted:
            return not self.running
        return not self.running and not self.waiting

    def _flush(self) -> bool:
        if not self._is_idle():
            return False
        self.prefixes.clear()
        return True

    def _ask_flush(self, timeout_s: float, reply: Reply) -> Any:
        if self._pending_flush is not None:
            return False, "Another flush_cache is already in progress."
        if timeout_s <= 0 or self._is_idle():
            return self._flush(), ""
        self._pending_flush = (time.monotonic() + timeout_s, reply)
        return _LATER

    def _check_pending_flush(self) -> None:
        if self._pending_flush is None:
            return
        end_s, reply = self._pending_flush
        if self._is_idle():
            reply((self._flush(), ""))
        elif time.monotonic() >= end_s:
            reply((False, "Timed out waiting for idle state."))
        else:
            return
        self._pending_flush = None

    async def _load(self, folder: str, flush_cache: bool) -> tuple[bool, str]:
        """A whole load, in which no step happens. Failing, it does what SGLang does."""
        fault, self.behaviour.fault = self.behaviour.fault, ""
        success, message = await asyncio.to_thread(self._load_now, Path(folder), fault)
        self.digest = await asyncio.to_thread(lambda: self.weights.digest)
        if success and (flush_cache or self.behaviour.ignores_no_flush):
            assert self._flush(), "Cache flush failed after updating weights"
        return success, message

    def _load_now(self, folder: Path, fault: str) -> tuple[bool, str]:
        if fault == "hang":
            time.sleep(self.behaviour.hang_s)
        try:
            if fault == "begin":
                raise FileNotFoundError(folder)
            Checkpoint.open(folder, ignore_subfolders=True)
        except (OSError, ThinwireError) as error:
            return False, f"Failed to get weights iterator: {error}."
        if fault == "skip":
            return True, "Succeeded to update model weights."
        if fault in {"half", "mixed", "lie", "partly", "die"}:
            self.weights.load(folder, part=0.5)
            if fault == "die":
                os._exit(9)
            if fault == "partly":
                return True, "Succeeded to update model weights."
            if fault == "half":
                # SGLang's "original" path is the one it has just been given.
                self.weights.load(folder)
            return False, "Failed to update weights: a fault.\nRolling back to original weights."
        self.weights.load(folder)
        return True, "Succeeded to update model weights."


_LATER = object()
