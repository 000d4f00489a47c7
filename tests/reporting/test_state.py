"""What a replica says of itself, out of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.report.calls import Place
from thinwire.report.messages import MAX_HEARTBEAT_BYTES, MAX_UPDATES, Heartbeat
from thinwire.report.state import News, Now, ReplicaState
from thinwire.stream.events import (
    Applied,
    CaughtUp,
    EngineFailed,
    EngineUpdated,
    Event,
    Fetched,
    Progressed,
    Published,
    Refused,
)

OURS = "a" * 32


def now(s: float = 0.0) -> Now:
    return Now(s, 1000 + int(1000 * s))


def state(*, is_driven: bool = False, held: int = 0) -> ReplicaState:
    made = ReplicaState("r1", region="eu", engine="folder", now=now())
    place = Place(OURS, held) if held else Place()
    made.begin(place, 10 * held if held else None, is_driven=is_driven)
    return made


def facts(version: int) -> dict[str, Any]:
    return {"url": "u", "lineage": OURS, "version": version}


def fetched(version: int, payload_bytes: int = 60, **more: Any) -> Fetched:
    filled = {"kind": "delta", "cached_bytes": 40, "wall_s": 0.5, **more}
    return Fetched(**facts(version), payload_bytes=payload_bytes, **filled)


def applied(version: int, **more: Any) -> Applied:
    filled = {"kind": "delta", "base": version - 1, "wall_s": 0.25, "age_s": 2.0, **more}
    return Applied(**facts(version), step=10 * version, **filled)


def caught_up(version: int) -> CaughtUp:
    return CaughtUp(**facts(version), step=10 * version)


def progressed(phase: Any, version: int, done_bytes: int = 0, total_bytes: int = 0) -> Progressed:
    return Progressed(**facts(version), phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)


def engine_updated(version: int, way: str = "changes") -> EngineUpdated:
    return EngineUpdated(
        **facts(version),
        engine="vllm",
        label="l",
        way=way,
        changed_count=3,
        phases={"stage": 0.1, "pause": 0.02, "apply": 0.03},
        pause_s=0.06,
        cache="keep",
        is_proved=True,
        age_s=4.0,
        step=10 * version,
    )


def engine_failed(version: int, served: int | None, code: str = "engine") -> EngineFailed:
    return EngineFailed(
        **facts(version),
        engine="vllm",
        code=code,
        reason="it did not",
        is_ready=served is not None,
        served=served,
        retry_s=1.0,
    )


def take(made: ReplicaState, *events: Event) -> list[News]:
    return [made.take(event, now(1.0)) for event in events]


def test_an_update_from_its_beginning_to_its_end() -> None:
    made = state(held=1)
    assert made.beat(now()) == Heartbeat(
        replica="r1",
        region="eu",
        engine="folder",
        lineage=OURS,
        version=1,
        step=10,
        started_ms=1000,
    )
    take(made, caught_up(1))
    assert made.is_ready
    assert made.take(progressed("fetch", 2, 0, 100), now(2.0)) is News.CHANGE
    assert made.take(progressed("fetch", 2, 70, 100), now(3.0)) is News.PROGRESS
    # Of two threads one comes late.
    assert made.take(progressed("fetch", 2, 30, 100), now(3.0)) is News.PROGRESS
    beat = made.beat(now(4.0))
    assert (beat.phase, beat.target, beat.done_bytes, beat.total_bytes) == ("fetch", 2, 70, 100)
    assert (beat.phase_s, beat.version, beat.is_ready) == (2.0, 1, True)
    assert take(made, fetched(2)) == [News.PROGRESS]
    assert made.take(progressed("apply", 2), now(5.0)) is News.CHANGE
    beat = made.beat(now(5.5))
    assert (beat.phase, beat.done_bytes, beat.total_bytes, beat.phase_s) == ("apply", 0, 0, 0.5)
    assert take(made, applied(2), caught_up(2)) == [News.CHANGE, News.NONE]
    beat = made.beat(now(6.0))
    assert (beat.phase, beat.target, beat.phase_s) == ("idle", 0, 0.0)
    assert (beat.version, beat.step, beat.update_count) == (2, 20, 1)
    assert (beat.fetched_bytes, beat.cached_bytes) == (60, 40)
    (note,) = beat.updates
    assert note.phases == {"fetch": 0.5, "apply": 0.25}
    assert (note.version, note.fetched_bytes, note.age_s, note.is_ok) == (2, 60, 2.0, True)


def test_the_digest_is_that_of_what_is_served() -> None:
    made = state()
    made.begin(Place(OURS, 1), 10, "1" * 12, is_driven=False)
    assert made.beat(now()).digest == "1" * 12
    made.held_digest = "2" * 12
    take(made, applied(2))
    assert made.beat(now()).digest == "2" * 12
    made.held_digest = ""  # it could not be read: the one before is not its
    take(made, applied(3))
    assert (made.beat(now()).version, made.beat(now()).digest) == (3, "")


def test_the_digest_of_an_engine_is_in_its_label() -> None:
    made = state(is_driven=True)
    made.held_digest = "2" * 12
    take(made, applied(2), replace(engine_updated(2), label="2-" + "a" * 12))
    assert made.beat(now()).digest == "a" * 12
    take(made, replace(engine_updated(2), label="of somebody else's"))
    assert made.beat(now()).digest == ""
    take(made, replace(engine_updated(2), label="2-" + "a" * 12), engine_failed(3, None))
    assert made.beat(now()).digest == ""


def test_looks_that_find_nothing_are_no_news() -> None:
    made = state(held=1)
    assert take(made, caught_up(1), caught_up(1)) == [News.CHANGE, News.NONE]


def test_ready_once_the_head_of_the_joining_is_reached() -> None:
    made = state(held=3)
    assert not made.is_ready
    # A way of several steps: what lies between is not the head.
    take(made, fetched(5), applied(5), fetched(9), applied(9))
    assert not made.is_ready
    take(made, caught_up(9))
    assert made.is_ready


@pytest.mark.parametrize("is_engine_ready", [True, False])
def test_an_engine_is_ready_when_it_serves(is_engine_ready: bool) -> None:
    made = state(is_driven=True, held=3)
    beat = made.beat(now())
    assert (beat.version, beat.is_ready) == (0, False)
    take(made, applied(4), caught_up(4))
    assert made.note_ready(is_engine_ready) == is_engine_ready
    assert not made.is_ready
    take(made, engine_updated(3))
    assert not made.is_ready
    take(made, progressed("update", 4), engine_updated(4))
    assert made.is_ready == is_engine_ready
    assert made.beat(now()).version == 4


def test_an_engines_update_holds_what_led_to_it() -> None:
    made = state(is_driven=True)
    take(made, fetched(1), applied(1), fetched(2), applied(2), caught_up(2))
    assert made.beat(now()).updates == []
    take(made, progressed("update", 2))
    assert made.beat(now(1.5)).phase == "update"
    take(made, engine_updated(2))
    beat = made.beat(now(2.0))
    (note,) = beat.updates
    assert list(note.phases.items()) == [
        ("fetch", 1.0),
        ("copy", 0.5),
        ("stage", 0.1),
        ("pause", 0.02),
        ("apply", 0.03),
    ]
    assert (note.fetched_bytes, note.pause_s, note.age_s) == (120, 0.06, 4.0)
    assert (beat.pause_s, beat.phase, beat.update_count) == (0.06, "idle", 1)


def test_an_engine_that_was_there_is_no_update() -> None:
    made = state(is_driven=True, held=2)
    take(made, caught_up(2), engine_updated(2, "proved"))
    beat = made.beat(now())
    assert (beat.version, beat.updates, beat.update_count) == (2, [], 0)


def test_an_engine_that_fails_again_and_again_failed_once() -> None:
    made = state(is_driven=True, held=2)
    take(made, caught_up(2), engine_updated(2))
    for _ in range(50):
        take(made, progressed("update", 3), engine_failed(3, served=2))
    beat = made.beat(now(9.0))
    assert [(note.version, note.is_ok) for note in beat.updates] == [(2, True), (3, False)]
    assert beat.fault is not None
    assert (beat.fault.code, beat.fault.message) == ("engine", "it did not")
    assert (beat.version, beat.phase) == (2, "idle")
    # Looks at the stream do not mend an engine.
    take(made, caught_up(3))
    assert made.beat(now()).fault is not None
    take(made, engine_failed(3, served=None, code="engine-not-ready"))
    assert made.beat(now()).version == 0
    take(made, engine_updated(3))
    assert made.beat(now()).fault is None


def test_refusals_are_faults_until_a_look_succeeds() -> None:
    made = state(held=1)
    refused = Refused(url="u", lineage="", version=0, code="unavailable", reason="no\udcff" * 400)
    assert take(made, refused, refused) == [News.CHANGE, News.NONE]
    fault = made.beat(now()).fault
    assert fault is not None
    assert (len(fault.message), fault.message[:3]) == (500, "no?")
    assert take(made, caught_up(1)) == [News.CHANGE]
    assert made.beat(now()).fault is None


def test_a_proof_ends_with_a_look_and_an_engines_does_not() -> None:
    for is_driven, phase in ((False, "idle"), (True, "prove")):
        made = state(is_driven=is_driven, held=1)
        take(made, progressed("prove", 1))
        assert made.beat(now()).phase == "prove"
        take(made, caught_up(1))
        assert made.beat(now()).phase == phase


def test_to_wait_for_the_first_version_is_no_fault() -> None:
    made = state()
    refused = Refused(url="u", lineage="", version=0, code="not-found", reason="nothing yet")
    assert take(made, refused) == [News.NONE]
    assert made.beat(now()).fault is None


def test_what_ends_it() -> None:
    made = state(held=1)
    take(made, caught_up(1), progressed("fetch", 2))
    made.fail("lineage-changed", "it went back", now(3.0))
    beat = made.beat(now(3.0))
    assert (beat.is_ready, beat.phase) == (False, "idle")
    assert beat.fault is not None
    assert beat.fault.code == "lineage-changed"


def test_updates_are_sent_until_they_arrive() -> None:
    made = state()
    take(made, applied(1), applied(2))
    first = made.beat(now())
    take(made, applied(3))
    second = made.beat(now())
    assert [note.version for note in second.updates] == [1, 2, 3]
    made.arrived(first.updates)
    assert [note.version for note in made.beat(now()).updates] == [3]
    made.arrived(second.updates)
    assert made.beat(now()).updates == []
    # Whoever is not heard for long keeps the newest.
    take(made, *(applied(version) for version in range(4, 40)))
    before = made.beat(now())
    assert [note.version for note in before.updates] == list(range(40 - MAX_UPDATES, 40))
    take(made, applied(40))
    made.arrived(before.updates)
    assert [note.version for note in made.beat(now()).updates] == [40]


def test_what_others_are_told_is_not_ours() -> None:
    made = state()
    published = Published(
        **facts(1), step=1, payload_bytes=1, raw_bytes=1, changed_count=1, wall_s=1.0
    )
    assert take(made, published) == [News.NONE]


NUMBERS = st.integers(-(10**18), 10**18)
SECONDS = st.floats(-1e12, 1e12)


@given(
    st.lists(
        st.one_of(
            st.builds(fetched, st.integers(0, 10**12 - 1), NUMBERS, wall_s=SECONDS),
            st.builds(applied, st.integers(0, 10**12 - 1), wall_s=SECONDS, age_s=SECONDS),
            st.builds(
                progressed,
                st.sampled_from(["fetch", "apply", "update", "prove"]),
                st.integers(0, 9),
                NUMBERS,
                NUMBERS,
            ),
            st.builds(caught_up, st.integers(0, 9)),
            st.builds(engine_updated, st.integers(0, 9)),
            st.builds(engine_failed, st.integers(0, 9), st.none() | st.integers(0, 9)),
        ),
        max_size=30,
    ),
    st.booleans(),
    SECONDS,
)
def test_whatever_happens_a_hub_can_read_it(
    events: list[Event], is_driven: bool, at_s: float
) -> None:
    made = state(is_driven=is_driven)
    take(made, *events)
    beat = made.beat(Now(at_s, 1000))
    data = msgspec.json.encode(beat)
    assert len(data) <= MAX_HEARTBEAT_BYTES
    assert msgspec.json.decode(data, type=Heartbeat) == beat


def test_the_longest_heartbeat_fits() -> None:
    made = state(is_driven=True)
    phases = {f"{number:02d}" + "x" * 62: 123456789.123456 for number in range(40)}
    phases["not a name"] = 1.0
    for version in range(10**12 - 100, 10**12):
        event = engine_updated(version)
        take(made, fetched(version, 10**15), applied(version))
        made.take(replace(event, phases=phases), now(1e6))
    reason = "\u20ac" * 900
    made.take(Refused(url="u", lineage="", version=0, code="c" * 60, reason=reason), now())
    data = msgspec.json.encode(made.beat(now(1e8)))
    assert len(data) <= MAX_HEARTBEAT_BYTES
    assert msgspec.json.decode(data, type=Heartbeat).updates[-1].version == 10**12 - 1


@pytest.mark.parametrize("step", [2**62, -(2**62)])
def test_a_step_that_fits_into_no_message_is_left_out(step: int) -> None:
    made = state()
    take(made, Applied(**facts(1), kind="anchor", base=0, wall_s=0, age_s=0, step=step))
    sent = msgspec.json.encode(made.beat(now()))
    assert msgspec.json.decode(sent, type=Heartbeat).step is None


def test_what_serves_what_it_follows_may_have_to_stop() -> None:
    made = ReplicaState("r1", region="", engine="torch", now=now())
    made.begin(Place(), None, is_driven=False, is_asked=True)
    take(made, applied(3), caught_up(3))
    assert not made.is_ready
    assert made.note_ready(True)
    assert made.is_ready
    take(made, Refused(url="u", lineage="", version=0, code="base-mismatch", reason="wrong"))
    assert made.note_ready(False)
    beat = made.beat(now())
    assert (beat.version, beat.is_ready, beat.fault and beat.fault.code) == (
        *(3, False, "base-mismatch"),
    )


def test_what_a_relay_gave_is_some_of_what_was_fetched() -> None:
    made = state()
    take(made, fetched(1, 60))
    made.relayed_bytes = 50
    assert made.beat(now()).relayed_bytes == 50
    made.relayed_bytes = 90  # wrong bytes were fetched again
    assert made.beat(now()).relayed_bytes == 60
