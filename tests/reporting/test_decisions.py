"""When to say something, when to look, what a name and an event is: without a hub or a clock."""

from __future__ import annotations

import itertools
import random
import re
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import InvalidArgument
from thinwire.report import replica_name, stream_name
from thinwire.report.calls import Calls, Place
from thinwire.report.event_lines import MAX_DATA_BYTES, MAX_LINE_BYTES, EventLines, ServerEvent
from thinwire.report.heads import parse_answer, parse_head
from thinwire.report.http import HubFault
from thinwire.report.messages import NAME_PATTERN
from thinwire.report.naming import named_streams
from thinwire.report.pacing import MIN_GAP_S, Pace, retry_s
from thinwire.stream.polling import MAX_WAIT_S, Cadence

OURS, OTHER = "a" * 32, "b" * 32


def at(version: int, lineage: str = OURS) -> Place:
    return Place(lineage, version)


# Calls


def looks_within(calls: Calls, seconds: int, name_all: bool) -> int:
    """The looks of so many seconds in which a hub names what does not exist, ten times a second."""
    count = 0
    for tick in range(10 * seconds):
        now_s = tick / 10
        if name_all or tick == 0:
            calls.named(at(10_000 + tick))
        if calls.ring_s(now_s) == 0:
            calls.rang(now_s)
            count += 1
            calls.looked()
    return count


@pytest.mark.parametrize("name_all", [True, False])
def test_lies_cause_few_looks(name_all: bool) -> None:
    calls = Calls()
    calls.connected(True)
    calls.held(at(3))
    assert 2 <= looks_within(calls, 60, name_all) <= 8
    assert not calls.is_relied_on
    # What is true is looked for at once again, once it was found.
    calls.held(at(20_000))
    calls.named(at(20_000))
    calls.named(at(20_001))
    assert calls.ring_s(1000.0) == 0


def test_versions_that_exist_are_looked_for_at_once() -> None:
    calls = Calls()
    calls.connected(True)
    for version in range(1, 50):
        now_s = 2.0 * version
        calls.named(at(version))
        assert calls.ring_s(now_s) == 0
        assert not calls.is_relied_on
        calls.rang(now_s)
        assert calls.ring_s(now_s) is None
        calls.held(at(version))
        calls.looked()
        assert calls.ring_s(now_s) is None
        assert calls.is_relied_on


def test_looks_for_calls_are_one_a_second_for_long() -> None:
    calls = Calls()
    count = 0
    for tick in range(1000):
        now_s = tick / 10
        calls.named(at(tick + 1))
        if calls.ring_s(now_s) == 0:
            calls.rang(now_s)
            count += 1
            calls.held(at(tick + 1))
            calls.looked()
    assert 100 <= count <= 105


@pytest.mark.parametrize(
    ("named", "is_new"),
    [
        (at(6), True),
        (at(5), False),
        (at(4), False),
        (at(4, OTHER), True),
        (at(9, OTHER), True),
        (Place(), False),
    ],
)
def test_what_is_newer(named: Place, is_new: bool) -> None:
    calls = Calls()
    calls.held(at(5))
    calls.named(named)
    assert (calls.ring_s(0.0) == 0) == is_new


def test_a_hub_is_relied_on_while_it_is_there_and_not_late() -> None:
    calls = Calls()
    calls.held(at(1))
    assert not calls.is_relied_on
    calls.connected(True)
    calls.named(at(1))
    assert calls.is_relied_on
    calls.connected(False)
    assert not calls.is_relied_on
    calls.connected(True)
    # Found without it, and not by a look that it caused: late, also once it says the same.
    calls.held(at(2))
    calls.looked()
    assert not calls.is_relied_on
    calls.named(at(2))
    assert not calls.is_relied_on
    # Until it was first.
    calls.named(at(3))
    calls.rang(0.0)
    calls.held(at(3))
    assert calls.is_relied_on


def test_what_is_said_in_passing_counts_where_nothing_else_is_heard() -> None:
    calls = Calls()
    calls.held(at(5))
    calls.hinted(at(6))
    assert calls.ring_s(0.0) == 0
    calls.rang(0.0)
    calls.held(at(6))
    calls.connected(True)
    calls.named(at(7))
    # Older, as of a heartbeat that was answered before.
    calls.hinted(at(6))
    calls.hinted(Place())
    assert calls.ring_s(0.0) == 0
    assert not calls.is_relied_on


def test_a_look_that_finds_more_than_was_named_does_not_make_it_late() -> None:
    calls = Calls()
    calls.connected(True)
    calls.named(at(3))
    calls.rang(0.0)
    calls.held(at(5))
    calls.looked()
    assert calls.is_relied_on


