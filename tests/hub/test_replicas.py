"""The fleet: who is what, who is lost, what is forgotten, and limits."""

from __future__ import annotations

import pytest

from thinwire.hub.replicas import Fleet, FleetFull, FleetLimits
from thinwire.hub.status import Rule, counts_of, judge, quantile, regions_of, status_of
from thinwire.hub.versions import History
from thinwire.report.messages import Counts, Fault, ReplicaStatus

from .making import beat, note, update

FAULT = Fault(code="unavailable", message="no space", at_ms=1)


def state(fleet: Fleet, now_s: float, replica: str = "a") -> str:
    seen = fleet.find(replica)
    assert seen is not None
    return seen.state(now_s)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (beat(version=3), "ready"),
        (beat(version=3, phase="fetch", target=4), "updating"),
        # It proves what it has.
        (beat(version=3, phase="prove", target=3), "ready"),
        (beat(version=3, fault=FAULT), "ready"),
        (beat(), "joining"),
        (beat(version=3, is_ready=False, phase="apply", target=4), "joining"),
        (beat(version=3, is_ready=False, fault=FAULT), "unready"),
    ],
)
def test_states(said: object, expected: str) -> None:
    fleet = Fleet()
    fleet.beat(said, 100.0)  # type: ignore[arg-type]
    assert state(fleet, 100.0) == expected
    assert state(fleet, 1000.0) == "lost"


def test_lost_and_forgotten_and_back() -> None:
    fleet = Fleet(FleetLimits(forget_s=100, forget_region_s=0, interval_s=2))
    fleet.beat(beat(version=1), 0.0)
    quiet_s = 3 * 2 + 5
    assert state(fleet, quiet_s) == "ready"
    assert fleet.sweep(quiet_s) == 0
    assert state(fleet, quiet_s + 1) == "lost"
    assert fleet.sweep(quiet_s + 1) == 1
    assert fleet.sweep(quiet_s + 2) == 0
    assert fleet.beat(beat(version=1), 20.0)  # the same as before, but it was lost
    assert state(fleet, 20.0) == "ready"
    assert fleet.sweep(20.0 + quiet_s + 101) == 1
    assert len(fleet) == 0
    assert not fleet.leave("a")


def test_what_counts_as_a_change() -> None:
    fleet = Fleet()
    assert fleet.beat(beat(version=1), 0)
    assert not fleet.beat(beat(version=1), 1)
    assert not fleet.beat(beat(version=1, phase_s=3.0), 2)
    assert fleet.beat(beat(version=1, phase="fetch", done_bytes=1), 3)
    assert fleet.beat(beat(version=1, phase="fetch", done_bytes=2), 4)
    assert fleet.beat(beat(version=1, phase="fetch", done_bytes=2, updates=[update(1)]), 5)
    # The answer was lost, and the replica says it again.
    assert not fleet.beat(beat(version=1, phase="fetch", done_bytes=2, updates=[update(1)]), 6)
    assert len(fleet.updates) == 1


def test_updates_say_whose_they_are_and_are_bounded() -> None:
    fleet = Fleet(FleetLimits(updates=3))
    for number in range(5):
        fleet.beat(beat("a", 1, region="eu", updates=[update(number, number)]), number)
    assert [one.version for one in fleet.updates] == [2, 3, 4]
    assert {(one.replica, one.region) for one in fleet.updates} == {("a", "eu")}
    seen = fleet.find("a")
    assert seen is not None
    assert seen.beat.updates == []


def test_a_full_fleet_says_so_and_makes_room_for_the_living() -> None:
    fleet = Fleet(FleetLimits(replicas=2))
    fleet.beat(beat("a", 1), 0)
    fleet.beat(beat("b", 1), 50)
    # The first is lost by now.
    fleet.beat(beat("c", 1), 51)
    assert [seen.beat.replica for seen in fleet.sorted()] == ["b", "c"]
    with pytest.raises(FleetFull, match="2 replicas"):
        fleet.beat(beat("d", 1), 52)
    fleet.beat(beat("b", 2), 53)
    assert fleet.leave("b")
    fleet.beat(beat("d", 1), 54)
    assert [seen.beat.replica for seen in fleet.sorted(after="c")] == ["d"]


