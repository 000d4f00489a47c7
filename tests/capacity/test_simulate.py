"""The simulation: what must be so, whatever the seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.capacity.links import SharedLink
from thinwire.capacity.outcome import Cut
from thinwire.capacity.scenario import Scenario
from thinwire.capacity.simulate import play
from thinwire.errors import InvalidArgument
from thinwire.stream.records import Policy

SMALL = Scenario(
    params=10**9, changed=0.01, regions=3, replicas=60, step_s=60.0, ranks=8, link_bits_per_s=1e9
)


def test_the_same_seed_gives_the_same_run() -> None:
    cuts = [Cut(1, 300.0, 900.0)]
    first = play(SMALL, 20, cuts=cuts, crash_per_hour=0.5, seed=7)
    assert first == play(SMALL, 20, cuts=cuts, crash_per_hour=0.5, seed=7)
    assert first != play(SMALL, 20, cuts=cuts, crash_per_hour=0.5, seed=8)


def test_all_goes_well() -> None:
    run = play(SMALL, 30)
    assert run.updates == 30 * 60
    assert run.crashes == run.joins == 0
    assert run.hops == {"steps": 30 * 60}
    for region in run.regions:
        assert region.replica_count == 20
        assert region.behind["max"] == 1
        # A relay fetched each version once.
        assert region.bytes == pytest.approx(run.regions[0].bytes)
    assert run.all_served_s["max"] < SMALL.step_s


def test_relays_fetch_once() -> None:
    with_relays = play(SMALL, 10)
    without = play(replace(SMALL, has_relay=False), 10)
    assert without.regions[0].bytes == 20 * with_relays.regions[0].bytes


def test_without_a_hub_replicas_poll() -> None:
    woken = play(SMALL, 30)
    polling = play(replace(SMALL, has_hub=False), 30)
    assert polling.regions[0].late_s["p50"] > woken.regions[0].late_s["p50"]
    assert polling.regions[0].behind["max"] <= 2


def test_a_region_that_was_cut_off_catches_up_by_merged_deltas() -> None:
    scenario = replace(SMALL, policy=Policy(merge_levels=(4, 16)))
    run = play(scenario, 60, cuts=[Cut(0, 300.0, 2100.0)])
    cut, other = run.regions[0], run.regions[1]
    assert cut.behind["max"] >= 29
    assert other.behind["max"] == 1
    assert run.hops["merge"] >= 20
    # By merged deltas it takes fewer bytes than one version after the other.
    assert cut.bytes < other.bytes
    assert run.all_served_s["max"] > 1500.0


def test_crashed_replicas_join_by_an_anchor() -> None:
    run = play(SMALL, 60, crash_per_hour=0.5)
    assert run.crashes > 0
    assert 0 < run.joins <= run.crashes
    assert run.hops["anchor"] == run.joins


def test_a_slow_link_leaves_replicas_behind() -> None:
    run = play(replace(SMALL, has_relay=False, link_bits_per_s=20e6), 30)
    assert run.regions[0].behind["p50"] > 1
    # They go to the newest at once: fewer updates than versions.
    assert run.updates < 30 * 60


def test_refused() -> None:
    for steps, replicas in ((0, 1), (10**6, 1), (1, 10**5)):
        with pytest.raises(InvalidArgument):
            play(replace(SMALL, replicas=replicas), steps)


@pytest.mark.parametrize("share", [-0.1, 2.0, float("nan")])
def test_no_share_of_crashes(share: float) -> None:
    with pytest.raises(InvalidArgument, match="crash_per_hour is"):
        play(SMALL, 3, crash_per_hour=share)


def test_a_slow_relay_leaves_replicas_behind() -> None:
    slow = replace(SMALL, relay_bytes_per_s=1e6)
    assert play(slow, 20).regions[0].behind["p50"] > 1
    assert play(replace(slow, relays=20), 20).all_served_s["max"] < SMALL.step_s


def test_flows_share_a_link() -> None:
    link = SharedLink(100.0, 100.0)
    ended: list[tuple[str, float]] = []
    link.add(0.0, 100, lambda at_s: ended.append(("large", at_s)))
    link.add(0.0, 50, lambda at_s: ended.append(("small", at_s)))
    # 50 bytes a second each: the small one ends after a second, the other has all from then on.
    while (end_s := link.next_end_s()) is not None:
        link.end(end_s)
    assert ended == [("small", 1.0), ("large", 1.5)]
    link.add(2.0, 100, lambda at_s: ended.append(("cut", at_s)))
    link.open(2.5, is_open=False)
    assert link.next_end_s() is None
    link.open(10.0, is_open=True)
    assert link.next_end_s() == pytest.approx(10.5)
    assert link.total_bytes == 250


def test_one_flow_has_its_own_limit() -> None:
    link = SharedLink(100.0, 10.0)
    link.add(0.0, 100, lambda _: None)
    assert link.next_end_s() == pytest.approx(10.0)
