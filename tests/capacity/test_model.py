"""The model: arithmetic that can be done by hand, and what must hold of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.capacity import relays, tables
from thinwire.capacity.demand import Requests
from thinwire.capacity.history import History, grown
from thinwire.capacity.model import plan_of
from thinwire.capacity.payload import Objects, gets_of, manifest_bytes, payload_of, windowed
from thinwire.capacity.scenario import Prices, Scenario
from thinwire.capacity.timing import dirty_bytes, longest_wait_s, looks_between
from thinwire.errors import InvalidArgument
from thinwire.stream.records import Policy
from thinwire.stream.routes import plan_route

TRILLION = Scenario(params=10**12, changed=0.02, regions=4, replicas=1000, ranks=64, versions=40)


def test_bytes_of_a_trillion() -> None:
    scenario = replace(TRILLION, bits_per_change=6.0)
    payload = payload_of(scenario)
    # 2e10 changes of 6 bits in 64 shards.
    assert payload.delta.count == 64
    assert payload.delta.total_bytes == 15_000_000_000
    assert scenario.raw_bytes == 2 * 10**12
    # 234 MB a shard are 224 blocks of 1 MiB, 67 bytes each in the manifest.
    assert 64 * 224 * 67 < payload.delta_manifest_bytes < 1.1 * 64 * 224 * 67
    plan = plan_of(scenario)
    assert plan.traffic.cross == 4 * (15_000_000_000 + payload.delta_manifest_bytes)
    assert plan.traffic.of_full < 0.01
    assert plan.cost.egress == pytest.approx(plan.traffic.cross / 1e9 * 0.02)
    assert plan.full_cost.egress == pytest.approx(4 * 2000 * 0.02)


def test_what_a_relay_spares() -> None:
    with_relay = plan_of(TRILLION)
    without = plan_of(replace(TRILLION, has_relay=False))
    assert without.traffic.cross == 250 * with_relay.traffic.cross
    assert without.all_requests.get > 40 * with_relay.requests["relays"].get
    assert "relays" not in without.requests
    two = plan_of(replace(TRILLION, relays=2))
    assert two.traffic.cross == 2 * with_relay.traffic.cross
    assert two.traffic.relay == with_relay.traffic.relay / 2


def test_limits_that_are_hit_are_named() -> None:
    plan = plan_of(TRILLION)
    hit = {limit.name: limit for limit in plan.hit}
    assert "a version on a replica" in hit
    assert "a relay's network, for each version" in hit
    assert "relays" in hit["a relay's network, for each version"].advice
    # 250 replicas x 16.2 GB, one process: 4.04 TB at 1 GB/s.
    process = hit["a relay's process, for each version"]
    assert process.value == pytest.approx(plan.traffic.relay / 1e9)
    assert "HTTP cache" in process.advice
    fetch = next(phase for phase in plan.timing.phases if phase.name == "fetch")
    assert fetch.bound_by == "a relay's process"
    assert fetch.seconds > process.value * 0.99
    assert all(limit.where for limit in plan.limits)
    assert plan.timing.behind_versions == -1
    # With many cores, a folder in memory, enough relays and a link for all of them it goes.
    able = replace(
        TRILLION,
        decode_threads=96,
        disk_bytes_per_s=200e9,
        relays=64,
        link_bits_per_s=400e9,
        engine_ranks=64,
    )
    assert plan_of(able).timing.catch_up_versions == 1
    assert 1 <= plan_of(able).timing.behind_versions <= 2


def test_a_manifest_beyond_its_limit() -> None:
    """140 TB of weights in the most shards: the limit that comes first."""
    raw = 4096 * (32 << 30)
    plan = plan_of(Scenario(params=raw // 2, changed=0.02, tensors=1 << 20, versions=2))
    assert plan.payload.delta.count == 4096
    assert "a version's manifest" in {limit.name for limit in plan.hit}


def test_more_costs_more() -> None:
    small = plan_of(TRILLION)
    for changed in ({"params": 2 * 10**12}, {"changed": 0.04}, {"replicas": 2000}):
        large = plan_of(replace(TRILLION, **changed))  # type: ignore[arg-type]
        assert large.timing.total_s > small.timing.total_s, changed
        assert large.traffic.local > small.traffic.local, changed


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F8_E4M3"},
        {"tensors": 1000},
        {"step_s": 600.0},
        {"ranks": 8},
        {"ranks": 64, "held": "whole"},
        {"bits_per_change": 5.0},
        {"versions": 20},
        {"joins_per_day": 1000.0},
        {"uplink_bits_per_s": 1e8},
        {"link_bits_per_s": 1e8},
        {"local_bits_per_s": 1e8},
        {"rtt_s": 0.5},
        {"has_relay": False},
        {"relays": 2},
        {"relay_bytes_per_s": 1e6},
        {"has_hub": False},
        {"has_hub": False, "poll_s": 20.0},
        {"cpu": 2.0},
        {"encode_threads": 4},
        {"decode_threads": 1},
        {"maintain_threads": 1},
        {"disk_bytes_per_s": 1e9},
        {"engine_ranks": 4},
        {"memory_limit_bytes": 16 << 20},
        {"is_signed": False},
        {"shard_raw_bytes": 1 << 20, "ranks": 1},
        {"policy": Policy(anchor_every=5)},
        {"policy": Policy(merge_levels=(2, 4))},
        {"policy": Policy(keep_versions=10, keep_age_s=0)},
    ],
)
def test_everything_that_is_asked_counts(change: dict[str, object]) -> None:
    scenario = Scenario(params=10**9, changed=0.01, regions=2, replicas=20, versions=30)
    plain = plan_of(scenario)
    found = plan_of(replace(scenario, **change))  # type: ignore[arg-type]
    assert replace(found, scenario=scenario) != plain


def test_tables() -> None:
    share = tables.BITS_PER_CHANGE[3].share
    assert tables.between(tables.BITS_PER_CHANGE, share) == tables.BITS_PER_CHANGE[3].value
    between = tables.between(tables.BITS_PER_CHANGE, 0.02)
    assert tables.BITS_PER_CHANGE[4].value < between < tables.BITS_PER_CHANGE[3].value
    assert tables.between(tables.BITS_PER_CHANGE, 1e-9) == tables.BITS_PER_CHANGE[0].value
    assert [tables.merged_growth(k) for k in (0, 1, 4, 16)] == [0.0, 1.0, 2.46, 5.49]
    assert 3.72 < tables.merged_growth(12) < 5.49 < tables.merged_growth(64)
    assert tables.merged_share(0.2, 1024) == 1.0
    assert tables.merged_bytes(1000, 10**6, 5000) == 5004


def test_objects() -> None:
    assert Objects(3, 1000).puts == 3
    assert Objects(1, (8 << 20) + 1).puts == 2 + 2
    # 100 GB: 9,000 parts at most, and then larger ones.
    assert Objects(1, 100 * 10**9).puts == 9000 + 2
    assert gets_of(8 << 20, 256 << 20) == 1
    assert gets_of((8 << 20) + 1, 256 << 20) == 2
    # 1 TB has blocks of 64 MiB: a request each.
    assert gets_of(10**12, 256 << 20) == -(-(10**12) // (64 << 20))
    small = manifest_bytes(1, 1000, is_anchor=False, is_signed=False)
    assert manifest_bytes(1, 1000, is_anchor=False, is_signed=True) > small + 128
    assert manifest_bytes(2, 1000, is_anchor=False, is_signed=False) > small + 64


def test_what_a_relay_asks_for() -> None:
    """64 shards of 234,375,000 bytes in blocks of 1 MiB: two blocks at a time."""
    payload = payload_of(replace(TRILLION, bits_per_change=6.0))
    assert relays.span_bytes(payload.delta.size) == 2 << 20
    assert relays.span_count(payload.delta) == 64 * 112
    assert relays.span_count(Objects(3, 1000)) == 3
    # Blocks of 64 MiB: one at a time, whatever may be on its way.
    far = replace(TRILLION, link_bits_per_s=1e15)
    assert relays.span_bytes(10**12) == 64 << 20
    assert relays.fetched_per_s(far, Objects(1, 10**12)) == pytest.approx(
        (64 << 20) / 0.08, rel=0.01
    )
    assert relays.fetched_per_s(far, payload.delta) == pytest.approx(
        16 * (2 << 20) / 0.08, rel=0.01
    )


def test_requests_behind_relays() -> None:
    plan = plan_of(TRILLION)
    asked = plan.requests["relays"].get / 4
    # Its own looks and manifest, and those of 250 followers: never more than one in 0.2 s.
    assert relays.span_count(plan.payload.delta) < asked
    assert asked <= relays.span_count(plan.payload.delta) + 120 / 0.2 + 120 / 30 + 2
    # A follower checks once a minute that nothing is hidden from it.
    assert plan.requests["replicas"].get == 1000 * 120 / 60
    unsigned = plan_of(replace(TRILLION, is_signed=False))
    # The manifest, the next look, four looks of its own.
    assert unsigned.requests["replicas"].get == 1000 * (2 + 120 / 30)
    assert unsigned.requests["relays"].get < plan.requests["relays"].get
    manifest = unsigned.payload.delta_manifest_bytes
    assert unsigned.traffic.cross == 4 * unsigned.traffic.up + 1000 * manifest
    assert unsigned.traffic.local == 250 * (unsigned.traffic.up - manifest)


def test_memory_of_a_relay() -> None:
    one = relays.memory_bytes(replace(TRILLION, replicas=4), Objects(1, 1000))
    assert one == (64 + 32 + 96 + 256 << 20) + 2 * (64 << 10)
    # 250 replicas with 4 ranges each.
    payload = payload_of(TRILLION)
    assert plan_of(TRILLION).memory.relay == (448 << 20) + 250 * 4 * 2 * (64 << 10)
    assert relays.memory_bytes(TRILLION, payload.delta) == plan_of(TRILLION).memory.relay


def test_pages() -> None:
    scenario = Scenario(params=10**9, changed=0.02)
    assert dirty_bytes(scenario, 0.02) == pytest.approx(scenario.raw_bytes, rel=1e-9)
    assert dirty_bytes(scenario, 1e-6) == pytest.approx(scenario.raw_bytes * 2048e-6, rel=0.01)


def test_looks_keep_the_documented_pace() -> None:
    """docs/operations.md, section 5: ceil(0.8 T / 30) + 3, up to 480 s."""
    for step_s in (60.0, 120.0, 300.0, 480.0):
        wanted = -(-0.8 * step_s // 30) + 3
        assert abs(looks_between(step_s, 1.0) - wanted) <= 1, step_s
    assert longest_wait_s(120.0, 1.0) == pytest.approx(9.0)


def test_windows() -> None:
    assert windowed(1e6, 100, 1000, 0.0) == 1e6
    assert windowed(1e12, 4, 8 << 20, 0.08) == pytest.approx(4 * (8 << 20) / 0.08, rel=0.01)


def test_a_history_is_looked_after() -> None:
    policy = Policy(merge_levels=(4, 16), keep_versions=50, keep_age_s=0)
    history = grown(History(policy, 1000, 100_000, 60.0), 200)
    assert history.head == 200
    # Only what leads to kept versions is there, and each of them can be reached from nothing.
    assert history.steps_from <= 151
    for version in range(151, 201):
        assert plan_route(None, version, history.options)
    assert plan_route(151, 200, history.options)[0].kind != "anchor"
    assert len(history.merges) < 30
    every = grown(History(Policy(anchor_every=10, merge_levels=()), 1000, 100_000, 60.0), 41)
    assert sorted(every.anchors) == [1, 11, 21, 31, 41]


def test_requests_add_up() -> None:
    plan = plan_of(TRILLION)
    assert plan.all_requests == sum(plan.requests.values(), Requests())
    assert plan.requests["publisher"].put == plan.payload.delta.puts + 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"params": 0},
        {"changed": 0.0},
        {"changed": 1.5},
        {"regions": 0},
        {"replicas": 1 << 30},
        {"step_s": 0.0},
        {"rtt_s": -1.0},
        {"link_bits_per_s": float("inf")},
        {"relay_bytes_per_s": 0.0},
        {"regions": 1001},
        {"tensors": 1 << 30},
        {"memory_limit_bytes": 1},
        {"policy": Policy(merge_levels=(3, 4))},
    ],
)
def test_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        replace(TRILLION, **wrong)  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["egress_gb", "put_thousand", "get_thousand", "storage_gb_month"])
def test_prices_that_are_none(name: str, price: float) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is") as caught:
        Prices(**{name: price})
    assert caught.value.context["field"] == name


def test_dtypes() -> None:
    assert Scenario(params=10, changed=0.1, dtype="fp8").word_bytes == 1
    assert Scenario(params=10, changed=0.1, dtype="F32").word_bytes == 4
    plan = plan_of(replace(TRILLION, dtype="fp8"))
    assert any("F8_E4M3" in note for note in plan.notes)
