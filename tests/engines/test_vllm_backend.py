"""The worker's side of vLLM, called as its two generations of workers call it, without vLLM."""

from __future__ import annotations

import importlib.util
import itertools
import json
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: vLLM's backend was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import numpy as np
import torch
from safetensors.torch import save_file

from thinwire.codec.delta import ChunkChanges
from thinwire.engines.host import FOLDER_NAME, PLACES_SUFFIX
from thinwire.engines.places import PlacesFile
from thinwire.engines.vllm.backend import Backend
from thinwire.engines.vllm.messages import Message, Note, read_note, write_note
from thinwire.errors import ThinwireError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _current_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the backend needs of vLLM itself: its loaders look for a configuration."""
    package, config = ModuleType("vllm"), ModuleType("vllm.config")
    config.set_current_vllm_config = lambda found: nullcontext()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.config", config)


NUMBERS = itertools.count(1)


class Model(torch.nn.Module):
    """A fused layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(60, 16, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        rows = {"q": slice(0, 40), "k": slice(40, 50), "v": slice(50, 60)}
        for name, value in weights:
            (self.norm if name == "norm" else self.qkv[rows[name]]).data.copy_(value)
        return set()


class Worker:
    """What both generations have in common: messages, and a host's folder."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self.model = Model()
        self.parallel = SimpleNamespace(world_size=2, rank=rank, data_parallel_index=0)
        self.tensors: Tensors = {}
        self.owner = secrets.token_hex(8)
        self.backend: Any = self.make()

    def make(self) -> Any:
        raise NotImplementedError

    def init(self, message: dict[str, Any]) -> None:
        typed = self.backend.parse_init_info(message)
        assert isinstance(typed, self.backend.init_info_cls)
        self.backend.init_transfer_engine(typed)

    def update(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def message(self, do: str, **more: Any) -> dict[str, Any]:
        found = {
            "do": do,
            "token": secrets.token_hex(8),
            "call": secrets.token_hex(8),
            "number": next(NUMBERS),
            "owner": self.owner,
            "folder": str(self.folder),
            "ways": ["map"],
        }
        return {**found, **more}

    def tell(self, do: str, through: str = "init", **more: Any) -> Note:
        message = self.message(do, **more)
        (self.init if through == "init" else self.update)(message)
        end_s = time.monotonic() + 20
        while (note := read_note(self.folder, self.rank, message["call"])) is None:
            assert time.monotonic() < end_s, "no note came"
            time.sleep(0.001)
        assert note.rank == self.rank
        return note

    def is_fresh(self) -> bool:
        other = Model()
        other.load_weights(self.tensors.items())
        return all(
            torch.equal(a, b) for a, b in zip(self.model.buffers_(), other.buffers_(), strict=True)
        )


def _buffers(self: Model) -> list[torch.Tensor]:
    return [self.qkv.data.view(torch.int16), self.norm.data.view(torch.int16)]


Model.buffers_ = _buffers  # type: ignore[attr-defined]


class NewWorker(Worker):
    """As of vLLM 0.26: the backend is made with the model, and called with dictionaries."""

    def make(self) -> Any:
        config = SimpleNamespace(parallel_config=self.parallel, model_config=None)
        return Backend(SimpleNamespace(backend="thinwire"), config, "cpu", self.model)

    def update(self, message: dict[str, Any]) -> None:
        self.backend.start_weight_update()
        self.backend.update_weights(message)
        self.backend.finish_weight_update()
        self.backend.reset_weight_update_target()


class OldWorker(Worker):
    """Before: the model hides behind a function, and is first seen in an update."""

    def make(self) -> Any:
        return Backend(SimpleNamespace(backend="thinwire"), self.parallel)

    def update(self, message: dict[str, Any]) -> None:
        typed = self.backend.parse_update_info(message)
        assert typed.is_checkpoint_format is False
        model = self.model

        def load_weights_direct(weights: list[tuple[str, torch.Tensor]]) -> None:
            for name, weight in weights:
                model.get_parameter(name).copy_(weight)

        self.backend.receive_weights(typed, load_weights=load_weights_direct)


def write(folder: Path, seed: int, old: Tensors | None = None) -> tuple[Tensors, Path]:
    """A host's copy, and a file of what changed in it."""
    torch.manual_seed(seed)
    shapes = {"q": (40, 16), "k": (10, 16), "v": (10, 16), "norm": (16,)}
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    updates = folder / FOLDER_NAME / "updates"
    for name in ("updates", "ranks"):
        (folder / FOLDER_NAME / name).mkdir(parents=True, exist_ok=True)
    places = updates / f"{secrets.token_hex(8)}{PLACES_SUFFIX}"
    file = PlacesFile(places)
    if old is not None:
        tensors = {name: tensor.clone() for name, tensor in old.items()}
        for name, tensor in tensors.items():
            at = np.arange(seed % 3, tensor.numel(), 5, dtype=np.uint32)
            tensor.reshape(-1).view(torch.int16)[torch.from_numpy(at.astype(np.int64))] ^= 1
            file.add(ChunkChanges(name, 0, at, np.zeros(2 * at.size, np.uint8), 2))
    file.seal()
    file.close()
    (folder / "new.safetensors").unlink(missing_ok=True)
    save_file(tensors, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")
    return tensors, places


KINDS = [NewWorker, OldWorker]


def attached(kind: Callable[[Path], Worker], folder: Path) -> Worker:
    tensors, _ = write(folder, 0)
    worker = kind(folder)
    worker.tensors = tensors
    worker.model.load_weights(tensors.items())
    through = "init" if kind is NewWorker else "update"
    note = worker.tell("attach", through, label="v1")
    assert (note.state, note.error, note.label) == ("done", "", "v1")
    assert note.facts.way == "map"
    assert worker.is_fresh()
    return worker


@pytest.mark.parametrize("kind", KINDS)
def test_it_follows(kind: Any, tmp_path: Path) -> None:
    worker = attached(kind, tmp_path)
    for number in range(2, 6):
        worker.tensors, places = write(tmp_path, number, worker.tensors)
        token = places.stem
        base, label = f"v{number - 1}", f"v{number}"
        before = [tensor.clone() for tensor in worker.model.buffers_()]  # type: ignore[attr-defined]
        note = worker.tell("stage", token=token, base=base, label=label)
        assert (note.state, note.error, note.label) == ("done", "", base)
        assert note.facts.swap_count > 0
        after = worker.model.buffers_()  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        note = worker.tell("apply", "update", token=token, label=label)
        assert (note.state, note.error, note.label) == ("done", "", label)
        assert worker.is_fresh()
        note = worker.tell("prove", token=token, label=label)
        assert (note.facts.differing, note.facts.unseen) == (0, 0)
        if number % 2:
            note = worker.tell("undo", token=token)
            assert (note.state, note.label) == ("done", base)
            after = worker.model.buffers_()  # type: ignore[attr-defined]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            # Taken back twice is taken back once.
            assert worker.tell("undo", token=token).label == base
            worker.tell("stage", token=token, base=base, label=label)
            worker.tell("apply", "update", token=token, label=label)
        assert worker.is_fresh()


def test_an_old_worker_has_no_model_before_the_first_update(tmp_path: Path) -> None:
    write(tmp_path, 0)
    worker = OldWorker(tmp_path)
    assert worker.tell("attach", label="v1").state == "no-model"
    assert worker.tell("stage", label="v1").state == "no-model"


def test_a_model_that_cannot_be_reached(tmp_path: Path) -> None:
    write(tmp_path, 0)
    worker = OldWorker(tmp_path)
    message = worker.backend.parse_update_info(worker.message("attach", label="v1"))
    with pytest.raises(ThinwireError, match="cannot be reached"):
        worker.backend.receive_weights(message, load_weights=lambda weights: None)
    worker.backend.receive_weights(message, load_weights=worker.model.load_weights)
    note = read_note(tmp_path, 0, message.call)
    assert note is not None
    assert note.call == message.call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"do": "destroy"},
        {"do": None},
        {"token": 5},
        {"folder": None},
        {"ways": "map"},
        {"number": "first"},
        {"more": 1},
        {"is_checkpoint_format": "no"},
    ],
)
def test_malformed_messages_are_refused(kind: Any, change: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, 0)
    worker = kind(tmp_path)
    message = {**worker.message("attach"), **change}
    for parse in (worker.backend.parse_init_info, worker.backend.parse_update_info):
        with pytest.raises(ValueError, match="not a message"):
            parse(message)
    for name in ("do", "token", "call", "folder"):
        with pytest.raises(ValueError, match="not a message"):
            worker.backend.parse_init_info({k: v for k, v in message.items() if k != name})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"token": "../../../etc/x"},
        {"token": ""},
        {"token": "ABCDEF0123"},
        {"token": "0" * 65},
        {"token": "01234567\n"},
        {"call": "01234567/"},
        {"folder": "/"},
        {"folder": ""},
        {"folder": "/nowhere/at/all"},
    ],
)
def test_other_files_cannot_be_named(kind: Any, change: dict[str, Any], tmp_path: Path) -> None:
    worker = attached(kind, tmp_path)
    ranks = tmp_path / FOLDER_NAME / "ranks"
    before = sorted(ranks.iterdir())
    for do in ("attach", "stage", "undo", "prove"):
        # Whether it raises or only says so in the log: nothing is done, and no note is left.
        with suppress(ValueError):
            worker.init({**worker.message(do), **change})
    assert sorted(ranks.iterdir()) == before
    assert worker.is_fresh()


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_order(kind: Any, tmp_path: Path) -> None:
    worker = attached(kind, tmp_path)
    worker.tensors, places = write(tmp_path, 2, old := worker.tensors)
    token = places.stem
    with pytest.raises(ValueError, match="update_weights"):
        worker.init(worker.message("apply", token=token))
    note = worker.tell("apply", "update", token=token, label="v2")
    assert (note.state, note.label) == ("failed", "v1")
    assert "not staged" in note.error
    note = worker.tell("stage", token=token, base="v0", label="v2")
    assert (note.state, note.label) == ("failed", "v1")
    note = worker.tell("prove", token=token, label="v2")
    assert note.state == "failed"
    worker.tensors = old
    assert worker.is_fresh()
    # Staged under another token, it is not applied.
    worker.tell("stage", token=token, base="v1", label="v2")
    note = worker.tell("apply", "update", token="0" * 16, label="v2")
    assert note.state == "failed"
    assert worker.is_fresh()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_places_that_is_torn(kind: Any, tmp_path: Path) -> None:
    worker = attached(kind, tmp_path)
    old = worker.tensors
    _, places = write(tmp_path, 2, old)
    places.write_bytes(places.read_bytes()[:-1])
    note = worker.tell("stage", token=places.stem, base="v1", label="v2")
    assert (note.state, note.label) == ("failed", "v1")
    worker.tensors = old
    assert worker.is_fresh()
    note = worker.tell("stage", token="0" * 16, base="v1", label="v2")
    assert note.state == "failed"


