"""What the ranks of a job run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ranks.measuring import watched_publish
from ranks.models import Placed, Stages, Trained
from ranks.weights import Dealt
from ranks.worker import Rank
from thinwire import open_stream
from thinwire.errors import ThinwireError
from thinwire.testing import FaultStore, Rates
from thinwire.torch import Ticket, TorchPublisher


def train(rank: Rank) -> None:
    """Train, publish every step, and write down what torch itself gathers of it.

    Options: layout, url, first, last, load, save, and what the publisher is told.
    """
    options = rank.options
    path = options.get("load")
    loaded = torch.load(path) if path else None
    trained = Trained(options["layout"], rank.size, options.get("seed", 0), loaded)
    with _publisher(rank, trained.model) as publisher:
        rank.say("open", baseline_bytes=publisher.baseline_bytes, tied=dict(publisher.tied))
        for step in range(options["first"], options["last"] + 1):
            trained.step(step)
            _publish_and_gather(rank, publisher, trained, step)
    if options.get("save"):
        weights = trained.gathered()
        if rank.rank == 0:
            torch.save(weights, options["save"])


def change(rank: Rank) -> None:
    """The same, of tensors that nobody trains: "stages" of a pipeline, or "placed" in all ways."""
    seed = rank.options.get("seed", 0)
    is_stages = rank.options["layout"] == "stages"
    model = Stages(rank.rank, rank.size, seed) if is_stages else Placed(rank.size, seed)
    with _publisher(rank, model.state) as publisher:
        rank.say("open", baseline_bytes=publisher.baseline_bytes)
        for step in range(rank.options["first"], rank.options["last"] + 1):
            model.step(step)
            _publish_and_gather(rank, publisher, model, step)


def adapters(rank: Rank) -> None:
    """Publish adapters to one stream, and what they are attached to to another."""
    options = rank.options
    trained = Trained("lora", rank.size, options.get("seed", 0))
    names = ["lora_*"]
    with (
        _publisher(rank, trained.model, url=options["base_url"], exclude=names) as base,
        _publisher(rank, trained.model, include=names) as publisher,
    ):
        base.publish(0).wait()
        for step in range(options["first"], options["last"] + 1):
            trained.step(step)
            _publish_and_gather(rank, publisher, trained, step)
        base.publish(options["last"]).wait()


def deal(rank: Rank) -> None:
    """Publish the known weights of step after step, and write down what became of each.

    Options: url, first, last, seed, deadline_s, and
    by_leave: each step waits for the test's leave;
    until_errors: end after so many errors;
    ahead: steps that are not waited for before the next one;
    fails: rank, step, operation, fault: how this rank's store fails during that step, or once;
    hold: rank, step: until the test releases it, an upload of that rank takes;
    misfits: rank, step: there the model changes its shape for once.
    """
    options = rank.options
    dealt = Dealt(rank.size, options["seed"])
    hold = options.get("hold") or {}
    fails, misfits = (options.get(name) or [] for name in ("fails", "misfits"))
    now, failures = -1, 0
    fail: dict[str, Any] = {}

    def is_here(where: dict[str, Any]) -> bool:
        return where.get("rank") == rank.rank and where.get("step") == now

    def hook(when: str, operation: str, key: str) -> None:
        if operation == "put_file" and when == "before" and is_here(hold):
            rank.say("held", step=now)
            rank.await_release()
        if operation == fail.get("operation") and when == "after" and fail.get("once"):
            store.set_rates({})

    stream = open_stream(options["url"])
    stream.store = store = FaultStore(stream.store, random.Random(0), hook=hook)
    pending: list[Ticket] = []
    try:
        publisher = _publisher(rank, dealt.state, url=stream)
    except ThinwireError as error:
        _say_error(rank, None, error)
        return
    with publisher:
        rank.say("open", version=publisher.head.version if publisher.head else 0)
        for step in range(options["first"], options["last"] + 1):
            if options.get("by_leave"):
                rank.await_leave(step)
            is_ahead = step in options.get("ahead", ())
            if not is_ahead:
                _say_ends(rank, pending)
            now = step
            fail = next(filter(is_here, fails), {})
            store.set_rates({fail["operation"]: Rates(**{fail["fault"]: 1.0})} if fail else {})
            dealt.go_to(step, shape_change=any(map(is_here, misfits)))
            rank.say("begin", step=step)
            try:
                ticket = publisher.publish(step, metadata={"seed": options["seed"]})
                rank.say("captured", step=step)
                pending.append(ticket)
                ended = [pending.pop()] if ticket.is_done else [] if is_ahead else pending
                has_failed = not _say_ends(rank, ended)
            except ThinwireError as error:
                _say_error(rank, step, error)
                has_failed = True
            failures += has_failed
            if failures == options.get("until_errors"):
                return
        _say_ends(rank, pending)


def measure(rank: Rank) -> None:
    """What one publish of a sharded model takes of memory."""
    watched_publish(rank)


PROGRAMS: Mapping[str, Callable[[Rank], None]] = {
    program.__name__: program for program in (train, change, adapters, deal, measure)
}


def _publisher(rank: Rank, model: Any, **changed: Any) -> TorchPublisher:
    options = rank.options
    known: dict[str, Any] = {
        "url": options["url"],
        "folder": rank.scratch,
        "when_busy": options.get("when_busy", "block"),
        "deadline_s": options.get("deadline_s", 20.0),
        "baseline": options.get("baseline", "memory"),
        "maintain": options.get("maintain", False),
        **changed,
    }
    return TorchPublisher(model, known.pop("url"), **known)


def _publish_and_gather(rank: Rank, publisher: TorchPublisher, model: Any, step: int) -> None:
    ticket = publisher.publish(step)
    # While the version is on its way: the weights are captured, training may go on.
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.gathered().items()
        if fnmatchcase(name, rank.options.get("only", "*"))
    }
    # A stage gathers only its own: both halves write down theirs.
    if rank.rank == 0 or (isinstance(model, Stages) and rank.rank == rank.size // 2):
        save_file(tensors, rank.folder / f"step{step}.{rank.rank}.safetensors")
    version = ticket.wait()
    assert version is not None
    assert version.step == step
    rank.say(
        "committed",
        step=step,
        version=version.version,
        changed_count=ticket.changed_count,
        version_changed_count=version.changed_count,
    )
    if rank.size > 1:
        dist.barrier()


def _say_ends(rank: Rank, pending: list[Ticket]) -> bool:
    """Tell what becomes of all that is on its way; whether it all went well."""
    is_well = True
    while pending:
        ticket = pending.pop(0)
        try:
            version = ticket.wait()
        except ThinwireError as error:
            _say_error(rank, ticket.step, error)
            is_well = False
        else:
            what = "skipped" if version is None else "committed"
            rank.say(what, step=ticket.step, version=version and version.version)
    return is_well


def _say_error(rank: Rank, step: int | None, error: ThinwireError) -> None:
    rank.say("error", step=step, code=error.code, message=str(error))
