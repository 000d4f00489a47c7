"""A stream's history: bounded, in order, and how stale a version is in it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from thinwire.follow import open_stream
from thinwire.hub.versions import MAX_IDENTITY_CHARS, History, note_of
from thinwire.report.messages import MAX_COUNT

from .making import LINEAGE, OTHER, note, training


def history(*notes: object, limit: int = 100) -> History:
    made = History(limit)
    for one in notes:
        made.add(one)  # type: ignore[arg-type]
    return made


def test_newest_first_before_a_version_and_across_holes() -> None:
    made = history(*(note(number) for number in (1, 2, 3, 7, 8)))
    assert [one.version for one in made.newest(3)] == [8, 7, 3]
    assert [one.version for one in made.newest(9, before=7)] == [3, 2, 1]
    assert [one.version for one in made.newest(9, before=5)] == [3, 2, 1]
    assert made.newest(9, before=1) == []
    assert made.find(7) == note(7)
    assert made.find(4) is None


@given(st.lists(st.integers(1, 30)), st.integers(1, 5))
def test_the_newest_are_kept_in_any_order(numbers: list[int], limit: int) -> None:
    made = history(*(note(number) for number in numbers), limit=limit)
    kept = sorted(set(numbers), reverse=True)[:limit]
    assert [one.version for one in made.newest(99)] == kept
    assert made.payload_bytes == 10 * len(kept)
    assert made.raw_bytes == 1000 * len(kept)
    assert (made.head.version if made.head else None) == (kept[0] if kept else None)


def test_what_is_too_old_is_refused() -> None:
    made = history(note(5), note(6), limit=2)
    assert not made.add(note(4))
    assert not made.add(note(6))
    assert made.add(note(7))
    assert [one.version for one in made.newest(9)] == [7, 6]


def test_staleness_in_steps_and_seconds() -> None:
    made = history(*(note(number, step=10 * number) for number in range(1, 6)))
    assert made.staleness(LINEAGE, 5, 50, 9_000) == (0, 0.0)
    # The first version that it lacks is 4, published at 4 s.
    assert made.staleness(LINEAGE, 3, 30, 9_000) == (20, 5.0)
    # What the replica says of the step of a version that is known counts for nothing.
    assert made.staleness(LINEAGE, 3, 49, 9_000) == (20, 5.0)
    # A clock that is behind the publisher's.
    assert made.staleness(LINEAGE, 3, 30, 0) == (20, 0.0)
    assert made.staleness(LINEAGE, 0, None, 9_000) == (None, None)
    # A replica may be faster than the hub.
    assert made.staleness(LINEAGE, 6, 60, 9_000) == (0, 0.0)
    assert made.staleness(OTHER, 6, 60, 9_000) == (None, None)
    assert made.staleness(OTHER, 3, 30, 9_000) == (None, None)


def test_steps_that_do_not_rise_count_versions() -> None:
    """Published twice for a step, or resumed at an older one: a version that lacks is stale."""
    made = history(*(note(number, step=step) for number, step in enumerate([5, 5, 7, 7, 6], 1)))
    assert made.staleness(LINEAGE, 3, None, 9_000).steps == 2
    assert made.staleness(LINEAGE, 2, None, 9_000).steps == 1
    assert made.staleness(LINEAGE, 5, None, 9_000).steps == 0


def test_staleness_without_steps_counts_versions() -> None:
    made = history(*(note(number) for number in range(1, 6)))
    assert made.staleness(LINEAGE, 2, None, 9_000).steps == 3
    assert made.staleness(LINEAGE, 2, 7, 9_000).steps == 3


def test_staleness_before_the_history() -> None:
    made = history(note(8, step=80), note(9, step=90))
    assert made.staleness(LINEAGE, 2, 20, 9_000) == (70, 1.0)
    assert made.staleness(LINEAGE, 2, None, 9_000) == (7, 1.0)


def test_staleness_in_a_lineage_that_was_left() -> None:
    # The trainer went back to step 10: its new steps say nothing of the old weights.
    made = history(note(1, 10), note(2, 20), note(3, 11, OTHER), note(4, 12, OTHER))
    assert made.staleness(LINEAGE, 2, 20, 9_000) == (2, 6.0)
    assert made.staleness(OTHER, 3, 11, 9_000) == (1, 5.0)


def test_a_version_that_no_history_names_is_of_the_lineages_around_it() -> None:
    made = history(note(3, 30), note(4, 40), note(8, 80, OTHER), note(9, 90, OTHER))
    assert made.staleness(LINEAGE, 2, 20, 9_000).steps == 7
    assert made.staleness(OTHER, 2, 20, 9_000) == (None, None)
    assert made.staleness("e" * 32, 2, 85, 9_000) == (None, None)
    # In the hole from 5 to 7 one lineage ended and the other began.
    for lineage in (LINEAGE, OTHER):
        assert made.staleness(lineage, 6, 60, 9_000).steps is not None
    assert made.staleness("e" * 32, 6, 85, 9_000) == (None, None)
    assert made.staleness(LINEAGE, 8, 80, 9_000) == (None, None)


def test_what_no_history_shows_is_not_doubted() -> None:
    """It may well be the stream's: only how old it is is not known."""
    made = History(3)
    for number, lineage in [(3, LINEAGE), (4, LINEAGE), (5, OTHER), (6, OTHER), (7, OTHER)]:
        made.add(note(number, lineage=lineage))
    # Older than the history, which begins with another lineage.
    assert made.doubt(LINEAGE, 4, "") == ""
    assert made.staleness(LINEAGE, 4, None, 9_000) == (None, None)
    # The hub has just started, and read the head alone.
    assert history(note(105, lineage=OTHER)).doubt(LINEAGE, 99, "") == ""
    # In a hole there may have been a third lineage.
    made = history(note(10, lineage=LINEAGE), note(60, lineage=OTHER))
    assert made.doubt("e" * 32, 40, "") == ""
    # But none between two versions of one lineage.
    made = history(note(10, lineage=OTHER), note(60, lineage=OTHER))
    assert "of another lineage" in made.doubt(LINEAGE, 40, "")
    assert made.doubt(OTHER, 40, "") == ""


