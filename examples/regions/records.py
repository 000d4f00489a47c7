"""What everybody wrote down, read back: the trainer's record, the samplers' own, the hub's view."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

WATCH_S = 0.5
WATCH_TIMEOUT_S = 5.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON; one that is being written is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def of_kind(lines: Sequence[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """Those of some kinds."""
    return [line for line in lines if line["kind"] in kinds]


@dataclass(frozen=True)
class Stay:
    """A version, served by a sampler from one moment to another."""

    version: int
    digest: str
    start_s: float
    stop_s: float


def stays_of(lines: Sequence[dict[str, Any]], end_s: float) -> list[Stay]:
    """What a sampler served, until it ended or the run did."""
    served = of_kind(lines, "Served")
    stops = [*(line["at_s"] for line in served[1:]), end_s][: len(served)]
    return [
        Stay(line["version"], line["digest"], line["at_s"], max(stop, line["at_s"]))
        for line, stop in zip(served, stops, strict=True)
    ]


@dataclass(frozen=True)
class Age:
    """So many steps behind the trainer's newest version, for so long."""

    steps: int
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.stop_s - self.start_s


def ages_of(stays: Sequence[Stay], commits: Sequence[dict[str, Any]]) -> list[Age]:
    """How old what was served was, from moment to moment, against the trainer's commits."""
    step_of = {commit["version"]: commit["step"] for commit in commits}
    ages = []
    for stay in stays:
        changes = [c["at_s"] for c in commits if stay.start_s < c["at_s"] < stay.stop_s]
        edges = [stay.start_s, *changes, stay.stop_s]
        for start_s, stop_s in pairwise(edges):
            newest = max((c["step"] for c in commits if c["at_s"] <= start_s), default=0)
            ages.append(Age(max(0, newest - step_of.get(stay.version, 0)), start_s, stop_s))
    return ages


def without(ages: Sequence[Age], start_s: float, stop_s: float) -> list[Age]:
    """Outside an interval."""
    kept = []
    for age in ages:
        for low, high in (
            (age.start_s, min(age.stop_s, start_s)),
            (max(age.start_s, stop_s), age.stop_s),
        ):
            if high > low:
                kept.append(Age(age.steps, low, high))
    return kept


def quantile(ages: Sequence[Age], share: float) -> int | None:
    """The staleness that is not exceeded for this share of the time."""
    total_s = sum(age.seconds for age in ages)
    passed_s = 0.0
    for age in sorted(ages, key=lambda age: age.steps):
        passed_s += age.seconds
        if passed_s >= share * total_s:
            return age.steps
    return None


class Watch:
    """Asks the hub twice a second how stale each replica is.

    Args:
        url: The hub's.
        stream: The stream's name there.
        token: A reader's.
    """

    def __init__(self, url: str, stream: str, token: str) -> None:
        self._client = httpx.Client(
            base_url=f"{url}/v1/streams/{stream}",
            headers={"Authorization": f"Bearer {token}"},
            trust_env=False,
            timeout=WATCH_TIMEOUT_S,
        )
        self.seen: list[Seen] = []
        self.failed_count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more."""
        self._is_over.set()
        self._thread.join(2 * WATCH_TIMEOUT_S)
        self._client.close()

    def _run(self) -> None:
        while not self._is_over.wait(WATCH_S):
            try:
                answer = self._client.get("/replicas", params={"limit": 1000}).raise_for_status()
            except httpx.HTTPError:
                self.failed_count += 1
                continue
            now_s = time.time()
            for status in answer.json()["replicas"]:
                beat = status["beat"]
                if beat.get("kind", "replica") == "replica":
                    self.seen.append(
                        Seen(now_s, beat["replica"], status["state"], status["staleness_steps"])
                    )


@dataclass(frozen=True)
class Seen:
    """A replica, as the hub saw it at a moment."""

    at_s: float
    replica: str
    state: str
    staleness_steps: int | None


@dataclass(frozen=True)
class Mark:
    """The counters at a moment: payload by region and route, the kernel's, the bucket's."""

    name: str
    at_s: float
    routes: dict[str, dict[str, dict[str, int]]]
    kernel: dict[str, tuple[int, int] | None]
    requests: dict[str, int]

    def crossed_bytes(self, region: str, *routes: str) -> int:
        """Payload that crossed on some routes, both ways."""
        counts = self.routes[region]
        return sum(
            sum(counts[name].values()) for name in counts if name.partition("-")[0] in routes
        )


@dataclass(frozen=True)
class Fetched:
    """What a reader in a region fetched for comparison.

    Attributes:
        region: Where.
        kind: "full" or "arc_v3".
        versions: Which.
        crossed_bytes: Over the region's link, both ways.
        seconds: For all of them.
        is_right: Whether every byte was what was written.
    """

    region: str
    kind: str
    versions: tuple[int, ...]
    crossed_bytes: int
    seconds: float
    is_right: bool


@dataclass
class Facts:
    """All that is known of a run."""

    made: str
    model: str
    is_small: bool
    command: str
    engines: dict[str, str] = field(default_factory=dict)
    regions: dict[str, str] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    remote: str = ""
    events: list[tuple[float, str]] = field(default_factory=list)
    marks: dict[str, Mark] = field(default_factory=dict)
    trainer: list[dict[str, Any]] = field(default_factory=list)
    samplers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    fetched: list[Fetched] = field(default_factory=list)
    seconds: float = 0.0

    def at(self, what: str) -> float:
        """When something of the plan happened."""
        return next(at_s for at_s, found in self.events if found.startswith(what))

    @property
    def commits(self) -> list[dict[str, Any]]:
        """The versions, by the trainer's record."""
        return sorted(of_kind(self.trainer, "commit"), key=lambda line: line["version"])
