"""ThinwireWeightTransfer, driven as TRL drives it."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed: TRL's weight transfer was NOT tested"
)

import torch

from thinwire.errors import Deadline, InvalidArgument, StoreError, ThinwireError
from thinwire.follow import open_stream
from thinwire.store import open_store
from thinwire.stream.version import Version

from .making import Outage, bits, rebuilt, rounded, tiny_model


def transfer(url: Any, **options: Any) -> Any:
    from thinwire.engines.trl import ThinwireWeightTransfer

    return ThinwireWeightTransfer(url, **options)


def nudge(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::7] *= 1.01


def sync(sender: Any, model: torch.nn.Module) -> None:
    """One sync, as the trainer's main process makes it."""
    sender.pause()
    sender.send_weights((name, tensor.detach()) for name, tensor in model.named_parameters())
    sender.resume()


def test_every_sync_is_a_version(tmp_path: Path) -> None:
    url, model, sent = (tmp_path / "store").as_uri(), tiny_model(), []
    sender = transfer(url)
    sender.init_weight_transfer()
    for _ in range(4):
        sync(sender, model)
        sent.append(rounded(model))
        # Committed once resume() returns: TRL takes samples for this version's from now on.
        assert sender.head.version == len(sent)
        nudge(model)
    sender.destroy()
    found = rebuilt(url, tmp_path / "live")
    assert [bits(tensors) for _, tensors in found] == [bits(tensors) for tensors in sent]
    assert [version.step for version, _ in found] == [0, 1, 2, 3]
    assert [version.metadata["sync"] for version, _ in found] == [1, 2, 3, 4]


def test_each_tensor_may_go_before_the_next_is_drawn(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            assert sum(ref() is not None for ref in alive) <= 1
            full = torch.full((1000,), float(number))
            alive.append(weakref.ref(full))
            yield f"layer.{number}", full
            del full

    url = (tmp_path / "store").as_uri()
    sender = transfer(url)
    for _ in range(2):
        alive.clear()
        sender.send_weights(gathered())
        sender.resume()
    sender.destroy()
    ((_, tensors), _) = rebuilt(url, tmp_path / "live")
    assert tensors["layer.7"].tolist() == [7.0] * 1000


def test_samplers_are_waited_for_in_resume_only(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    asked: list[int] = []

    def serving(version: Version) -> None:
        assert [found.version for found, _ in rebuilt(url, tmp_path / "live")][
            -1
        ] == version.version
        asked.append(version.version)

    sender = transfer(url, serving=serving, step=lambda: 40)
    sender.send_weights(iter(rounded(model).items()))
    assert asked == []
    sender.resume()
    assert asked == [1]
    sender.destroy()
    assert rebuilt(url, tmp_path / "live")[0][0].step == 40


def test_the_iterator_is_drawn_to_its_end_whatever_happens(tmp_path: Path) -> None:
    """Its items are collectives: the other ranks would wait for the rest of them."""
    model, drawn = tiny_model(), []

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        yield "strange", torch.zeros(3, dtype=torch.complex128)
        for name, tensor in model.named_parameters():
            drawn.append(name)
            yield name, tensor

    sender = transfer((tmp_path / "store").as_uri())
    with pytest.raises(ThinwireError, match="strange"):
        sender.send_weights(items())
    assert drawn == [name for name, _ in model.named_parameters()]
    sender.destroy()


def test_an_iterator_that_fails_leaves_the_stream_as_it_was(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    sender = transfer(url)
    sync(sender, model)
    nudge(model)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.named_parameters())[:3]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        sender.send_weights(broken())
    sync(sender, model)
    sender.destroy()
    found = rebuilt(url, tmp_path / "live")
    assert len(found) == 2
    assert bits(found[1][1]) == bits(rounded(model))


def test_a_failed_version_is_raised_in_resume_and_loses_nothing(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    store = Outage(open_store(url))
    sender = transfer(open_stream(store, retry_s=0.0), maintain=False)
    sync(sender, model)
    nudge(model)
    store.is_down = True
    with pytest.raises(StoreError):
        sync(sender, model)
    store.is_down = False
    nudge(model)
    sync(sender, model)
    sender.destroy()
    found = rebuilt(url, tmp_path / "live")
    assert len(found) == 2
    assert bits(found[1][1]) == bits(rounded(model))


class Slow(Outage):
    """A store that takes uploads only once it may."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.may_go = threading.Event()
        self.may_go.set()

    def _check(self, key: str) -> None:
        super()._check(key)
        assert self.may_go.wait(60)


def test_with_overlap_nobody_waits_for_the_upload(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    store = Slow(open_store(url))
    sender = transfer(open_stream(store), maintain=False, overlap=True)
    store.may_go.clear()
    sync(sender, model)
    assert sender.head is None
    store.may_go.set()
    nudge(model)
    sync(sender, model)
    sender.destroy()
    found = rebuilt(url, tmp_path / "live")
    assert len(found) == 2
    assert bits(found[1][1]) == bits(rounded(model))


def test_with_overlap_failures_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Outage(open_store((tmp_path / "store").as_uri()))
    caplog.set_level(logging.WARNING, "thinwire.engines.trl")
    sender = transfer(open_stream(store, retry_s=0.0), maintain=False, overlap=True)
    store.is_down = True
    sync(sender, tiny_model())
    sender.destroy()
    assert "step 0 were not published" in caplog.text


def test_a_version_that_does_not_come_is_a_deadline(tmp_path: Path) -> None:
    store = Slow(open_store((tmp_path / "store").as_uri()))
    sender = transfer(open_stream(store), maintain=False, timeout_s=0.1)
    store.may_go.clear()
    with pytest.raises(Deadline):
        sync(sender, tiny_model())
    store.may_go.set()
    sender.destroy()


def test_destroy_comes_without_a_beginning_and_twice(tmp_path: Path) -> None:
    sender = transfer((tmp_path / "store").as_uri())
    sender.destroy()
    sender.destroy()
    sync(sender, tiny_model())
    sender.destroy()
    # A trainer that trains again goes on without init_weight_transfer.
    sync(sender, tiny_model(1))
    sender.destroy()
    assert len(rebuilt((tmp_path / "store").as_uri(), tmp_path / "live")) == 2


def test_a_dtype_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    value = torch.tensor([1.0000001, 2.0])
    sender = transfer(url, dtypes={"exact.*": None})
    sender.send_weights(iter([("exact.w", value), ("w", value)]))
    sender.resume()
    sender.destroy()
    ((_, tensors),) = rebuilt(url, tmp_path / "live")
    assert bits(tensors) == bits({"exact.w": value, "w": value.bfloat16()})


@pytest.mark.parametrize("name", ["model", "group", "when_busy"])
def test_what_trl_decides_is_not_an_option(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        transfer("memory://x", **{name: None})


def test_it_is_what_trl_asks_for() -> None:
    trl = pytest.importorskip(
        "trl.experimental.async_grpo.async_grpo_trainer",
        reason="trl is not installed: the protocol was NOT compared with TRL's",
    )
    from thinwire.engines.trl import ThinwireWeightTransfer

    protocol = trl.WeightTransferProtocol
    wanted = {
        name: list(inspect.signature(method).parameters)
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"} <= wanted.keys()
    for name, parameters in wanted.items():
        method = getattr(ThinwireWeightTransfer, name)
        assert list(inspect.signature(method).parameters) == parameters
