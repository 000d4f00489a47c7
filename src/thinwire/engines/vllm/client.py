"""vLLM as a driver's engine: its development routes, and the notes that its ranks leave.

Needs ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "thinwire"}'``. vLLM's
API key does not protect these routes: have it listen where only the driver can reach it.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.checkpoint import Checkpoint
from thinwire.engines.engine import EngineState, Policy, Timer, Update
from thinwire.engines.http import EngineHttp
from thinwire.engines.vllm.messages import Do, Note, read_note
from thinwire.errors import EngineError, EngineUnreachable, InvalidArgument, ThinwireError

_LOG = logging.getLogger("thinwire")

# Notes are looked for this often, at first, and at most this rarely.
_LOOK_S = 0.002
_MAX_LOOK_S = 0.1
_DEV_HINT = (
    "Start vLLM with VLLM_SERVER_DEV_MODE=1 and "
    """--weight-transfer-config '{"backend": "thinwire"}'"""
)


class VLLM:
    """One vLLM server, with all of its ranks.

    Every rank must see the driver's folder under the same path.

    Args:
        endpoint: Where it listens.
        api_key: What it was started with, where it was.
        ways: The ways that weights may be changed, of "map", "dense", "patches" and "reload"; see
            :mod:`thinwire.torch.attached`. Empty: all.

    Raises:
        InvalidArgument: There is no such way, or the endpoint is no address.
    """

    name = "vllm"

    def __init__(
        self,
        endpoint: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        ways: Sequence[str] = (),
    ) -> None:
        if unknown := set(ways) - {"map", "dense", "patches", "reload"}:
            raise InvalidArgument(f"{sorted(unknown)[0]!r} is no way of changing weights")
        self.endpoint = endpoint
        self._ways = list(ways)
        self._http = EngineHttp(
            endpoint, key=api_key, key_hint="Give the key that vLLM was started with (--api-key)"
        )
        self._boots: dict[int, str] = {}
        self._goes_through_update = False  # before vLLM 0.26
        self.facts: list[dict[str, Any]] = []
        """What each rank found out when it was attached."""

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def state(self, timer: Timer) -> EngineState:
        """As :meth:`thinwire.engines.engine.Engine.state`.

        A restart shows in the label, which vLLM forgets, and in the ranks' notes.
        """
        label = self._get("/weight_info", timer).get("weight_version")
        is_paused = self._get("/is_paused", timer).get("is_paused")
        return EngineState("", str(label), bool(is_paused))

    def attach(self, update: Update, timer: Timer) -> None:
        """Have every rank find its index map and bring itself to the host's copy."""
        self._boots = {}
        try:
            notes = self._tell("attach", update, timer)
        except _NoModel:
            self._goes_through_update = True
            notes = self._tell("attach", update, timer)
        self._boots = {note.rank: note.boot for note in notes}
        self.facts = [dict(note.facts, rank=note.rank, seconds=note.seconds) for note in notes]
        for note in notes:
            facts = {k: v for k, v in note.facts.items() if k not in ("refused", "held")}
            _LOG.info("rank %d attached in %.2f s: %s", note.rank, note.seconds, facts)
            for name, why in note.facts.get("refused", {}).items():
                _LOG.warning("rank %d: parameter %s is not placed: %s", note.rank, name, why)
        self._check_held(notes, update.folder)

    def _check_held(self, notes: Sequence[Note], folder: Path) -> None:
        """Say which elements no rank holds: an engine may drop some, but nobody should wonder."""
        if any(note.facts.get("way") != "map" or note.facts.get("loose") for note in notes):
            return
        parts = [note.facts.get("held", {}) for note in notes]
        names = set().union(*parts)
        if not names:
            return
        tensors = Checkpoint.open(folder, ignore_subfolders=True).tensors
        for name in sorted(names & tensors.keys()):
            count = math.prod(tensors[name].shape)
            held = sum(part.get(name, count) for part in parts)
            if held < count:
                _LOG.warning("of %s, the engine holds %d of %d elements", name, held, count)

    def stage(self, update: Update, timer: Timer) -> None:
        """Have every rank prepare the update, in a thread beside the serving one."""
        self._tell("stage", update, timer)

    def pause(self, policy: Policy, timer: Timer) -> None:
        """Hold requests back; the caches stay as they are."""
        params = {"mode": policy.pause, "clear_cache": "false"}
        self._http.call("POST", "/pause", timer=timer, params=params)

    def apply(self, update: Update, timer: Timer) -> None:
        """Have every rank change its weights, within one begin and end."""
        self._begin(timer)
        self._update("apply", update, timer)
        self._end(timer)

    def undo(self, update: Update, timer: Timer) -> bool:
        """Have every rank put the old words back."""
        try:
            self._tell("undo", update, timer)
        except EngineUnreachable:
            raise
        except EngineError as error:
            _LOG.warning("the update cannot be taken back: %s", error)
            return False
        finally:
            # Ranks that had no part in the failure still wait for the end.
            with suppress(ThinwireError):
                self._end(timer)
        return True

    def empty_caches(self, policy: Policy, timer: Timer) -> None:
        """Empty prefix, KV and encoder caches; what running requests had is computed again."""
        params = {"reset_running_requests": "true"}
        done = self._http.call("POST", "/reset_prefix_cache", timer=timer, params=params)
        if isinstance(done, Mapping) and done.get("success") is False:
            raise EngineError(
                "vLLM did not empty its prefix cache: blocks are still held",
                hint='With requests in flight, use the pause mode "wait" or "abort"',
            )
        for route in ("/reset_mm_cache", "/reset_encoder_cache"):
            self._http.call("POST", route, timer=timer, ok=(200, 404))

    def set_label(self, label: str, timer: Timer) -> None:
        """Set ``weight_version``, which vLLM puts into its answers."""
        self._http.call("POST", "/update_weight_version", timer=timer, json={"new_version": label})

    def resume(self, timer: Timer) -> None:
        """Let requests run again."""
        self._http.call("POST", "/resume", timer=timer)

    def prove(self, update: Update, timer: Timer) -> bool | None:
        """Have every rank compare its parameters with the host's copy."""
        differing = [note.facts.get("differing") for note in self._tell("prove", update, timer)]
        if any(count for count in differing):
            _LOG.error("words that differ from the host's copy, by rank: %s", differing)
            return False
        return None if None in differing else True

    def _tell(self, do: Do, update: Update, timer: Timer) -> list[Note]:
        """Tell all ranks what to do, and wait for their notes."""
        if self._goes_through_update:
            self._begin(timer)
            try:
                notes = self._update(do, update, timer)
            finally:
                self._end(timer)
            return notes
        message = self._message(do, update)
        body = {"init_info": message}
        self._call_dev("/init_weight_transfer_engine", timer, json=body)
        return self._notes(message, update.folder, timer)

    def _update(self, do: Do, update: Update, timer: Timer) -> list[Note]:
        message = self._message(do, update)
        self._call_dev("/update_weights", timer, json={"update_info": message})
        return self._notes(message, update.folder, timer)

    def _begin(self, timer: Timer) -> None:
        # Releases before 0.26 ask for the format; ours is neither of theirs.
        body = {"is_checkpoint_format": False}
        self._call_dev("/start_weight_update", timer, json=body, ok=(200, 404))

    def _end(self, timer: Timer) -> None:
        self._http.call("POST", "/finish_weight_update", timer=timer, json={}, ok=(200, 404))

    def _message(self, do: Do, update: Update) -> dict[str, Any]:
        return {
            "do": do,
            "token": update.token,
            "call": secrets.token_hex(8),
            "folder": str(update.folder),
            "base": update.base,
            "label": update.label,
            "ways": self._ways,
        }

    def _notes(self, message: Mapping[str, Any], folder: Path, timer: Timer) -> list[Note]:
        """The answers of all ranks to one message.

        Raises:
            EngineError: A rank failed, or was started again.
            Deadline: They are not all there.
        """
        world_size = int(self._get("/get_world_size", timer).get("world_size", 0))
        if not 0 < world_size < 1 << 20:
            raise EngineError(f"vLLM says that it has {world_size} ranks")
        found: dict[int, Note] = {}
        wait_s = _LOOK_S
        while True:
            for rank in range(world_size):
                note = None if rank in found else read_note(folder, rank)
                if note is not None and note.call == message["call"]:
                    found[rank] = note
            if len(found) == world_size:
                break
            timer.left_s()
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.3, _MAX_LOOK_S)
            if wait_s == _MAX_LOOK_S:
                # A dead engine leaves no notes.
                self._get("/is_paused", timer)
        notes = [found[rank] for rank in range(world_size)]
        self._check(notes, message["do"])
        return notes

    def _check(self, notes: Sequence[Note], do: str) -> None:
        if any(note.state == "no-model" for note in notes):
            raise _NoModel("vLLM has not told the backend its model yet")
        for note in notes:
            if note.state == "failed":
                raise EngineError(
                    f"rank {note.rank} could not {do}: {note.error}",
                    hint=note.hint or "Look into vLLM's log",
                    rank=note.rank,
                )
            if self._boots and self._boots.get(note.rank) != note.boot:
                raise EngineError(f"rank {note.rank} was started again", rank=note.rank)

    def _get(self, route: str, timer: Timer) -> Mapping[str, Any]:
        answer = self._call_dev(route, timer, method="GET")
        if not isinstance(answer, Mapping):
            raise EngineError(f"{self.endpoint} answers GET {route} with no JSON object")
        return answer

    def _call_dev(self, route: str, timer: Timer, method: str = "POST", **more: Any) -> Any:
        try:
            return self._http.call(method, route, timer=timer, **more)
        except EngineError as error:
            if error.context.get("status") == 404:
                raise EngineError(error.message, hint=_DEV_HINT, **error.context) from error
            raise


class _NoModel(EngineError):
    """A release before 0.26, in which the backend meets the model only inside an update."""
