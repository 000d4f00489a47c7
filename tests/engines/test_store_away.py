"""Engines whose stream's store is away when they, or what keeps them current, are started again."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest

if not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "tokenizers")):
    warnings.warn("thinwire[serve] is not importable: it was NOT tested", stacklevel=1)
    pytest.skip("thinwire[serve] is not importable", allow_module_level=True)

import httpx

from thinwire import Follower
from thinwire.engines.driver import Driver, Served
from thinwire.engines.transformers.serving import Settings
from thinwire.errors import LineageChanged, ThinwireError
from thinwire.follow import looks, open_stream
from thinwire.publish import Publisher
from thinwire.stream.events import Refused
from thinwire.torch import TorchPublisher

from .serving import llama, served
from .test_driver import KEEP, Stand, stand_in


def restarted(stand: Stand) -> Driver:
    """Another driver of the same engine and copy; the stream's folder itself is its store."""
    stand.driver.close()
    stream = open_stream(stand.folder / "store", retry_s=0)
    stand.driver = Driver(
        stream, stand.engine, stand.folder / "copy", policy=KEEP, observer=stand, lease=False
    )
    return stand.driver


def test_a_driver_brings_the_engine_to_what_is_held(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        label = stand.publish()
        stand.bring()
        driver = restarted(stand)
        (tmp_path / "store").rename(tmp_path / "away")
        run = driver.run(poll_s=0.01, look_s=0.02)
        first = next(run)
        assert (first.label, first.way, driver.is_ready) == (label, "proved", True)
        assert next(event.code for event in stand.of(Refused)) == "unavailable"
        # The engine is started again meanwhile.
        stand.engine.restart()
        assert next(run).label == label
        assert stand.is_at(label)
        # And the store is back, with a new version.
        (tmp_path / "away").rename(tmp_path / "store")
        label = stand.publish()
        assert next(run).label == label
        driver.stop()
        assert [*run] == []


def test_a_driver_keeps_what_it_has_where_another_stream_took_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_DOUBT_EVERY_S", 0.0)
    with stand_in(tmp_path) as stand:
        label = stand.publish()
        stand.bring()
        driver = restarted(stand)
        run = driver.run(poll_s=0.01, look_s=0.02)
        assert next(run).label == label
        put_another(stand)
        while not [event for event in stand.of(Refused) if event.code == "lineage-changed"]:
            stand.engine.restart()
            assert next(run).label == label
        stand.engine.restart()
        assert next(run).label == label
        driver.stop()
        assert [*run] == []


def test_a_driver_is_not_started_with_the_copy_of_another_stream(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        put_another(stand)
        driver = restarted(stand)
        found: list[Served] = []
        with pytest.raises(LineageChanged, match="another stream"):
            found.extend(driver.run(poll_s=0.01, look_s=0.02))
        assert found == []


def put_another(stand: Stand) -> None:
    store = stand.folder / "store"
    store.rename(stand.folder / "old")
    with Publisher(open_stream(store), stand.folder / "other", maintain=False) as publisher:
        publisher.publish(stand.model)


def test_a_server_serves_what_its_folder_holds(tmp_path: Path) -> None:
    url, copy = tmp_path / "store", tmp_path / "copy"
    with TorchPublisher(llama(), str(url), maintain=False) as publisher:
        publisher.publish(step=1).wait(30)
    with Follower(url, copy, lease=False) as follower:
        follower.catch_up()
    settings = Settings(url=str(url), folder=copy, poll_s=0.05, dtype="float32")
    url.rename(tmp_path / "away")
    with served(settings) as at:
        body = {"prompt": [1, 2], "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{at}/v1/completions", json=body, trust_env=False)
        assert answer.status_code == 200
    # The copy of another stream is no mistake that waiting mends.
    with TorchPublisher(llama(1), str(url), maintain=False) as publisher:
        publisher.publish(step=1).wait(30)
    with pytest.raises(ThinwireError, match="another stream"), served(settings):
        pass
