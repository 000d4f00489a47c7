"""What the ranks' notes say: whether all of them did what they were told, and what they found."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.checkpoint import Checkpoint
from thinwire.engines.vllm.messages import Note
from thinwire.errors import EngineDetached, EngineError, TensorMismatch

_LOG = logging.getLogger("thinwire")

_DETACHED = (EngineDetached.code, TensorMismatch.code)


class NoModel(EngineError):
    """A release before 0.26, in which the backend meets the model only inside an update."""


def check_notes(
    notes: Sequence[Note], message: Mapping[str, Any], boots: Mapping[int, str]
) -> None:
    """Make sure that every rank did what a message told.

    Args:
        notes: The answers of all ranks.
        message: What they were told.
        boots: Of each rank that was attached, which start of its process that was; empty: they
            are not asked after.

    Raises:
        NoModel: They cannot yet.
        EngineDetached: One is not attached, was started again, or holds something else.
        EngineError: One failed.
    """
    do = message["do"]
    wanted = {"attach": message["label"], "apply": message["label"], "undo": message["base"]}
    if any(note.state == "no-model" for note in notes):
        raise NoModel("vLLM has not told the backend its model yet")
    for note in notes:
        if note.state == "failed":
            kind = EngineDetached if note.code in _DETACHED else EngineError
            raise kind(
                f"rank {note.rank} could not {do}: {note.error}",
                hint=note.hint or "Look into vLLM's log",
                rank=note.rank,
            )
        if boots and boots.get(note.rank) != note.boot:
            raise EngineDetached(f"rank {note.rank} was started again", rank=note.rank)
        if wanted.get(do) and note.label != wanted[do]:
            raise EngineError(
                f"rank {note.rank} holds {note.label or 'no known version'} after {do}, not "
                f"{wanted[do]}",
                rank=note.rank,
            )


def log_attached(notes: Sequence[Note]) -> None:
    """Say what each rank found out when it was attached."""
    for note in notes:
        found = note.facts
        _LOG.info(
            "rank %d attached in %.2f s: way %s, %d runs, %d bytes, cached %s",
            *(note.rank, note.seconds, found.way, found.run_count, found.map_bytes),
            found.is_cached,
        )
        if found.reason:
            _LOG.warning("rank %d has no index map: %s", note.rank, found.reason)
        for name, why in found.refused.items():
            _LOG.warning("rank %d: parameter %s is not placed: %s", note.rank, name, why)
        if found.unseen:
            _LOG.warning(
                "rank %d: %d elements of the model cannot be compared", note.rank, found.unseen
            )


def log_unheld(notes: Sequence[Note], copy: Checkpoint) -> None:
    """Say which elements no rank holds: an engine may drop some, but nobody should wonder.

    Args:
        notes: Those of the ranks of one data-parallel replica, each of which holds the model.
        copy: The host's copy.
    """
    parts = [note.facts.held for note in notes]
    for name in sorted(set().union(*parts) & copy.tensors.keys()):
        count = math.prod(copy.tensors[name].shape)
        held = sum(part.get(name, count) for part in parts)
        if held < count:
            _LOG.warning("of %s, the engine holds %d of %d elements", name, held, count)
