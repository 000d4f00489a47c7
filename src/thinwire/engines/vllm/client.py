"""vLLM as a driver's engine: its development routes, and the notes that its ranks leave.

Needs ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "thinwire"}'``. vLLM's
API key does not protect these routes: have it listen where only the driver can reach it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from thinwire.checkpoint import Checkpoint
from thinwire.engines.engine import EngineState, Policy, Timer, Update
from thinwire.engines.http import EngineHttp
from thinwire.engines.vllm.messages import Do, Note, RankFacts, drop_notes, read_note
from thinwire.engines.vllm.notes import NoModel, check_notes, log_attached, log_unheld
from thinwire.errors import (
    EngineDetached,
    EngineError,
    EngineUnreachable,
    InvalidArgument,
    ThinwireError,
)

_LOG = logging.getLogger("thinwire")

# Notes are looked for this often, at first, and at most this rarely.
_LOOK_S = 0.002
_MAX_LOOK_S = 0.1
# How long a note may take to show once the call was answered.
_GRACE_S = 2.0
_MAX_RANKS = 1 << 14
_DISAGREEING = 500
_BESIDE = ("stage", "prove")
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
            :mod:`thinwire.torch.ways`. Empty: all.
        unfed: Shell patterns of the engine's parameters that stay as it has them, because the
            stream does not hold them, such as ``["vision_tower.*"]``.
        prove: What is compared after an update: "all" words, which reads the whole model once
            beside the serving, or the "changes", which costs what changed.

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
        unfed: Sequence[str] = (),
        prove: Literal["all", "changes"] = "all",
    ) -> None:
        if unknown := set(ways) - {"map", "dense", "patches", "reload"}:
            raise InvalidArgument(f"{sorted(unknown)[0]!r} is no way of changing weights")
        self.endpoint = endpoint
        if prove not in ("all", "changes"):
            raise InvalidArgument(f"{prove!r} cannot be proved", hint='Give "all" or "changes"')
        self._ways = list(ways)
        self._unfed = list(unfed)
        self._scope = prove
        self._http = EngineHttp(
            endpoint, key=api_key, key_hint="Give the key that vLLM was started with (--api-key)"
        )
        self._owner = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        # Whether a begin of ours was sent, and no end of it was answered.
        self._may_be_open = False
        self._boots: dict[int, str] = {}
        self._goes_through_update = False  # before vLLM 0.26
        self.facts: list[RankFacts] = []
        """What each rank found out when it was attached, by rank."""

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def state(self, timer: Timer) -> EngineState:
        """As :meth:`thinwire.engines.engine.Engine.state`.

        A restart shows in the label, which vLLM forgets, and in the ranks' notes.
        """
        try:
            label = self._label(timer)
            is_paused = self._get("/is_paused", timer).get("is_paused")
        except EngineError as error:
            if error.context.get("status") != _DISAGREEING:
                raise
            # Its data-parallel replicas do not agree on it: then nothing is known.
            return EngineState("", "", False)
        # Where it can sleep at all.
        sleeping = self._http.call("GET", "/is_sleeping", timer=timer, ok=(200, 404))
        is_asleep = isinstance(sleeping, Mapping) and sleeping.get("is_sleeping")
        return EngineState("", label, bool(is_paused or is_asleep))

    def check_policy(self, policy: Policy) -> None:
        """vLLM can carry out every policy."""

    def meet(self, update: Update, timer: Timer) -> None:
        """Ask every rank whether it sees the host's copy and can leave notes there."""
        # It may have been started again: the ranks that were attached are not asked after.
        self._boots = {}
        if not self._goes_through_update:
            with suppress(NoModel):
                notes = self._tell("meet", update, timer)
                # A driver before this one died between begin and end: nobody else will end it.
                self._may_be_open = True
                if not self._end_open(notes, timer):
                    self._may_be_open = False

    def attach(self, update: Update, timer: Timer) -> None:
        """Have every rank find its index map and bring itself to the host's copy."""
        self._boots = {}
        try:
            notes = self._tell("attach", update, timer)
        except NoModel:
            self._goes_through_update = True
            notes = self._tell("attach", update, timer)
        self._end_open(notes, timer)
        self._boots = {note.rank: note.boot for note in notes}
        self.facts = [note.facts for note in notes]
        log_attached(notes)
        if all(note.facts.way == "map" and not note.facts.loose for note in notes):
            size = self._world_size(timer, of_replica=True)
            log_unheld(notes[:size], Checkpoint.open(update.folder, ignore_subfolders=True))

    def stage(self, update: Update, timer: Timer) -> None:
        """Have every rank prepare the update, in a thread beside the serving one."""
        notes = self._tell("stage", update, timer)
        is_open = any(note.facts.is_active for note in notes) and not self._goes_through_update
        if is_open and not self._end_open(notes, timer):
            raise EngineError(
                "somebody else's weight update is open in vLLM",
                hint="Nothing is done while it is; only one may drive the engine",
            )

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
            notes = self._tell("undo", update, timer)
        except EngineUnreachable:
            raise
        except EngineError as error:
            _LOG.warning("the update cannot be taken back: %s", error)
            return False
        # Ranks that had no part in the failure still wait for the end.
        self._end_open(notes, timer)
        return True

    def empty_caches(self, policy: Policy, timer: Timer) -> None:
        """Empty prefix, KV and encoder caches; what running requests had is computed again."""
        # An offloading tier's keys are as old as the others.
        params = {"reset_running_requests": "true", "reset_external": "true"}
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
        """Have every rank compare its parameters with the host's copy.

        None: there are parameters that the index map does not show, or there is none.
        """
        notes = self._tell("prove", update, timer)
        if not self._boots:
            # Attached by a sidecar before this one, and right.
            self._boots = {note.rank: note.boot for note in notes}
        facts = [note.facts for note in notes]
        differing = [found.differing for found in facts]
        if any(differing):
            _LOG.error("words that differ from the host's copy, by rank: %s", differing)
            return False
        is_whole = None not in differing and not any(found.unseen for found in facts)
        return True if is_whole else None

    def _tell(self, do: Do, update: Update, timer: Timer) -> list[Note]:
        """Tell all ranks what to do, and wait for their notes."""
        if self._goes_through_update:
            self._begin(timer)
            notes = self._update(do, update, timer)
            with suppress(ThinwireError):
                self._end(timer)
            return notes
        message = self._message(do, update)
        self._call_dev("/init_weight_transfer_engine", timer, json={"init_info": message})
        return self._notes(message, update.folder, timer)

    def _update(self, do: Do, update: Update, timer: Timer) -> list[Note]:
        message = self._message(do, update)
        self._call_dev("/update_weights", timer, json={"update_info": message})
        return self._notes(message, update.folder, timer)

    def _begin(self, timer: Timer) -> None:
        # Releases before 0.26 ask for the format; ours is neither of theirs.
        body = {"is_checkpoint_format": False}
        self._may_be_open = True
        try:
            self._call_dev("/start_weight_update", timer, json=body, ok=(200, 404))
        except EngineUnreachable:
            raise
        except EngineError as error:
            raise EngineError(
                f"vLLM does not begin a weight update: {error.message}",
                hint="Does somebody else update its weights? Only one driver may",
            ) from error

    def _end_open(self, notes: Sequence[Note], timer: Timer) -> bool:
        """End an update of ours that is open on every rank; returns whether there was one.

        One that is not open must not be ended: several ranks raise then, vLLM hears one of them,
        and takes what the others said for the answers to its next calls.
        """
        is_open = all(note.facts.is_active for note in notes)
        if self._goes_through_update or not (is_open and self._may_be_open):
            return False
        with suppress(ThinwireError):
            self._end(timer)
        return True

    def _end(self, timer: Timer) -> None:
        self._http.call("POST", "/finish_weight_update", timer=timer, json={}, ok=(200, 404))
        self._may_be_open = False

    def _message(self, do: Do, update: Update) -> dict[str, Any]:
        return {
            "do": do,
            "token": update.token,
            "call": secrets.token_hex(8),
            "number": next(self._numbers),
            "owner": self._owner,
            "folder": str(update.folder),
            "base": update.base,
            "label": update.label,
            "ways": self._ways,
            "unfed": self._unfed,
            "scope": self._scope,
        }

    def _notes(self, message: Mapping[str, Any], folder: Path, timer: Timer) -> list[Note]:
        """The answers of all ranks to one message; they are taken away.

        Raises:
            EngineDetached: A rank is not attached, was started again, or holds something else.
            EngineError: A rank failed, or leaves no note.
            Deadline: They are not all there.
        """
        world_size = self._world_size(timer)
        label = self._label(timer)
        call = message["call"]
        found: dict[int, Note] = {}
        wait_s, end_s = _LOOK_S, time.monotonic() + _GRACE_S
        while True:
            for rank in range(world_size):
                note = None if rank in found else read_note(folder, rank, call)
                if note is not None:
                    found[rank] = note
            if len(found) == world_size:
                break
            if message["do"] not in _BESIDE and time.monotonic() > end_s:
                # It answered, so it is done; a note that is not here now never will be.
                missing = sorted(set(range(world_size)) - found.keys())[:8]
                raise EngineError(
                    f"ranks {missing} leave no note in {folder}",
                    hint="Every rank must see the driver's folder under the same path, and be "
                    "allowed to write to .thinwire-engine in it; one server's ranks only",
                )
            timer.left_s()
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.3, _MAX_LOOK_S)
            if wait_s == _MAX_LOOK_S and self._label(timer) != label:
                # One that was started again leaves no note of what it was told before.
                raise EngineDetached("vLLM reports another weight version than a moment ago")
        drop_notes(folder, world_size, call)
        notes = [found[rank] for rank in range(world_size)]
        check_notes(notes, message, self._boots)
        return notes

    def _label(self, timer: Timer) -> str:
        return str(self._get("/weight_info", timer).get("weight_version"))

    def _world_size(self, timer: Timer, *, of_replica: bool = False) -> int:
        params = {"include_dp": "false" if of_replica else "true"}
        answer = self._call_dev("/get_world_size", timer, method="GET", params=params)
        size = answer.get("world_size") if isinstance(answer, Mapping) else None
        if not isinstance(size, int) or not 0 < size <= _MAX_RANKS:
            raise EngineError(f"vLLM says that it has {size!r} ranks")
        return size

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
