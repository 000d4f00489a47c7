"""What the model repeats of the code is what the code has."""

from __future__ import annotations

from thinwire.capacity import limits, payload, relays, scenario
from thinwire.codec import threads
from thinwire.follow import absence, fetch, leases
from thinwire.hub.replicas import FleetLimits
from thinwire.maintain import upload
from thinwire.relay import blocks, records, sending, upstream
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


def test_constants_of_the_relay() -> None:
    assert relays.SPAN_BYTES == blocks.SPAN_BYTES
    assert relays.SPANS_AT_ONCE == upstream.PARALLEL
    assert relays.FETCHING_BYTES == upstream.FETCHING_BYTES
    assert relays.BLOCKS_BYTES == blocks.MEMORY_BYTES
    assert relays.RECORDS_BYTES == records.MAX_MEMORY_BYTES
    assert relays.SENDING_BYTES == sending.SENDING_BYTES
    assert relays.PIECE_BYTES == sending.PIECE_BYTES
    assert relays.ABSENT_FRESH_S == records.ABSENT_FRESH_S
    assert relays.ABSENT_CHECK_S == absence.ABSENT_CHECK_S


def test_the_wait_of_ranks() -> None:
    text = (object_store.Path(limits.__file__).parents[1] / "torch" / "ranks.py").read_text()
    assert f"_LONGEST_POLL_S = {limits._LONGEST_POLL_S}" in text
