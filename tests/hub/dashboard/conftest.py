"""A real headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from .viewing import FLAGS, Viewer


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Skips aloud where there is none. Gone with these tests: its loop runs in this thread."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("the dashboard was NOT tested: there is no chromium (Debian: apt install it)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def viewer(browser: Any) -> Iterator[Viewer]:
    """A page that stayed on its origin and said nothing on its console, or the test fails."""
    with Viewer(browser) as found:
        yield found
        found.check()