def test_regions_are_bounded_and_given_back() -> None:
    fleet = Fleet(FleetLimits(regions=2))
    fleet.beat(beat("a", region="eu"), 0)
    fleet.beat(beat("b", region="us"), 0)
    with pytest.raises(FleetFull, match="2 regions"):
        fleet.beat(beat("c", region="ap"), 0)
    with pytest.raises(FleetFull, match="2 regions"):
        fleet.beat(beat("a", region="ap"), 0)
    fleet.beat(beat("a", region="us"), 0)  # it moved
    fleet.beat(beat("c", region="ap"), 0)
    fleet.leave("c")
    fleet.beat(beat("a", region="eu"), 0)


def test_the_interval_grows_with_the_fleet() -> None:
    fleet = Fleet()
    assert fleet.interval_s() == 2.0
    for number in range(1000):
        fleet.beat(beat(f"r{number}", 1), 0)
    assert fleet.interval_s() == 5.0
    # Whoever was told to wait longer is not lost sooner.
    fleet.beat(beat("r1", 1), 0)
    assert state(fleet, 3 * 5.0 + 5, "r1") == "ready"


def statuses(*beats: object, now_s: float = 0.0) -> list[ReplicaStatus]:
    history = History(100)
    for number in range(1, 11):
        history.add(note(number, step=number))
    fleet = Fleet()
    for said in beats:
        fleet.beat(said, 0.0)  # type: ignore[arg-type]
    return [status_of(seen, history, now_s, 20_000) for seen in fleet.sorted()]


def test_regions_hold_percentiles_of_those_that_are_there() -> None:
    relay = beat("r", kind="relay", region="eu", served_bytes=7, fetched_bytes=1)
    eu = [beat(f"e{n:02}", n, region="eu", fetched_bytes=2) for n in range(1, 11)]
    found = regions_of(statuses(*eu, relay, beat("u", region="us")))
    assert [one.region for one in found] == ["eu", "us"]
    assert found[0].counts == Counts(ready=10)
    assert found[0].relay_count == 1
    assert (found[0].staleness_steps_p50, found[0].staleness_steps_p95) == (4, 9)
    assert (found[0].staleness_steps_max, found[0].staleness_s_max) == (9, 18.0)
    assert (found[0].fetched_bytes, found[0].served_bytes) == (21, 7)
    assert found[1].counts == Counts(joining=1)
    assert found[1].staleness_steps_max is None
    lost = regions_of(statuses(*eu, now_s=1000))[0]
    assert lost.counts == Counts(lost=10)
    assert lost.staleness_steps_p50 is None


def test_quantiles_are_values_that_occur() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3], 0.95) == 3
    assert quantile(list(range(1, 21)), 0.95) == 19
    assert quantile(list(range(1, 101)), 0.55) == 55
    assert quantile([1, 2], 0.5) == 1


def test_the_readiness_rule() -> None:
    fleet = statuses(
        beat("a", 10),
        beat("b", 9, phase="fetch", target=10),
        beat("c", 5),
        beat("d", 10, is_ready=False),
        beat("e", kind="relay"),
    )
    verdict = judge(fleet, Rule(1))
    assert (verdict.is_ready, verdict.ready_count, verdict.count) == (False, 2, 4)
    assert verdict.reason == "2 of 4 replicas are ready and at most 1 steps behind; 4 must be"
    assert judge(fleet, Rule(1, 0.5)).is_ready
    assert not judge(fleet, Rule(1, 0.51)).is_ready
    assert judge(fleet, Rule(None, 0.75)).is_ready
    assert not judge([], Rule(None, 0.0)).is_ready
    # Why they are not, as far as one of them says so.
    fleet = statuses(
        beat("a", 10, fault=FAULT),
        beat("b", 5, fault=FAULT),
        beat("c", is_ready=False, fault=FAULT),
    )
    assert judge(fleet, Rule(1)).reason.endswith("; 2 have a fault, as b: unavailable")


