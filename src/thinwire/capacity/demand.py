"""What a version, and a day, ask of the bucket, of memory and of disks; and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.capacity import facts, relays, tables
from thinwire.capacity.history import History
from thinwire.capacity.payload import Payload
from thinwire.capacity.scenario import Scenario
from thinwire.capacity.timing import log_bytes_of, looks_between
from thinwire.publish.units import CONTAINER_RAW_BYTES
from thinwire.store.wrappers import PAGE
from thinwire.stream.polling import MAX_WAIT_S
from thinwire.stream.records import LEASE_TTL_S
from thinwire.stream.routes import plan_route, route_bytes

DAY_S = 86_400
MONTH_DAYS = 30
GB = 1e9
# What `thinwire maintain --watch` waits between rounds, and a round that finds nothing to do asks:
# tests/stream_format/test_requests.py counts them.
ROUND_S = 10.0
ROUND_GETS = 9


@dataclass(frozen=True)
class Requests:
    """Requests at the bucket.

    Attributes:
        put: Writes, parts of large ones and creations included.
        get: Reads, those that find nothing included.
        list: Pages of listings.
    """

    put: float = 0.0
    get: float = 0.0
    list: float = 0.0

    def __add__(self, other: Requests) -> Requests:
        """Both together."""
        return Requests(self.put + other.put, self.get + other.get, self.list + other.list)

    def times(self, count: float) -> Requests:
        """So many times as many."""
        return Requests(self.put * count, self.get * count, self.list * count)


@dataclass(frozen=True)
class Traffic:
    """Bytes of a version.

    Attributes:
        up: Into the bucket.
        region: From the bucket into the fullest region.
        cross: From the bucket into all regions.
        local: Inside the fullest region, from its relays to replicas.
        replica: To each replica.
        relay: From each relay to its replicas.
        of_full: ``cross``, in what full checkpoints of the same versions would be.
    """

    up: int
    region: int
    cross: int
    local: int
    replica: int
    relay: int
    of_full: float


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of each kind of process, beside what the kernel caches of files."""

    trainer_rank: int
    first_rank: int
    follower: int
    maintainer: int
    relay: int
    hub: int


@dataclass(frozen=True)
class Disk:
    """Bytes of disk of each kind of host; ``bucket``: what lies there at the end of the run."""

    publisher: int
    follower: int
    maintainer: int
    relay: int
    bucket: int


@dataclass(frozen=True)
class Cost:
    """Dollars.

    Attributes:
        egress: For bytes that leave the bucket's region.
        requests: For requests.
        storage: For what lies in the bucket.
    """

    egress: float
    requests: float
    storage: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.egress + self.requests + self.storage

    def times(self, count: float) -> Cost:
        """So many times as much."""
        return Cost(self.egress * count, self.requests * count, self.storage * count)


@dataclass(frozen=True)
class Join:
    """The way of a replica from nothing to the head.

    Attributes:
        object_count: Anchors and deltas that it takes.
        total_bytes: Their bytes.
    """

    object_count: int
    total_bytes: int


def traffic_of(scenario: Scenario, payload: Payload) -> Traffic:
    """Bytes of a version."""
    version = payload.delta.total_bytes + payload.delta_manifest_bytes
    there = scenario.replicas_per_region
    copies = scenario.relays if scenario.has_relay else there
    all_copies = scenario.relay_count if scenario.has_relay else scenario.replicas
    # Nothing would prove an unsigned manifest, so followers read it from the bucket themselves.
    is_direct = scenario.has_relay and not scenario.is_signed
    direct = payload.delta_manifest_bytes if is_direct else 0
    relayed = version - direct if scenario.has_relay else 0
    return Traffic(
        up=version,
        region=version * copies + direct * there,
        cross=version * all_copies + direct * scenario.replicas,
        local=relayed * there,
        replica=version,
        relay=relayed * relays.readers_of(scenario),
        of_full=version / scenario.raw_bytes,
    )


def publisher_requests(payload: Payload) -> Requests:
    """Those of a step delta: shards, manifest, ``head.json``, and looks.

    Before the commit each shard is looked for, and twice the manifest before it.
    """
    return Requests(put=payload.delta.puts + 2, get=payload.delta.count + 2)


def follower_requests(scenario: Scenario, payload: Payload) -> Requests:
    """Those of a version that comes while up to date: its manifest, its shards, the next look."""
    return Requests(get=2 + payload.delta.gets(scenario.memory_limit_bytes))


def idle_requests(scenario: Scenario) -> Requests:
    """Those of a follower from one version to the next, beside the version's own.

    One that hubs wake looks by itself only now and then: to be sure.
    """
    leases = scenario.step_s / (LEASE_TTL_S / 3)
    looks = scenario.step_s / MAX_WAIT_S
    if not scenario.has_hub:
        looks = looks_between(scenario.step_s, scenario.poll_s)
    return Requests(put=leases, get=looks)


def replica_requests(scenario: Scenario, payload: Payload) -> Requests:
    """Those of all replicas at the bucket itself, for a version."""
    idle = idle_requests(scenario)
    if not scenario.has_relay:
        return (follower_requests(scenario, payload) + idle).times(scenario.replicas)
    # The look after the version finds nothing either.
    looks = idle.get + 1
    if scenario.is_signed:
        # A relay is believed for a while that there is nothing new.
        looks = min(looks, scenario.step_s / relays.ABSENT_CHECK_S)
    else:
        looks += 1  # the manifest
    return Requests(get=looks).times(scenario.replicas)


