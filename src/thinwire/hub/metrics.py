"""The hub as Prometheus sees it: by stream and region, never by replica."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from thinwire.hub.board import Board
from thinwire.report.messages import RegionStatus

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATES = ("ready", "updating", "joining", "unready", "lost")
_QUANTILES = {
    "0.5": "staleness_steps_p50",
    "0.95": "staleness_steps_p95",
    "1": "staleness_steps_max",
}


class HubMetrics:
    """Counts answers, and reads boards when it is asked.

    Args:
        boards: The streams by name.
    """

    def __init__(self, boards: Mapping[str, Board]) -> None:
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Readings(boards, self._answers))

    def count(self, path: str, method: str, status: int) -> None:
        """Count an answer."""
        self._answers[path, method, str(status)] += 1

    def text(self) -> bytes:
        """All of it, as it goes over the wire."""
        return generate_latest(self._registry)


class _Readings(Collector):
    """Reads everything when it is asked."""

    def __init__(
        self, boards: Mapping[str, Board], answers: Mapping[tuple[str, str, str], int]
    ) -> None:
        self._boards = boards
        self._answers = answers

    def collect(self) -> Iterator[Any]:
        """All metrics."""
        families = _Families()
        for (route, method, status), count in self._answers.items():
            labels = {"route": route, "method": method, "status": status}
            families.counter("requests", "Answers, by path, method and status.", labels, count)
        for name, board in sorted(self._boards.items()):
            _add_stream(families, name, board)
        yield from families.found.values()


class _Families:
    """Metrics by name, made when the first value comes."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def gauge(self, name: str, about: str, labels: Mapping[str, str], value: float | None) -> None:
        """Add a value; None: there is none."""
        if value is not None:
            self._add(GaugeMetricFamily, name, about, labels, value)

    def counter(self, name: str, about: str, labels: Mapping[str, str], value: float) -> None:
        """Add a value that only rises."""
        self._add(CounterMetricFamily, name, about, labels, value)

    def _add(
        self, kind: Any, name: str, about: str, labels: Mapping[str, str], value: float
    ) -> None:
        name = f"thinwire_hub_{name}"
        if name not in self.found:
            self.found[name] = kind(name, about, labels=list(labels))
        self.found[name].add_metric(list(labels.values()), value)


def _add_stream(families: _Families, name: str, board: Board) -> None:
    status = board.status()
    labels = {"stream": name}
    head = status.head
    if head is not None:
        families.gauge("head_version", "The newest version.", labels, head.version)
        families.gauge("head_step", "The trainer's step of it.", labels, head.step)
        age_s = max(0.0, time.time() - head.created_ms / 1000)
        families.gauge("head_age_seconds", "Since it was published.", labels, age_s)
    families.gauge(
        "looked_age_seconds",
        "Since the stream was last read with success; missing: it never was.",
        labels,
        status.looked_s,
    )
    families.gauge("fault", "1: the stream cannot be read.", labels, int(status.fault is not None))
    for code, count in board.look_failures.copy().items():
        families.counter(
            "look_failures", "Looks that failed, by code.", labels | {"code": code}, count
        )
    for kind, count in (
        ("events", board.fanout.listening_count),
        ("wait", board.fanout.waiting_count),
    ):
        families.gauge("listeners", "Who waits for versions.", labels | {"kind": kind}, count)
    for region in status.regions:
        _add_region(families, labels | {"region": region.region}, region)


def _add_region(families: _Families, labels: Mapping[str, str], region: RegionStatus) -> None:
    for state in _STATES:
        families.gauge(
            "replicas",
            "Replicas, by state.",
            {**labels, "state": state},
            getattr(region.counts, state),
        )
    families.gauge("relays", "Relays that were heard of lately.", labels, region.relay_count)
    for quantile, field in _QUANTILES.items():
        families.gauge(
            "staleness_steps",
            "Steps behind the head, of replicas that are not lost.",
            {**labels, "quantile": quantile},
            getattr(region, field),
        )
    families.gauge(
        "staleness_seconds_max",
        "Since the first version that a replica lacks was published, the longest.",
        labels,
        region.staleness_s_max,
    )
    families.gauge(
        "fetched_bytes", "Taken from outside since they started.", labels, region.fetched_bytes
    )
    families.gauge("served_bytes", "Given by relays.", labels, region.served_bytes)
