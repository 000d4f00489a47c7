"""Which snapshot is full and which is incremental."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import InvalidArgument
from thinwire.interop.snapshot_plan import FULL_EVERY, SnapshotChain, check_identity


def test_first_full_then_incremental() -> None:
    chain = SnapshotChain()
    first = chain.plan("v1", "bf16")
    assert (first.base, first.is_full, first.reason) == (None, True, "first")
    chain = chain.after(first)
    second = chain.plan("v2", "bf16")
    assert (second.base, second.is_full, second.reason) == ("v1", False, "incremental")
    third = chain.after(second).plan("v3", "bf16")
    assert third.base == "v2"


def test_after_a_failure_a_full_one() -> None:
    chain = SnapshotChain()
    chain = chain.after(chain.plan("v1", "bf16"))
    failed = chain.after_failure()
    plan = failed.plan("v3", "bf16")
    assert (plan.base, plan.reason) == (None, "failure")
    assert failed.after(plan).plan("v4", "bf16").base == "v3"
    # Failing again changes nothing.
    assert failed.after_failure().plan("v4", "bf16").is_full


def test_a_change_of_dtypes_is_full() -> None:
    chain = SnapshotChain()
    chain = chain.after(chain.plan("v1", "bf16"))
    plan = chain.plan("v2", "f32")
    assert (plan.base, plan.reason) == (None, "layout")
    assert chain.after(plan).plan("v3", "f32").base == "v2"


@pytest.mark.parametrize(
    ("full_every", "max_deltas", "expected_every"),
    [(FULL_EVERY, None, 25), (1, None, 1), (2, None, 2), (200, 128, 129), (25, 3, 4), (25, 0, 1)],
)
def test_cadence(full_every: int, max_deltas: int | None, expected_every: int) -> None:
    chain, full = SnapshotChain(), []
    for number in range(300):
        plan = chain.plan(f"v{number}", "bf16", full_every=full_every, max_deltas=max_deltas)
        if plan.is_full:
            full.append(number)
            assert plan.reason == ("cadence" if number else "first")
        chain = chain.after(plan)
    assert full == list(range(0, 300, expected_every))


@given(st.lists(st.sampled_from(["sent", "failed", "retyped"]), max_size=40), st.integers(1, 6))
def test_a_base_is_always_what_is_served(events: list[str], full_every: int) -> None:
    chain, layout, served, deltas, is_known = SnapshotChain(), "a", "", 0, False
    for number, event in enumerate(events):
        layout += "x" if event == "retyped" else ""
        plan = chain.plan(f"v{number}", layout, full_every=full_every)
        if plan.base is not None:
            assert is_known
            assert plan.base == served
            assert chain.layout == layout
            assert deltas < full_every - 1
        if event == "failed":
            chain, is_known = chain.after_failure(), False
            continue
        chain, served, is_known = chain.after(plan), plan.identity, True
        deltas = deltas + 1 if plan.base is not None else 0


def test_numbers_that_are_none() -> None:
    for full_every, max_deltas in [(0, None), (-1, None), (25, -1)]:
        with pytest.raises(InvalidArgument):
            SnapshotChain().plan("v", "bf16", full_every=full_every, max_deltas=max_deltas)
    chain = SnapshotChain(acknowledged="v1", layout="bf16")
    with pytest.raises(InvalidArgument, match="served now"):
        chain.plan("v1", "bf16")


@pytest.mark.parametrize(
    "identity",
    [
        "",
        ".",
        "..",
        "../up",
        "a/b",
        "a\\b",
        "c:d",
        "a\nb",
        "a\x00b",
        "a\u202eb",
        " a",
        "a ",
        "x" * 129,
        "\ud800",
        ".thinwire-x",
    ],
)
def test_identities_that_are_none(identity: str) -> None:
    with pytest.raises(InvalidArgument, match="identity"):
        check_identity(identity)


def test_identities_that_are() -> None:
    for identity in ("v1", "step-000123", "x" * 128, "model..v2", "sch\u00f6n 7"):
        check_identity(identity)