def relay_requests(scenario: Scenario, payload: Payload) -> Requests:
    """Those of all relays at the bucket, for a version: its manifest, its shards, looks."""
    idle = idle_requests(scenario)
    looks = 0.0
    if scenario.is_signed:
        # Those of followers for what is not there yet; an answer holds for all who ask soon.
        looks = min(
            (idle.get + 1) * relays.readers_of(scenario), scenario.step_s / relays.ABSENT_FRESH_S
        )
    own = idle.get + 2
    gets = relays.span_count(payload.delta) + own + looks
    return Requests(put=idle.put, get=gets).times(scenario.relay_count)


def maintainer_requests(scenario: Scenario, payload: Payload, history: History) -> Requests:
    """Those of a maintainer that watches, for a version: rounds, merged deltas and anchors."""
    steps = history.head - history.steps_from
    lease_count = scenario.relay_count if scenario.has_relay else scenario.replicas
    shard_count = payload.delta.count * (steps + len(history.merges))
    file_count = payload.anchor.count * len(history.anchors)
    pages = sum(
        times * max(1, -(-count // PAGE))
        for times, count in (
            (2, lease_count),
            (2, steps),
            (1, len(history.merges)),
            (2, file_count),
            (1, shard_count),
        )
    )
    rounds = max(1.0, scenario.step_s / ROUND_S)
    idle = Requests(1.0, ROUND_GETS + len(history.anchors), pages).times(rounds)
    merges = sum(1 / level for level in scenario.policy.merge_levels)
    anchors = history.made_bytes and len(history.anchors) / max(1, history.head)
    made = Requests(
        put=merges * (payload.delta.puts + 2) + anchors * payload.anchor.puts,
        get=payload.delta.gets(scenario.memory_limit_bytes) + 2,
    )
    return idle + made


def memory_of(scenario: Scenario, payload: Payload) -> Memory:
    """Bytes of memory of each kind of process."""
    share = scenario.raw_bytes // scenario.ranks
    rank = int(share * baseline_share(scenario)) + int(facts.PUBLISHER_BESIDE_BYTES.value)
    index = int(scenario.tensors * facts.OBJECT_BYTES_PER_TENSOR.value)
    meeting = int(holdings(scenario) * facts.MEET_BYTES_PER_HOLDING.value)
    if scenario.ranks == 1:
        # A folder is the baseline, mapped.
        rank, meeting = int(facts.PUBLISHER_BESIDE_BYTES.value) + index, 0
    return Memory(
        trainer_rank=rank,
        first_rank=rank + meeting,
        follower=scenario.memory_limit_bytes + index,
        maintainer=scenario.memory_limit_bytes + 2 * index,
        relay=relays.memory_bytes(scenario, payload.delta) if scenario.has_relay else 0,
        hub=int(facts.HUB_BYTES.value * max(1.0, scenario.replicas / 1000))
        if scenario.has_hub
        else 0,
    )


def baseline_share(scenario: Scenario) -> float:
    """What a rank remembers, in its share of the model; chunks that ranks share count twice."""
    return 2.0 if scenario.held == "parts" and scenario.ranks > 1 else 1.0


def holdings(scenario: Scenario) -> int:
    """Pairs of a tensor and a rank that holds some of it."""
    each = scenario.ranks if scenario.held == "parts" else 1
    return scenario.tensors * each


def disk_of(scenario: Scenario, payload: Payload, history: History) -> Disk:
    """Bytes of disk of each kind of host."""
    raw = scenario.raw_bytes
    delta = payload.delta.total_bytes
    log = log_bytes_of(scenario, scenario.changed)
    levels = [n for n in scenario.policy.merge_levels if n < scenario.versions]
    # While a first version is written each assembling rank has its files; later, its containers.
    share = min(raw, max(CONTAINER_RAW_BYTES, raw // payload.delta.count))
    return Disk(
        publisher=2 * raw if scenario.ranks == 1 else share,
        follower=2 * raw + log,
        maintainer=raw * (1 + len(levels)) + log + delta,
        relay=raw + 2 * delta if scenario.has_relay else 0,
        bucket=history.stored_bytes,
    )


def join_of(history: History) -> Join:
    """The way of a replica that begins with nothing."""
    route = plan_route(None, history.head, history.options)
    count = sum(hop.version - hop.base if hop.kind == "steps" else 1 for hop in route)
    return Join(count, route_bytes(route, history.options))


def cost_of(scenario: Scenario, requests: Requests, cross_bytes: float, stored: float) -> Cost:
    """Dollars of a version."""
    prices = scenario.prices
    writes = (requests.put + requests.list) * prices.put_thousand
    day = scenario.step_s / DAY_S
    return Cost(
        egress=cross_bytes / GB * prices.egress_gb,
        requests=(writes + requests.get * prices.get_thousand) / 1000,
        storage=stored / GB * prices.storage_gb_month / MONTH_DAYS * day,
    )


def arc3_ratio(scenario: Scenario) -> float:
    """Our bytes over arc_v3's at this changed share."""
    return tables.between(tables.OF_ARC3, scenario.changed)