def test_a_store_that_shows_it_late_is_looked_at_again() -> None:
    calls = Calls()
    calls.named(at(3))
    calls.rang(0.0)
    calls.looked()
    assert calls.ring_s(0.0) == 0
    calls.rang(0.0)
    calls.held(at(3))
    calls.looked()
    assert calls.ring_s(0.0) is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("named"), st.integers(0, 5), st.sampled_from([OURS, OTHER])),
            st.tuples(st.just("held"), st.integers(1, 5), st.sampled_from([OURS, OTHER])),
            st.tuples(st.just("tick"), st.integers(0, 5), st.just("")),
            st.tuples(st.just("connected"), st.integers(0, 1), st.just("")),
        ),
        max_size=60,
    )
)
def test_calls_whatever_happens(events: list[tuple[str, int, str]]) -> None:
    """Looks stay within the rate, and nothing is relied on that is not connected and known."""
    calls, now_s, rung = Calls(), 0.0, 0
    is_connected = False
    named, held = Place(), Place()
    for kind, number, lineage in events:
        if kind == "named":
            # That nothing was published is no reason to forget what was.
            named = Place(lineage, number) if number else named
            calls.named(Place(lineage, number))
        elif kind == "held":
            held = Place(lineage, number)
            calls.held(held)
        elif kind == "connected":
            is_connected = bool(number)
            calls.connected(is_connected)
        else:
            now_s += number
        wait_s = calls.ring_s(now_s)
        if wait_s is not None:
            assert wait_s >= 0
            assert named.version
            assert named != held
            if wait_s == 0:
                calls.rang(now_s)
                calls.looked()
                rung += 1
        if calls.is_relied_on:
            assert is_connected
            assert not named.version or named.lineage == held.lineage
        assert rung <= 4 + now_s


# How often a follower looks by itself


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 9)), max_size=9),
    st.floats(0, 1e9),
    st.floats(0.01, 100),
    st.floats(0, 1),
)
def test_looks_are_rare_where_somebody_calls(
    found: list[tuple[float, float, int]], now_s: float, poll_s: float, jitter: float
) -> None:
    """And never more seldom than half a minute, or what was asked for."""
    cadence = Cadence()
    for created_s, found_s, count in found:
        cadence.note(created_s, found_s, count)
    wait_s = cadence.wait_s(now_s, poll_s, jitter, is_called=True)
    assert wait_s == pytest.approx(max(poll_s, MAX_WAIT_S * (0.8 + 0.4 * jitter)))


# Pace


def test_the_first_heartbeat_is_due_at_once() -> None:
    assert Pace().due_s(0.5) <= 0


def test_heartbeats_without_a_change() -> None:
    pace = Pace()
    pace.sending(10.0)
    pace.arrived(20.0)
    assert 10 + 18 <= pace.due_s(0.0) < pace.due_s(1.0) <= 10 + 22


def test_a_change_is_told_soon_and_not_too_often() -> None:
    pace = Pace()
    pace.sending(10.0)
    pace.arrived(20.0)
    pace.changed(10.1)
    pace.changed(11.0)
    assert 10 + MIN_GAP_S <= pace.due_s(0.0) <= pace.due_s(1.0) < 10.6
    pace.sending(10.5)
    pace.arrived(20.0)
    pace.changed(15.0)
    assert 15.0 < pace.due_s(0.0) < pace.due_s(1.0) < 15.5


def test_progress_is_worth_less() -> None:
    pace = Pace()
    pace.sending(10.0)
    pace.arrived(20.0)
    pace.progressed(10.1)
    assert pace.due_s(0.5) == 12.0


def test_a_hub_that_is_away_is_asked_more_and_more_seldom() -> None:
    pace = Pace()
    waits = []
    for _ in range(10):
        pace.sending(0.0)
        pace.failed()
        pace.changed(0.0)
        waits.append(pace.due_s(0.5))
    assert waits == sorted(waits)
    assert waits[0] == 0.5
    assert waits[-1] == 10.0
    # It is seen again: at once.
    pace.returned(3.0)
    assert pace.due_s(0.5) <= 0


def test_a_hub_that_is_connected_anew_is_told_at_once() -> None:
    """It may have been started again between two heartbeats that both arrived."""
    pace = Pace()
    pace.sending(0.0)
    pace.arrived(50.0)
    assert pace.due_s(0.5) == 50.0
    pace.returned(3.0)
    assert 3.0 < pace.due_s(0.0) < pace.due_s(1.0) < 3.5


@given(st.integers(1, 10**9), st.floats(0, 1))
def test_retries_are_bounded(failure_count: int, jitter: float) -> None:
    assert 0.25 <= retry_s(failure_count, jitter) <= 15


@pytest.mark.parametrize("interval_s", [-1e308, 0.0, 1e-9, 1e308, float("inf")])
def test_what_a_hub_may_ask_for(interval_s: float) -> None:
    pace = Pace()
    pace.sending(0.0)
    pace.arrived(interval_s)
    assert 0.9 <= pace.due_s(0.0) <= pace.due_s(1.0) <= 66


# Events


