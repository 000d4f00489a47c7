"""The weight-transfer backend that runs in each of vLLM's workers.

One class serves the interface of vLLM 0.26 and later, where the backend is given the model, and the
one before, where it is handed a function that loads weights. It derives from nothing of vLLM's.
What takes long runs in a thread beside the serving one; that is handed back at once.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.engines.host import FOLDER_NAME, places_path
from thinwire.engines.places import read_places
from thinwire.engines.vllm.loading import (
    check_same_model,
    derived_tensors,
    loader_of,
    model_behind,
)
from thinwire.engines.vllm.messages import Message, Note, RankFacts, write_note
from thinwire.errors import EngineDetached, EngineError, ThinwireError
from thinwire.torch.attached import AttachedModel
from thinwire.torch.index_map import Int64s
from thinwire.torch.live import named_tensors
from thinwire.torch.ways import WAYS, Staged

_LOG = logging.getLogger("thinwire")

# Seconds that a change waits for what runs beside. What it waits for should have ended before.
_SETTLE_S = 30.0

Do = Callable[[Message], RankFacts]


class Backend:
    """A rank's side. vLLM makes it and calls its methods; see :mod:`thinwire.engines.vllm`."""

    init_info_cls = Message
    update_info_cls = Message
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(
        self, config: Any, vllm_config: Any, device: Any = None, model: Any = None
    ) -> None:
        self.config = config
        # Before 0.26 the second argument is the parallel config.
        self.vllm_config = vllm_config if model is not None else None
        self._parallel: Any = getattr(vllm_config, "parallel_config", vllm_config)
        self._model: torch.nn.Module | None = model
        self._boot = secrets.token_hex(8)
        self._attached: AttachedModel | None = None
        self._label = ""  # what the model holds exactly; empty: not known
        self._staged: tuple[Message, Staged, Checkpoint] | None = None
        self._applied: tuple[str, str, Staged] | None = None  # token, label before, what was done
        self._is_active = False  # between begin and end of an update
        self._sender, self._number = "", 0  # of the last message
        self._owner = ""  # of the driver that attached this rank
        self._beside: threading.Thread | None = None

    # What vLLM calls.

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> Message:
        """A message from what arrived.

        Raises:
            ValueError: It is none.
        """
        return _message(init_dict)

    def parse_update_info(self, update_dict: Mapping[str, Any]) -> Message:
        """As :meth:`parse_init_info`."""
        return _message(update_dict)

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Refuse: a draft model is not what a stream holds."""
        raise NotImplementedError("thinwire does not update draft models")

    def reset_weight_update_target(self) -> None:
        """The target is always the model."""

    def drain_pending(self) -> None:
        """Nothing is left pending."""

    def init_transfer_engine(self, init_info: Message) -> None:
        """Do what a message says, but for changing weights. A note says what became of it."""
        if init_info.do == "apply":
            raise ValueError("an update is applied by update_weights")
        self._act(init_info)

    def start_weight_update(self) -> None:
        """Begin an update; nothing is touched yet."""
        self._is_active = True

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Do what a message says. A note says what became of it, on every rank."""
        self.receive_weights(_message(update_info))

    def receive_weights(
        self, update_info: Message, load_weights: Callable[..., Any] | None = None
    ) -> None:
        """As :meth:`update_weights`. Before 0.26 the model is found behind ``load_weights``."""
        if self._model is None and load_weights is not None:
            self._model = model_behind(load_weights)
        self._act(update_info)

    def finish_weight_update(self) -> None:
        """End an update. What became of it is in the notes, and the driver goes by these."""
        self._is_active = False

    def shutdown(self) -> None:
        """Let go of everything."""
        self._staged = self._applied = None

    # What messages say.

    def _act(self, message: Message) -> None:
        """Do what a message says, and leave a note.

        Nothing is raised. With several ranks vLLM hears one that raises, and takes what the others
        say for answers to its next calls; a driver that finds no note knows enough.
        """
        try:
            message.check()
        except ThinwireError as error:
            _LOG.error("thinwire: %s", error)
            return
        if message.owner == self._sender and message.number <= self._number:
            # It was held up somewhere, and its driver has gone on without it.
            self._leave(message, "failed", error="a later message came before this one")
            return
        self._sender, self._number = message.owner, message.number
        if self._model is None:
            self._leave(message, "no-model")
            return
        beside = {"stage": self._stage, "prove": self._prove}
        if message.do in beside:
            self._beside = threading.Thread(
                target=self._noted_beside,
                args=(message, beside[message.do], self._beside),
                name=f"thinwire-{message.do}",
                daemon=True,
            )
            self._beside.start()
            return
        here = {
            "meet": self._meet,
            "attach": self._attach,
            "apply": self._apply,
            "undo": self._undo,
        }
        self._noted(message, here[message.do])

    def _noted_beside(self, message: Message, do: Do, earlier: threading.Thread | None) -> None:
        """As :meth:`_noted`, after an earlier one: the serving thread waits for none of them."""
        if earlier is not None:
            earlier.join()
        self._noted(message, do)

    def _noted(self, message: Message, do: Do) -> None:
        """Do something and leave a note of it."""
        start_s = time.perf_counter()
        try:
            facts = msgspec.structs.replace(do(message), is_active=self._is_active)
        except Exception as error:
            _LOG.exception("thinwire: %s failed", message.do)
            told = {"error": repr(error)[:500]}
            if isinstance(error, ThinwireError):
                told = {"code": error.code, "error": error.message, "hint": error.hint}
            self._leave(message, "failed", **told)
        else:
            self._leave(message, "done", seconds=time.perf_counter() - start_s, facts=facts)

    def _settle(self) -> None:
        """Wait for what runs beside, but not for long.

        Raises:
            EngineError: It does not end.
        """
        if self._beside is not None:
            self._beside.join(_SETTLE_S)
            if self._beside.is_alive():
                raise EngineError("a thread beside the serving one is still at work")

    def _meet(self, message: Message) -> RankFacts:
        if getattr(self._parallel, "enable_eplb", False):
            raise EngineError(
                "expert parallel load balancing moves experts while the engine serves",
                hint="Start vLLM without --enable-eplb",
            )
        Checkpoint.open(Path(message.folder), ignore_subfolders=True)
        # The probes would overwrite the weights of another model before they fail.
        check_same_model(Path(message.folder), self.vllm_config)
        return RankFacts()

    def _check_attached(self, message: Message) -> AttachedModel:
        """Raise EngineDetached unless this rank is attached, by the message's owner."""
        if self._attached is None or not self._label:
            raise EngineDetached("this rank was not attached, or was started again")
        if message.owner != self._owner:
            raise EngineDetached("another driver attached this rank")
        assert self._model is not None
        if not self._attached.is_of(named_tensors(self._model)):
            raise EngineDetached("the model's parameters were replaced since it was attached")
        return self._attached

    def _attach(self, message: Message) -> RankFacts:
        self._settle()
        assert self._model is not None
        folder = Path(message.folder)
        self._label, self._staged, self._applied = "", None, None
        self._owner = message.owner
        ways = [way for way in WAYS if way in message.ways] if message.ways else list(WAYS)
        derived = derived_tensors(self._model)
        if derived:
            ways = [way for way in ways if way == "reload"]
        copy = Checkpoint.open(folder, ignore_subfolders=True)
        with self._config(), torch.no_grad():
            attached = AttachedModel(
                named_tensors(self._model),
                loader_of(self._model, self.vllm_config, self._rank()),
                folder / FOLDER_NAME / "maps",
                ways,
                buffers=[name for name, _ in self._model.named_buffers()],
                unfed=message.unfed,
            )
            facts = attached.attach(copy)
            differing = attached.differing_count(copy)
        if differing:
            raise EngineError(f"{differing} words differ from the host's copy after attaching")
        copy.check_unchanged()
        self._attached, self._label = attached, message.label
        return RankFacts(
            way=facts.way,
            reason=f"the engine derives {derived[0]} from weights" if derived else facts.reason,
            run_count=facts.run_count,
            map_bytes=facts.map_bytes,
            is_cached=facts.is_cached,
            probe_s=facts.probe_s,
            dense_s=facts.dense_s,
            refused=dict(list(facts.refused.items())[:20]),
            loose=len(facts.loose),
            held=attached.held_counts(),
            unseen=attached.unseen_count(),
        )

    def _stage(self, message: Message) -> RankFacts:
        attached = self._check_attached(message)
        if message.base and message.base != self._label:
            raise EngineDetached(
                f"the update starts from {message.base}, this rank is at {self._label}"
            )
        self._staged = None
        folder = Path(message.folder)
        copy = Checkpoint.open(folder, ignore_subfolders=True)
        places = self._places(folder, message) if message.base else None
        staged = attached.stage(copy, places)
        # A driver that gave up waiting may have gone on with the copy meanwhile.
        copy.check_unchanged()
        if message.number == self._number:
            self._staged = (message, staged, copy)
        return RankFacts(swap_count=staged.swap.word_count if staged.swap else 0)

    def _apply(self, message: Message) -> RankFacts:
        self._settle()
        if self._staged is None or self._staged[0].token != message.token:
            raise EngineError("this update was not staged on this rank")
        attached = self._check_attached(message)
        asked, staged, copy = self._staged
        before = self._label
        self._staged, self._label = None, ""
        self._applied = (message.token, before, staged)
        with self._config():
            attached.apply(staged, copy)
        self._label = asked.label
        return RankFacts()

    def _undo(self, message: Message) -> RankFacts:
        self._staged = None
        if self._applied is None or self._applied[0] != message.token:
            # It never came to it here, and will not.
            if not self._label:
                raise EngineError("what this rank holds is not known")
            return RankFacts()
        assert self._attached is not None
        _, before, staged = self._applied
        self._label = ""
        if not self._attached.undo(staged):
            raise EngineError("this update cannot be taken back")
        self._label, self._applied = before, None
        return RankFacts()

    def _prove(self, message: Message) -> RankFacts:
        label = self._label
        if label != message.label:
            raise EngineDetached(f"this rank holds {label or 'no known version'}")
        if self._attached is None:
            raise EngineDetached("this rank was not attached")
        applied = self._applied
        unseen = self._attached.unseen_count()
        if message.scope == "changes" and applied is not None and applied[0] == message.token:
            swap = applied[2].swap
            if applied[2].can_be_undone and swap is not None:
                differing = 0 if swap.holds_new() else swap.word_count
                return RankFacts(differing=differing, unseen=unseen)
        copy = Checkpoint.open(Path(message.folder), ignore_subfolders=True)
        found = self._attached.differing_count(copy)
        copy.check_unchanged()
        if found == 0:
            # A driver that takes over has proved what it drives: it needs not attach it again.
            self._owner = message.owner
        return RankFacts(differing=found, unseen=unseen)

    def _places(self, folder: Path, message: Message) -> dict[str, Int64s | None]:
        assert self._attached is not None
        found: dict[str, list[Int64s] | None] = {}
        for block in read_places(places_path(folder, message.token)):
            if not self._attached.holds(block.name):
                continue
            if block.positions is None:
                found[block.name] = None
            elif (parts := found.setdefault(block.name, [])) is not None:
                parts.append(block.positions.astype(np.int64) + block.first_word)
        return {name: _joined(parts) for name, parts in found.items()}

    def _leave(self, message: Message, state: Any, **more: Any) -> None:
        note = Note(
            rank=self._rank(),
            boot=self._boot,
            call=message.call,
            state=state,
            label=self._label,
            **more,
        )
        try:
            write_note(Path(message.folder), note)
        except ThinwireError:
            _LOG.exception("thinwire: no note could be left")

    def _rank(self) -> int:
        parallel = self._parallel
        # Before it had an index of its own, the replica's was its rank.
        replica = getattr(parallel, "data_parallel_index", None)
        if replica is None:
            replica = getattr(parallel, "data_parallel_rank", 0)
        return int(replica or 0) * int(parallel.world_size or 1) + int(parallel.rank or 0)

    @contextmanager
    def _config(self) -> Iterator[None]:
        """vLLM's loaders look for the current configuration."""
        if self.vllm_config is None:
            with nullcontext():
                yield
            return
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            yield


def _message(told: Mapping[str, Any]) -> Message:
    try:
        return msgspec.convert(dict(told), Message)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a message of thinwire's: {error}") from None


def _joined(parts: Iterable[Int64s] | None) -> Int64s | None:
    if parts is None:
        return None
    found = list(parts)
    if len(found) == 1:
        return found[0]
    joined = np.concatenate(found)
    # Blocks of one update follow each other; those of several may name a word twice.
    return joined if bool((joined[1:] > joined[:-1]).all()) else np.unique(joined)