def test_the_lost_are_not_ready_unless_they_are_to_be_ignored() -> None:
    fleet = [*statuses(beat("a", 10)), *statuses(beat("b", 10), now_s=1000)]
    verdict = judge(fleet, Rule(0))
    assert (verdict.is_ready, verdict.ready_count, verdict.count) == (False, 1, 2)
    assert verdict.reason.endswith("2 must be; 1 are lost")
    assert judge(fleet, Rule(0, 0.5)).is_ready
    verdict = judge(fleet, Rule(0, ignores_lost=True))
    assert (verdict.is_ready, verdict.ready_count, verdict.count) == (True, 1, 1)
    assert verdict.reason.endswith("1 more are lost")
    assert not judge(fleet[1:], Rule(ignores_lost=True)).is_ready


def test_so_many_must_be_ready_at_least() -> None:
    fleet = statuses(beat("a", 10), beat("b", 10), beat("c", 1))
    assert judge(fleet, Rule(0, 0.5, min_count=2)).is_ready
    assert not judge(fleet, Rule(0, 0.5, min_count=3)).is_ready
    assert judge([], Rule()).reason == "no replica is known here; 1 must be"


def test_what_a_relay_gave_did_not_cross_into_the_region() -> None:
    replicas = [beat(name, 10, fetched_bytes=50, relayed_bytes=40) for name in "ab"]
    relay = beat("r", kind="relay", fetched_bytes=45, served_bytes=80)
    (found,) = regions_of(statuses(*replicas, relay))
    assert (found.fetched_bytes, found.served_bytes) == (2 * 10 + 45, 80)


def test_who_is_ahead_of_the_hub_is_believed_until_it_has_looked() -> None:
    history = History(10)
    history.add(note(3, step=30))
    fleet = Fleet()
    fleet.beat(beat("a", 4), 100.0)
    fleet.beat(beat("a", 4), 109.0)  # says the same again
    (seen,) = fleet.sorted()
    for looked_s, steps in ((None, 0), (99.0, 0), (104.0, 0), (105.0, None)):
        assert status_of(seen, history, 110.0, 0, looked_s).staleness_steps == steps
    fleet.beat(beat("a", 3), 111.0)
    assert status_of(seen, history, 111.0, 0, 200.0).staleness_steps == 0


def test_the_last_of_a_region_are_missed_for_longer() -> None:
    fleet = Fleet(FleetLimits(forget_s=100, forget_region_s=1000, interval_s=2))
    for name, region in (("a", "eu"), ("b", "eu"), ("c", "us"), ("d", "us")):
        fleet.beat(beat(name, 1, region=region), 0.0)
    fleet.beat(beat("relay", kind="relay", region="eu"), 200.0)
    fleet.beat(beat("d", 1, region="us"), 200.0)
    fleet.sweep(200.0)
    assert [seen.beat.replica for seen in fleet.sorted()] == ["a", "b", "d", "relay"]
    fleet.sweep(1012.0)
    assert [seen.beat.replica for seen in fleet.sorted()] == ["d"]


def test_a_version_that_the_stream_does_not_have_is_not_fresh() -> None:
    fleet = statuses(beat("a", 10, lineage="e" * 32))
    assert fleet[0].staleness_steps is None
    assert not judge(fleet, Rule(1000)).is_ready
    assert not judge(fleet, Rule()).is_ready  # any distance is not one that nobody knows
    assert counts_of(fleet) == Counts(unready=1)
    assert "serve what is not the stream's, as a: " in judge(fleet, Rule()).reason