def test_a_loader_that_fails_leaves_no_label(tmp_path: Path) -> None:
    worker = attached(NewWorker, tmp_path)
    worker.model.load_weights = lambda weights: 1 / 0  # type: ignore[assignment, method-assign]
    (maps,) = (tmp_path / FOLDER_NAME / "maps").iterdir()
    maps.unlink()
    note = worker.tell("attach", label="v9")
    assert (note.state, note.label) == ("failed", "")
    assert "loader failed" in note.error
    assert worker.tell("undo").state == "failed"


def test_another_process_is_told_by_its_notes(tmp_path: Path) -> None:
    boots = set()
    for rank in range(2):
        write(tmp_path, 0)
        worker = NewWorker(tmp_path, rank)
        note = worker.tell("stage", base="v1", label="v2")
        assert note.state == "failed"
        boots.add(note.boot)
    assert len(boots) == 2


def test_notes_that_are_torn_are_none(tmp_path: Path) -> None:
    ranks = tmp_path / FOLDER_NAME / "ranks"
    ranks.mkdir(parents=True)
    assert read_note(tmp_path, 0, "c") is None
    write_note(tmp_path, Note(rank=0, boot="b", call="c", state="done"))
    (path,) = ranks.iterdir()
    good = json.loads(path.read_bytes())
    assert read_note(tmp_path, 0, "c") is not None
    assert read_note(tmp_path, 1, "c") is None
    for data in (b"", b"{", b"[]", b"\xff", json.dumps({**good, "state": "x"}).encode()):
        path.write_bytes(data)
        assert read_note(tmp_path, 0, "c") is None


def test_what_is_not_supported() -> None:
    assert Backend.supports_draft_weight_update is False
    assert Backend.defers_processing is False
    assert Backend.init_info_cls is Backend.update_info_cls is Message
    backend = Backend(None, SimpleNamespace(world_size=1, rank=0))
    with pytest.raises(NotImplementedError):
        backend.set_weight_update_target(None, None)
    backend.drain_pending()
    backend.reset_weight_update_target()
    backend.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_comes_late_is_not_carried_out(kind: Any, tmp_path: Path) -> None:
    worker = attached(kind, tmp_path)
    late = next(NUMBERS)
    old = worker.tensors
    worker.tensors, places = write(tmp_path, 2, old)
    worker.tell("stage", token=places.stem, base="v1", label="v2")
    note = worker.tell("apply", "update", token=places.stem, label="v2", number=late)
    assert (note.state, note.label) == ("failed", "v1")
    worker.tensors = old
    assert worker.is_fresh()
