"""Measure delta formats against each other on consecutive checkpoints.

Files: ``tensors`` (checkpoints as words), ``framing`` (the safetensors layout), ``peer`` (what a
row is), ``peers/`` (the formats), ``ours`` (the row of this library), ``bound`` (the
class-conditional entropy), ``corpus`` (finds checkpoints), ``measure`` (times and checks),
``report`` (the result), ``shares`` (rows against the limits), ``table`` and ``plot`` (how it is
shown).
"""

from __future__ import annotations

from thinwire.bench.bound import Bound, class_bound
from thinwire.bench.corpus import find_runs, steady_steps
from thinwire.bench.framing import read_checkpoint
from thinwire.bench.measure import DEFAULT_REPETITION_COUNT, RoundTripError, measure_sequence
from thinwire.bench.ours import load_checkpoint, make_our_row
from thinwire.bench.peer import (
    CheckpointPeer,
    Encoded,
    InPlaceFile,
    InPlacePeer,
    MissingExtraError,
    Peer,
    PerTensor,
    SectionedPeer,
    WholeFile,
)
from thinwire.bench.peers import PEER_NAMES, available_peers, make_peer
from thinwire.bench.plot import check_plot, write_plot
from thinwire.bench.report import OUR_ROW, Report, Row, Speed
from thinwire.bench.shares import Shares, shares_of
from thinwire.bench.table import to_markdown, to_rich
from thinwire.bench.tensors import Checkpoint, Tensor, as_checkpoint, as_tensor

__all__ = [
    "DEFAULT_REPETITION_COUNT",
    "OUR_ROW",
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
    "SectionedPeer",
    "Shares",
    "Speed",
    "Tensor",
    "WholeFile",
    "as_checkpoint",
    "as_tensor",
    "available_peers",
    "check_plot",
    "class_bound",
    "find_runs",
    "load_checkpoint",
    "make_our_row",
    "make_peer",
    "measure_sequence",
    "read_checkpoint",
    "shares_of",
    "steady_steps",
    "to_markdown",
    "to_rich",
    "write_plot",
]
