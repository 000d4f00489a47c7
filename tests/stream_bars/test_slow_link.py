"""100 Mbit/s and 50 ms, in virtual time: what a version costs beside its bytes."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest

from thinwire import Follower, Publisher, open_stream
from thinwire.store import ThrottledStore, open_store
from thinwire.store.clock import VirtualClock

BITS_PER_S = 100e6
LATENCY_S = 0.050


@pytest.mark.parametrize("words", [50_000, 4_000_000])
def test_a_version_takes_its_bytes_and_five_round_trips(tmp_path: Path, words: int) -> None:
    url = f"memory://{secrets.token_hex(8)}"
    rng = np.random.default_rng(4)
    weights = rng.integers(0, 1 << 16, words, np.uint16)
    clock = VirtualClock()
    slow = open_stream(
        ThrottledStore(open_store(url), bits_per_s=BITS_PER_S, latency_s=LATENCY_S, clock=clock)
    )
    with (
        Publisher(open_stream(url), tmp_path / "base", maintain=False) as publisher,
        Follower(slow, tmp_path / "f", lease=False) as follower,
    ):
        publisher.publish({"w": weights})
        follower.catch_up()
        for _ in range(3):
            chosen = rng.random(words) < 0.2
            weights[chosen] = rng.integers(0, 1 << 16, int(chosen.sum()), np.uint16)
            version = publisher.publish({"w": weights})
            start_s = clock.now()
            assert follower.catch_up().version == version.version
            spent_s = clock.now() - start_s
            payload_s = version.payload_bytes * 8 / BITS_PER_S
            assert spent_s <= 1.2 * payload_s + 5 * LATENCY_S
            assert spent_s >= payload_s  # the link was in use