def events_of(data: bytes, rng: random.Random | None = None) -> list[ServerEvent]:
    lines, found, rest = EventLines(), [], data
    while rest:
        size = len(rest) if rng is None else rng.randint(1, max(1, len(rest) // 2))
        found += lines.feed(rest[:size])
        rest = rest[size:]
    return found


def test_events_as_the_standard_shows_them() -> None:
    text = (
        b": comment\n\nevent: add\ndata: 73857293\n\nevent:remove\r\ndata:2153\rdata\n"
        b"id: 7\nretry: 9\n\r\n\r\nevent: no data\n\ndata:  two blanks\n\n:\n\ndata: never ended\n"
    )
    assert events_of(text) == [
        ServerEvent("add", b"73857293"),
        ServerEvent("remove", b"2153\n"),
        ServerEvent("message", b" two blanks"),
    ]


@given(
    st.lists(
        st.sampled_from(
            [b"data: x", b"data:y:z", b"event: a", b": c", b"", b"\xff", b"data", b"id: 1"]
        ),
        max_size=30,
    ),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.randoms(use_true_random=False),
)
def test_where_pieces_are_cut_changes_nothing(
    lines: list[bytes], end: bytes, rng: random.Random
) -> None:
    data = b"".join(line + end for line in lines) + b"data: last\n\ndata: more\n\n"
    assert events_of(data, rng) == events_of(data)


def test_what_is_too_long_is_dropped_whole() -> None:
    long = b"x" * (MAX_LINE_BYTES + 1)
    assert events_of(b"data: " + long + b"\n\ndata: a\n\n", random.Random(0)) == [
        ServerEvent("message", b"a")
    ]
    # Half of an event would mean something else.
    assert events_of(b"data: a\ndata: " + long + b"\ndata: b\n\ndata: c\n\n") == [
        ServerEvent("message", b"c")
    ]
    many = b"data: " + b"x" * 1000 + b"\n"
    assert events_of(many * (MAX_DATA_BYTES // 1000 + 1) + b"\ndata: a\n\n") == [
        ServerEvent("message", b"a")
    ]


@given(st.binary(max_size=2000), st.randoms(use_true_random=False))
def test_any_bytes(data: bytes, rng: random.Random) -> None:
    for event in events_of(data, rng):
        assert len(event.data) <= MAX_DATA_BYTES
        try:
            place = parse_head(event.data)
        except HubFault:
            continue
        assert place == Place() or place.version > 0


@given(st.binary(max_size=200))
def test_any_answer(data: bytes) -> None:
    with suppress(HubFault):
        place, interval_s = parse_answer(data)
        assert place == Place() or place.version > 0
        assert interval_s == interval_s


# Names


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/models/run-7", "run-7"),
        ("s3://bucket/models/run-7/", "run-7"),
        ("s3://bucket", "bucket"),
        ("file:///srv/streams/a.b_c", "a.b_c"),
        ("hf://buckets/org/run", "run"),
        ("/srv/streams/run", "run"),
        ("streams/run/", "run"),
        ("gs://b/%41b", "Ab"),
    ],
)
def test_a_streams_name(url: str, name: str) -> None:
    assert stream_name(url) == name


@pytest.mark.parametrize("url", ["s3://b/a b", "s3://b/.x", "/", "s3://b/" + "x" * 65, "s3://b/é"])
def test_a_stream_without_a_name(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        stream_name(url)
    assert "--hub-stream" in caught.value.hint


def test_streams_that_are_given_names() -> None:
    given = ["a=s3://b/x=y", "s3://b/run", "b.c=/srv/x"]
    assert named_streams(given) == {"a": "s3://b/x=y", "run": "s3://b/run", "b.c": "/srv/x"}
    with pytest.raises(InvalidArgument, match="two streams are called 'run'"):
        named_streams(["s3://b/run", "run=/srv/run"])
    with pytest.raises(InvalidArgument, match="no hub has as a name"):
        named_streams(["s3://b/a b"])
    with pytest.raises(InvalidArgument, match="no URL comes after 'policy='"):
        named_streams(["policy="])
    with pytest.raises(InvalidArgument, match=r"the stream's name in 'po licy=store' is 'po licy'"):
        named_streams(["po licy=store"])


@pytest.mark.parametrize("host", ["node-3", "", "-x.y", "a" * 200, "über.local", "a b\n", "."])
def test_a_replicas_name(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    places = [tmp_path, tmp_path / "f", "http://127.0.0.1:8000", "http://127.0.0.1:8001", "\udcff"]
    names = [replica_name(place) for place in places]
    assert len(set(names)) == len(places)
    assert names == [replica_name(place) for place in places]
    assert all(re.fullmatch(NAME_PATTERN, name) for name in names)
    monkeypatch.chdir(tmp_path)
    assert replica_name("f") == names[1]


def test_names_of_many_folders_differ() -> None:
    names = {replica_name(f"/srv/{number}") for number in itertools.islice(itertools.count(), 2000)}
    assert len(names) == 2000
