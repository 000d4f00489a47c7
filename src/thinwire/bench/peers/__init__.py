"""The formats that thinwire is measured against, one file per family.

Each is written from its published layout, except ARC, which is the real package where that is
installed: where it is not, thinwire.interop writes the same format, no larger and several times as
fast. All compare bits, also where the real system compares floats and so loses -0.0: a row that
loses bits is no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.bench.peer import CheckpointPeer, MissingExtraError, PerTensor
from thinwire.bench.peers.arc import Arc, OwnArc, make_arc
from thinwire.bench.peers.pulse import Pulse
from thinwire.bench.peers.trl import trl_gap_delta, trl_raw
from thinwire.bench.peers.xor_zstd import XorZstd
from thinwire.errors import InvalidArgument

_MAKERS: dict[str, Callable[[], CheckpointPeer]] = {
    "arc_v1": lambda: PerTensor(make_arc("arc_v1")),
    "arc_v2": lambda: PerTensor(make_arc("arc_v2")),
    "arc_v3": lambda: PerTensor(make_arc("arc_v3")),
    "xor_zstd1": lambda: PerTensor(XorZstd()),
    "pulse": Pulse,
    "trl_raw": trl_raw,
    "trl_gap_delta": trl_gap_delta,
}

PEER_NAMES = tuple(_MAKERS)
"""All rows that this room can make, in table order."""


def make_peer(name: str) -> CheckpointPeer:
    """One row by its name.

    Raises InvalidArgument for an unknown name, MissingExtraError where its package is not
    installed.
    """
    if name not in _MAKERS:
        raise InvalidArgument(f"no peer {name!r}; there are {', '.join(PEER_NAMES)}")
    return _MAKERS[name]()


def available_peers(
    names: Sequence[str] = PEER_NAMES,
) -> tuple[list[CheckpointPeer], dict[str, str]]:
    """The rows of these names that this installation can make, for the others the reason why not.

    Raises InvalidArgument for an unknown name.
    """
    peers: list[CheckpointPeer] = []
    skipped: dict[str, str] = {}
    for name in names:
        try:
            peers.append(make_peer(name))
        except MissingExtraError as error:
            skipped[name] = str(error)
    return peers, skipped


__all__ = [
    "PEER_NAMES",
    "Arc",
    "OwnArc",
    "Pulse",
    "XorZstd",
    "available_peers",
    "make_arc",
    "make_peer",
    "trl_gap_delta",
    "trl_raw",
]
