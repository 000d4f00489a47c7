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
from thinwire.engines.host import FOLDER_NAME, PLACES_SUFFIX
from thinwire.engines.places import read_places
from thinwire.engines.vllm.loading import loader_of, model_behind
from thinwire.engines.vllm.messages import Message, Note, write_note
from thinwire.errors import EngineError, ThinwireError
from thinwire.torch.attached import WAYS, AttachedModel, Staged
from thinwire.torch.index_map import Int64s
from thinwire.torch.live import named_tensors

_LOG = logging.getLogger("thinwire")


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
        self._is_active = False
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
        """End an update.

        Raises:
            RuntimeError: What the model holds is not known: it must not serve.
        """
        self._is_active = False
        if self._attached is not None and not self._label:
            raise RuntimeError("the last weight update failed and was not taken back")

    def shutdown(self) -> None:
        """Let go of everything."""
        self._staged = self._applied = None

    # What messages say.

    def _act(self, message: Message) -> None:
        message.check()
        if self._model is None:
            self._leave(message, "no-model")
            return
        beside = {"stage": self._stage, "prove": self._prove}
        if message.do in beside:
            self._join()
            self._beside = threading.Thread(
                target=self._noted,
                args=(message, beside[message.do]),
                name=f"thinwire-{message.do}",
                daemon=True,
            )
            self._beside.start()
            return
        self._join()
        here = {"attach": self._attach, "apply": self._apply, "undo": self._undo}
        self._noted(message, here[message.do])

    def _noted(self, message: Message, do: Callable[[Message], Mapping[str, Any]]) -> None:
        """Do something and leave a note of it. Never raises: ranks must stay in step."""
        start_s = time.perf_counter()
        try:
            facts = do(message)
        except Exception as error:
            _LOG.exception("thinwire: %s failed", message.do)
            reason = error.message if isinstance(error, ThinwireError) else repr(error)[:500]
            hint = error.hint if isinstance(error, ThinwireError) else ""
            self._leave(message, "failed", error=reason, hint=hint)
        else:
            seconds = time.perf_counter() - start_s
            self._leave(message, "done", seconds=seconds, facts=dict(facts))

    def _attach(self, message: Message) -> Mapping[str, Any]:
        assert self._model is not None
        folder = Path(message.folder)
        self._label, self._staged, self._applied = "", None, None
        ways = [way for way in WAYS if way in message.ways] if message.ways else WAYS
        copy = Checkpoint.open(folder, ignore_subfolders=True)
        with self._config(), torch.no_grad():
            attached = AttachedModel(
                named_tensors(self._model),
                loader_of(self._model, self.vllm_config, self._rank()),
                folder / FOLDER_NAME / "maps",
                ways,
            )
            facts = attached.attach(copy)
            differing = attached.differing_count(copy)
        if differing:
            raise EngineError(f"{differing} words differ from the host's copy after attaching")
        copy.check_unchanged()
        self._attached, self._label = attached, message.label
        held = attached.held_counts()
        return {**msgspec.to_builtins(_facts(facts)), "held": held}

    def _stage(self, message: Message) -> Mapping[str, Any]:
        if self._attached is None or not self._label:
            raise EngineError("this rank was not attached, or was started again")
        if message.base and message.base != self._label:
            raise EngineError(
                f"the update starts from {message.base}, this rank is at {self._label}"
            )
        self._staged = None
        folder = Path(message.folder)
        copy = Checkpoint.open(folder, ignore_subfolders=True)
        places = self._places(folder, message) if message.base else None
        staged = self._attached.stage(copy, places)
        self._staged = (message, staged, copy)
        count = staged.swap.word_count if staged.swap else 0
        return {"swap_count": count, "dense": len(staged.dense), "patches": len(staged.patches)}

    def _apply(self, message: Message) -> Mapping[str, Any]:
        if self._staged is None or self._staged[0].token != message.token:
            raise EngineError("this update was not staged on this rank")
        assert self._attached is not None
        asked, staged, copy = self._staged
        before = self._label
        self._staged, self._label = None, ""
        self._applied = (message.token, before, staged)
        with self._config():
            self._attached.apply(staged, copy)
        self._label = asked.label
        return {}

    def _undo(self, message: Message) -> Mapping[str, Any]:
        if self._applied is None or self._applied[0] != message.token:
            # It never came to it here.
            if not self._label:
                raise EngineError("what this rank holds is not known")
            return {}
        assert self._attached is not None
        _, before, staged = self._applied
        self._label = ""
        if not self._attached.undo(staged):
            raise EngineError("this update cannot be taken back")
        self._label, self._applied = before, None
        return {}

    def _prove(self, message: Message) -> Mapping[str, Any]:
        if self._attached is None or self._label != message.label:
            raise EngineError(f"this rank holds {self._label or 'no known version'}")
        copy = Checkpoint.open(Path(message.folder), ignore_subfolders=True)
        differing = self._attached.differing_count(copy)
        copy.check_unchanged()
        return {"differing": differing}

    def _places(self, folder: Path, message: Message) -> dict[str, Int64s | None]:
        found: dict[str, list[Int64s] | None] = {}
        path = folder / FOLDER_NAME / "updates" / f"{message.token}{PLACES_SUFFIX}"
        for block in read_places(path):
            if block.positions is None:
                found[block.name] = None
            elif (parts := found.setdefault(block.name, [])) is not None:
                parts.append(block.positions.astype(np.int64) + block.first_word)
        return {name: _joined(parts) for name, parts in found.items()}

    def _join(self) -> None:
        if self._beside is not None:
            self._beside.join()
            self._beside = None

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


def _facts(facts: Any) -> dict[str, Any]:
    told = {name: getattr(facts, name) for name in facts.__dataclass_fields__}
    told["refused"] = dict(list(facts.refused.items())[:20])
    told["loose"] = list(facts.loose)[:20]
    told["absent"] = list(facts.absent)[:20]
    return told