def test_a_number_that_was_published_again_is_another_version() -> None:
    made = history(note(3, 30, digest="3" * 12), note(4, 40, digest="4" * 12), note(5, 50))
    assert made.doubt(LINEAGE, 4, "4" * 12) == ""
    assert made.staleness(LINEAGE, 4, 40, 9_000, "4" * 12).steps == 10
    for digest in ("", "4" * 12):  # who does not say is taken by its word
        assert made.doubt(LINEAGE, 5, digest) == ""
    assert "is another one: 444444444444, not 555555555555" in made.doubt(LINEAGE, 4, "5" * 12)
    assert made.staleness(LINEAGE, 4, 40, 9_000, "5" * 12) == (None, None)
    assert "of another lineage" in made.doubt(OTHER, 4, "4" * 12)
    # What the history does not show, before it or after, nobody can doubt.
    assert made.doubt(LINEAGE, 2, "9" * 12) == ""
    assert made.doubt(OTHER, 6, "9" * 12) == ""
    assert history().doubt(LINEAGE, 1, "9" * 12) == ""


def test_a_step_that_javascript_does_not_hold_is_none(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.publish(7)
        found = open_stream(trainer.url).tip().head
    assert found is not None
    for step, told in ((7, 7), (MAX_COUNT, MAX_COUNT), (2**62, None), (-(2**62), None)):
        assert note_of(replace(found, step=step)).step == told


def test_identities() -> None:
    made = history(note(1, identity="x"), note(2, identity="x"), note(3))
    found = made.find_identity("x")
    assert found is not None
    assert found.version == 2
    assert made.find_identity("y") is None
    assert MAX_IDENTITY_CHARS == 128
    made.clear()
    assert (made.head, len(made), made.raw_bytes) == (None, 0, 0)
