"""What the model repeats of the code is what the code has."""

from __future__ import annotations

from thinwire.capacity import limits, payload, scenario
from thinwire.codec import threads
from thinwire.follow import fetch, leases
from thinwire.hub.replicas import FleetLimits
from thinwire.maintain import upload
from thinwire.store import object_store
from thinwire.stream.records import LEASE_TTL_S


def test_constants() -> None:
    assert payload.RANGE_BYTES == fetch._RANGE_BYTES
    assert payload.FETCHES_AT_ONCE == fetch._PARALLEL
    assert payload.PART_BYTES == object_store._PART_BYTES
    assert payload.MAX_PARTS == object_store._MAX_PARTS
    assert payload.PARTS_AT_ONCE == object_store._PARTS_AT_ONCE
    assert payload.FILES_AT_ONCE == upload._PARALLEL
    assert FleetLimits().replicas == limits.HUB_REPLICAS
    assert leases._EVERY_S == LEASE_TTL_S / 3
    assert scenario.MAX_DECODE_THREADS == threads.MAX_DEFAULT_WORKERS


def test_the_wait_of_ranks() -> None:
    text = (object_store.Path(limits.__file__).parents[1] / "torch" / "ranks.py").read_text()
    assert f"_LONGEST_POLL_S = {limits._LONGEST_POLL_S}" in text
