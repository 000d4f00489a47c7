"""What the tests of other systems' formats prove, told to the table in docs/interop.md.

A test that shows that a format is read, written, or that a bad file is refused, says so::

    @pytest.mark.claim("slime", "read", "12 deltas by slime's own encoder")

With ``--claims FILE`` the claims of the tests that ran are written there, each with whether they
all passed; with ``--collect-only`` those of the tests that are there. See
``benchmarks/interop_table.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.interop.chains import write_versions
from tests.interop.mirror_lab import Lab

VERBS = ("read", "write", "refuse")


class Claims:
    """Every claim, and the outcomes of the tests that make it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[tuple[str, str, str], list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for claim in claims_of(item):
                self.outcomes.setdefault(claim, [])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: Any = yield
        # A skipped test proves nothing; a failed set-up or end counts as the test does.
        if call.when == "call" or report.outcome != "passed":
            for claim in claims_of(item):
                self.outcomes.setdefault(claim, []).append(report.outcome)
        return report

    def pytest_sessionfinish(self) -> None:
        rows = [
            {"format": claim[0], "verb": claim[1], "against": claim[2], "outcomes": outcomes}
            for claim, outcomes in sorted(self.outcomes.items())
        ]
        self.path.write_text(json.dumps(rows, indent=1))


def claims_of(item: pytest.Item) -> list[tuple[str, str, str]]:
    """The claims of one test."""
    found = []
    for mark in item.iter_markers("claim"):
        format, verb, against = mark.args
        if verb not in VERBS:
            raise pytest.UsageError(f"{item.nodeid}: a claim is one of {', '.join(VERBS)}")
        found.append((format, verb, against))
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", type=Path, help="write what the tests prove to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "claim(format, verb, against): what a test proves")
    if path := config.getoption("--claims", default=None):
        config.pluginmanager.register(Claims(path), "thinwire-claims")


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Processes die in these tests, and no disk loses power: tests/checkpoint are about that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def mirrored_versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_versions(tmp_path_factory.mktemp("versions"), 7)


@pytest.fixture
def lab(tmp_path: Path, mirrored_versions: list[Path]) -> Lab:
    return Lab(tmp_path, mirrored_versions)
