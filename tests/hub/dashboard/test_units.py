"""The page's pure functions, run where they live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .serving import served
from .test_looks import hub_of, note
from .viewing import Viewer


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    with served(hub_of([], note(1)).app()) as url, Viewer(browser) as viewer:
        yield viewer.open(url)


def call(page: Any, module: str, name: str, *arguments: Any) -> Any:
    return page.evaluate(
        "([module, name, given]) => import(`/static/${module}`).then((all) => all[name](...given))",
        [module, name, list(arguments)],
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("bytes", 0, "0 B"),
        ("bytes", 999, "999 B"),
        ("bytes", 999_499, "999 kB"),
        ("bytes", 999_600, "1.00 MB"),
        ("bytes", 3_145_728, "3.15 MB"),
        ("bytes", 2e18, "2000 PB"),
        ("bytes", None, "\u2013"),
        ("count", 1_235_814, "1.24 M"),
        ("share", 0, "0 %"),
        ("share", 1, "100 %"),
        ("share", 0.01834, "1.83 %"),
        ("share", 0.5, "50.0 %"),
        ("share", 0.999999, "> 99.99 %"),
        ("share", 0.00004321, "0.0043 %"),
        ("seconds", 0, "0 s"),
        ("seconds", 0.31, "310 ms"),
        ("seconds", 59.9, "1 m 00 s"),
        ("seconds", 134, "2 m 14 s"),
        ("seconds", 11_100, "3 h 05 m"),
        ("seconds", 187_200, "2 d 4 h"),
        ("age", -3, "0 s"),
        ("money", 0.001, "< $0.01"),
        ("money", 1234.5, "$1,235"),
    ],
)
def test_numbers_for_people(page: Any, name: str, value: Any, text: str) -> None:
    assert call(page, "format.js", name, value) == text


@pytest.mark.parametrize(
    ("limit", "ranges"),
    [
        (0, ["current", None, None, None, "> 0"]),
        (1, ["current", None, "1", "2", "> 2"]),
        (2, ["current", "1", "2", "3\u20134", "> 4"]),
        (20, ["current", "1\u201310", "11\u201320", "21\u201340", "> 40"]),
    ],
)
def test_ranges_of_the_legend_are_those_of_the_cells(
    page: Any, limit: int, ranges: list[str | None]
) -> None:
    assert call(page, "staleness.js", "bucketRanges", limit) == ranges
    for steps in range(1, 3 * limit + 3):
        place = call(page, "staleness.js", "bucket", steps, limit)
        text = ranges[place]
        assert text is not None
        low, _, high = text.strip("> ").partition("\u2013")
        if text.startswith(">"):
            assert steps > int(low)
        else:
            assert int(low) <= steps <= int(high or low)


def test_the_usual_stride_of_versions(page: Any) -> None:
    steps = [50, 40, None, 30, 20, 5]
    versions = [{"step": step, "lineage": "a"} for step in steps]
    assert call(page, "staleness.js", "stride", versions) == 10
    assert call(page, "staleness.js", "stride", []) == 1


def test_requests_are_held_back_from_the_pause_on(page: Any) -> None:
    phases = {"fetch": 2.0, "pause": 0.1, "attach": 0.5}
    assert call(page, "updates.js", "heldBack", {"phases": phases, "pause_s": 0.4}) == [2.0, 0.4]
    unnamed = {"phases": {"fetch": 2.0, "apply": 1.0}, "pause_s": 0.5}
    assert call(page, "updates.js", "heldBack", unnamed) == [2.5, 0.5]
    assert call(page, "updates.js", "heldBack", {"phases": phases, "pause_s": 0}) is None


def test_waits_double_up_to_half_a_minute(page: Any) -> None:
    waits = [call(page, "live.js", "waitBefore", attempt, 0) for attempt in range(1, 9)]
    assert waits == [1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]
    assert call(page, "live.js", "waitBefore", 1, 1) == pytest.approx(2000 / 3)
