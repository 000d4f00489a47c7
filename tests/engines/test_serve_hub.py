"""The sampling server behind a hub: woken by what a trainer publishes, and shown."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

if not all(
    importlib.util.find_spec(name) for name in ("torch", "transformers", "starlette", "uvicorn")
):
    warnings.warn("thinwire[serve] is not importable: it was NOT tested", stacklevel=1)
    pytest.skip("thinwire[serve] is not importable", allow_module_level=True)

import structlog

from thinwire.engines.transformers.following import Following, Newest
from thinwire.engines.transformers.serving import Settings, serving
from thinwire.follow import Follower, open_stream
from thinwire.hub import Hub
from thinwire.report import HubClient, HubNotifier
from thinwire.store import open_store
from thinwire.testing.faults import NO_FAULTS, FaultStore, Rates
from thinwire.torch import TorchPublisher, TorchSink
from thinwire.web import Limits, Listener

from .serving import llama, nudge

WITHIN_S = 60.0
NEVER_S = 3600.0


@contextmanager
def hub_of(url: str) -> Iterator[str]:
    """A hub that looks only when it is told to."""
    with Hub({"run": url}, poll_s=NEVER_S) as hub:
        listener = Listener(hub.app, "127.0.0.1", 0, limits=Limits(stop_within_s=1))
        thread = threading.Thread(target=listener.run)
        thread.start()
        try:
            yield listener.url
        finally:
            listener.stop()
            thread.join(WITHIN_S)


def wait_for(at: str, version: int) -> dict[str, Any]:
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        with urlopen(f"{at}/v1/streams/run/replicas") as answer:
            found: list[dict[str, Any]] = json.load(answer)["replicas"]
        if found and found[0]["beat"].get("version") == version and found[0]["state"] == "ready":
            return found[0]["beat"]
        time.sleep(0.05)
    raise AssertionError(found)


def until_fault(at: str, state: str, *, has_fault: bool = True) -> dict[str, Any]:
    """What the replica says, once it is in a state and names a fault, or none."""
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        with urlopen(f"{at}/v1/streams/run/replicas") as answer:
            found: list[dict[str, Any]] = json.load(answer)["replicas"]
        is_it = found and bool(found[0]["beat"].get("fault")) == has_fault
        if is_it and found[0]["state"] == state:
            return found[0]["beat"]
        time.sleep(0.05)
    raise AssertionError(found)


def test_a_server_is_woken_and_shown(tmp_path: Path) -> None:
    url = str(tmp_path / "stream")
    model = llama()
    with hub_of(url) as at, HubNotifier(at, "run") as notifier:
        with TorchPublisher(model, url, maintain=False, observer=notifier) as publisher:
            publisher.publish(step=10).wait(WITHIN_S)
            hub = HubClient(at, "run", replica="s1", region="us", engine="torch")
            settings = Settings(url=url, poll_s=NEVER_S, dtype="float32")
            with serving(settings, structlog.get_logger(), None, hub):
                assert wait_for(at, 1)["engine"] == "torch"
                for version in (2, 3):
                    nudge(model, version)
                    publisher.publish(step=10 * version).wait(WITHIN_S)
                    beat = wait_for(at, version)
                assert (beat["step"], beat["region"]) == (30, "us")
                assert beat["update_count"] >= 2
        with urlopen(f"{at}/v1/streams/run/replicas") as answer:
            assert json.load(answer)["replicas"] == []


def test_a_server_says_what_keeps_it_back(tmp_path: Path) -> None:
    """Its updates fail: it is not seen as one that has nothing to do."""
    url = str(tmp_path / "stream")
    model = llama()
    with hub_of(url) as at, TorchPublisher(model, url, maintain=False) as publisher:
        publisher.publish(step=1).wait(WITHIN_S)
        served = llama()
        sink = TorchSink(served)
        store = FaultStore(open_store(url, retry_s=0), random.Random(0))
        hub = HubClient(at, "run", replica="s1", engine="torch")
        with Follower(open_stream(store), sink, observer=hub) as follower:
            logger = structlog.get_logger()
            following = Following(
                *(follower, sink, Newest()), poll_s=0.05, proves=True, logger=logger, observer=hub
            )
            assert not following.is_ready
            with hub.reporting(following):
                following.start()
                wait_for(at, 1)
                # Woken: what the rare looks of one that relies on its hub find after half a minute.
                store.set_rates(Rates(fail_before=1.0))
                following.wake()
                found = until_fault(at, "ready")
                assert found["fault"]["code"] == "unavailable"
                store.set_rates(NO_FAULTS)
                following.wake()
                until_fault(at, "ready", has_fault=False)
            following.close()
