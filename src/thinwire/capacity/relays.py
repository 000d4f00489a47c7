"""What a relay does with a version: how it fetches, how fast it sends, what it holds meanwhile."""

from __future__ import annotations

from thinwire.capacity.payload import Objects, fetches_at_once, windowed
from thinwire.capacity.scenario import Scenario
from thinwire.stream.blocks import block_bytes_for

# As relay/blocks.py, upstream.py, records.py and sending.py, and follow/absence.py have them;
# tests/capacity/test_constants.py compares.
SPAN_BYTES = 2 << 20
SPANS_AT_ONCE = 16
FETCHING_BYTES = 96 << 20
BLOCKS_BYTES = 64 << 20
RECORDS_BYTES = 32 << 20
SENDING_BYTES = 256 << 20
PIECE_BYTES = 64 << 10
ABSENT_FRESH_S = 0.2
# So often a follower looks itself whether what its relay says is missing is missing.
ABSENT_CHECK_S = 60.0


def readers_of(scenario: Scenario) -> int:
    """Replicas of the fullest relay."""
    return -(-scenario.replicas_per_region // scenario.relays)


def span_bytes(size: int) -> int:
    """Bytes of what a relay asks for at once of an object: whole blocks."""
    block = block_bytes_for(size)
    return min(size, max(1, SPAN_BYTES // block) * block)


def span_count(objects: Objects) -> int:
    """Requests by which a relay fetches some objects."""
    return objects.count * -(-objects.size // span_bytes(objects.size))


def fetched_per_s(scenario: Scenario, objects: Objects) -> float:
    """Bytes a second that a relay fetches at most, by what it has on its way at a time."""
    span = span_bytes(objects.size)
    at_once = min(SPANS_AT_ONCE, max(1, FETCHING_BYTES // span))
    return windowed(scenario.link_bits_per_s / 8, at_once, span, scenario.rtt_s)


def sent_per_s(scenario: Scenario) -> tuple[float, str]:
    """Bytes a second that a relay sends at most, and by what."""
    network = scenario.local_bits_per_s / 8
    if scenario.relay_bytes_per_s < network:
        return scenario.relay_bytes_per_s, "a relay's process"
    return network, "a relay's network"


def memory_bytes(scenario: Scenario, objects: Objects) -> int:
    """Bytes of memory that a relay lets itself hold, beside the interpreter."""
    streams = fetches_at_once(objects.size, scenario.memory_limit_bytes)
    # A reader that takes nothing has a piece, and another in its connection's buffer.
    pieces = readers_of(scenario) * streams * 2 * PIECE_BYTES
    return BLOCKS_BYTES + RECORDS_BYTES + FETCHING_BYTES + SENDING_BYTES + pieces
