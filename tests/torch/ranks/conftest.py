from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="torch is not installed: publishing from ranks was not tested")

from .harness import Host, Job


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    """Power cuts are not tested here."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """The process that forks ranks."""
    found = Host()
    yield found
    found.close()


@pytest.fixture
def start(host: Host, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a job: ``start(program, size, **options)``; none outlives the test."""
    numbers = count()
    with ExitStack() as stack:

        def make(program: str, size: int, **options: Any) -> Job:
            folder = tmp_path / f"job{next(numbers)}"
            return stack.enter_context(Job(host, program, size, folder, **options))

        yield make
