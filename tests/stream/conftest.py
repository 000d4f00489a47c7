from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    """The power is not cut here, and followers by the thousand catch up."""
    with mock.patch.object(os, "fsync", os.fstat):
        yield
