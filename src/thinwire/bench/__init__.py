"""Measure delta formats against each other on consecutive checkpoints.

Files: ``tensors`` (checkpoints as words), ``framing`` (the safetensors layout), ``peer`` (what a
row is), ``peers/`` (the formats), ``bound`` (the class-conditional entropy), ``measure`` (times and
checks), ``report`` (the result), ``table`` and ``plot`` (how it is shown).
"""

from __future__ import annotations

from thinwire.bench.bound import Bound, class_bound
from thinwire.bench.framing import read_checkpoint
from thinwire.bench.measure import DEFAULT_REPETITION_COUNT, RoundTripError, measure_sequence
from thinwire.bench.peer import (
    CheckpointPeer,
    Encoded,
    InPlaceFile,
    InPlacePeer,
    MissingExtraError,
    Peer,
    PerTensor,
    WholeFile,
)
from thinwire.bench.peers import PEER_NAMES, available_peers, make_peer
from thinwire.bench.plot import write_plot
from thinwire.bench.report import Report, Row, Speed
from thinwire.bench.table import to_markdown, to_rich
from thinwire.bench.tensors import Checkpoint, Tensor, as_checkpoint, as_tensor

__all__ = [
    "DEFAULT_REPETITION_COUNT",
    "PEER_NAMES",
    "Bound",
    "Checkpoint",
    "CheckpointPeer",
    "Encoded",
    "InPlaceFile",
    "InPlacePeer",
    "MissingExtraError",
    "Peer",
    "PerTensor",
    "Report",
    "RoundTripError",
    "Row",
    "Speed",
    "Tensor",
    "WholeFile",
    "as_checkpoint",
    "as_tensor",
    "available_peers",
    "class_bound",
    "make_peer",
    "measure_sequence",
    "read_checkpoint",
    "to_markdown",
    "to_rich",
    "write_plot",
]
