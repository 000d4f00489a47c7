"""A relay's counts in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.relay.sending import Budget

if TYPE_CHECKING:
    from thinwire.relay.relay import StreamRelay


def metrics_text(relays: Sequence[StreamRelay], budget: Budget) -> str:
    """All metrics of all streams."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, values: Sequence[tuple[str, float]]) -> None:
        lines.append(f"# HELP thinwire_relay_{name} {text}")
        lines.append(f"# TYPE thinwire_relay_{name} {kind}")
        for stream, value in values:
            label = f'{{stream="{stream}"}}' if stream else ""
            lines.append(f"thinwire_relay_{name}{label} {value:.17g}")

    for name, kind, text, value_of in _OF_STREAMS:
        family(name, kind, text, [(relay.name, float(value_of(relay))) for relay in relays])
    files = relays[0].shelf.files
    family("cache_bytes", "gauge", "Bytes of blocks on disk.", [("", files.total_bytes)])
    family("cache_limit_bytes", "gauge", "What they may take.", [("", files.limit_bytes)])
    family("cache_blocks", "gauge", "Blocks on disk.", [("", len(files))])
    family("cache_evicted_total", "counter", "Blocks that had to go.", [("", files.evicted_count)])
    family("cache_failing", "gauge", "1: the disk takes nothing.", [("", files.is_failing)])
    family("sending_bytes", "gauge", "Blocks being sent.", [("", budget.used_bytes)])
    family("dropped_total", "counter", "Slow readers sent away.", [("", budget.dropped_count)])
    return "\n".join(lines) + "\n"


_OF_STREAMS = (
    (
        "upstream_bytes_total",
        "counter",
        "Bytes fetched from the store.",
        lambda relay: relay.upstream.fetched_bytes,
    ),
    (
        "upstream_requests_total",
        "counter",
        "Requests to the store.",
        lambda relay: relay.upstream.request_count,
    ),
    (
        "upstream_up",
        "gauge",
        "1: the store answers.",
        lambda relay: relay.upstream.away_s is None,
    ),
    (
        "upstream_away_seconds",
        "gauge",
        "For how long the store has not answered.",
        lambda relay: relay.upstream.away_s or 0.0,
    ),
    ("served_bytes_total", "counter", "Bytes sent to followers.", lambda r: r.served_bytes),
    ("requests_total", "counter", "Requests of followers.", lambda r: r.request_count),
    (
        "asked_bytes_total",
        "counter",
        "Bytes of blocks that followers asked for.",
        lambda relay: relay.blocks.asked_bytes,
    ),
    (
        "missing_bytes_total",
        "counter",
        "Bytes of blocks that were not held, and were fetched.",
        lambda relay: relay.blocks.fetched_bytes,
    ),
    (
        "wrong_blocks_total",
        "counter",
        "Blocks of the store that were not what they must be.",
        lambda relay: relay.blocks.wrong_count,
    ),
    ("leases", "gauge", "Followers that said what they need.", lambda r: len(r.needs)),
    (
        "version",
        "gauge",
        "The newest version seen.",
        lambda relay: relay.watch.head.version if relay.watch.head else 0,
    ),
)
