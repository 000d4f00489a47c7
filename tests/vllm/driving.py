"""A driver at work, as faults find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thinwire.engines.driver import Driver
from thinwire.engines.vllm import VLLM
from thinwire.engines.walk import Deadlines, Served
from thinwire.follow import open_stream
from thinwire.stream.version import Version

from .checking import check_serves
from .following import Rollout
from .fresh import FreshLoads
from .server import VllmServer


@contextmanager
def attached(
    server: VllmServer, rollout: Rollout, endpoint: str = "", **options: Any
) -> Iterator[tuple[Driver, Version]]:
    """A driver whose engine serves the stream's newest version."""
    engine = options.pop("engine", None) or VLLM(endpoint or server.endpoint)
    options.setdefault("stream", open_stream(rollout.url, retry_s=0))
    with rollout.driver(server, engine=engine, **options) as driver:
        version = driver.follower.catch_up()
        served = driver.bring_to(version)
        assert served is not None
        assert driver.is_ready
        yield driver, version


def set_deadlines(driver: Driver, deadlines: Deadlines) -> None:
    driver._walk._deadlines = deadlines


def check_recovers(
    driver: Driver, server: VllmServer, rollout: Rollout, fresh: FreshLoads, version: Version
) -> Served | None:
    served = driver.bring_to(version)
    assert driver.is_ready
    assert driver.served == version
    check_serves(server, rollout, fresh, version)
    return served
