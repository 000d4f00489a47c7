"""A bucket, a clock and a server for tests of hot loading."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from thinwire.interop.hot_load_calls import Clock
from thinwire.testing.hot_load_fleet import Fleet, Snapshot
from thinwire.testing.hot_load_server import HotLoadServer

WORDS = 1000


class Ticking:
    """A clock that moves only where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.on_sleep: list[Any] = []

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.slept.append(wait_s)
        if self.on_sleep:
            self.on_sleep.pop(0)()

    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, self.sleep)


class Bucket:
    """A folder with snapshots in a format of this test's own, and how a replica loads one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, identity: str, new: np.ndarray, base: np.ndarray | None = None) -> None:
        words = new if base is None else new ^ base
        (self.folder / identity).mkdir()
        (self.folder / identity / "w.bin").write_bytes(zlib.compress(words.tobytes()))

    def load(self, snapshot: Snapshot, held: Any) -> np.ndarray:
        data = zlib.decompress((self.folder / snapshot.identity / "w.bin").read_bytes())
        words = np.frombuffer(data, np.uint16)
        return words if snapshot.base is None else words ^ held


def some_weights(seed: int) -> np.ndarray:
    """Words with every kind of number in them, NaNs with payloads too."""
    return np.random.default_rng(seed).integers(0, 1 << 16, WORDS, dtype=np.uint16)


def json_with(*keys: str) -> st.SearchStrategy[Any]:
    """Any JSON, with these keys in it more often than others."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(1 << 70), 1 << 70)
        | st.floats()
        | st.text(max_size=9)
        | st.sampled_from(["v1", "error", "loaded", "READY"])
    )
    names = st.sampled_from(keys) | st.text(max_size=3)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
        max_leaves=25,
    )


def renew(server: HotLoadServer, bucket: Bucket, **options: Any) -> HotLoadServer:
    """A server as new, without stopping it, which takes a moment."""
    vars(server).update(vars(HotLoadServer(Fleet(["a", "b", "c"], bucket.load), **options)))
    return server


def loaded(server: HotLoadServer, name: str = "a") -> bytes:
    return bytes(server.fleet.replicas[name].held.tobytes())
