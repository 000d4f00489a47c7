"""An engine behind a driver, as a hub sees it."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: reporting a driver was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

from thinwire.engines.driver import Driver
from thinwire.engines.engine import Policy
from thinwire.report import HubClient
from thinwire.testing.engine import MemoryEngine

from .making import NAME, NEVER_S, WITHIN_S, eventually, running, training


def test_an_engine_that_is_woken_and_reports(tmp_path: Path) -> None:
    with training(tmp_path) as trainer, running(trainer.url) as hub:
        trainer.publish()
        engine = MemoryEngine(_checkpoint(trainer.url, tmp_path / "start"))
        client = HubClient(hub.url, NAME, replica="e1", engine=engine.name)
        labels: list[str] = []
        driver = Driver(
            trainer.url, engine, tmp_path / "copy", policy=Policy(cache="keep"), observer=client
        )

        def run() -> None:
            with driver, client.reporting(driver):
                for served in driver.run(poll_s=NEVER_S, look_s=0.05):
                    labels.append(served.label)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            for version in (1, 2, 3):
                found = eventually(
                    lambda version=version: (
                        (one := hub.replica("e1"))
                        and one["beat"].get("version") == version
                        and one["state"] == "ready"
                        and one
                    ),
                    f"version {version}",
                )
                if version < 3:
                    trainer.publish()
            assert found["beat"]["engine"] == "memory"
            assert found["beat"]["step"] == 30
            assert len(labels) == 3
            updates = eventually(
                lambda: (all_of := hub.get("/updates")["updates"]) and len(all_of) >= 3 and all_of
            )
            newest = next(one for one in updates if one["version"] == 3)
            assert list(newest["phases"])[:3] == ["fetch", "copy", "stage"]
            assert "prove" in newest["phases"]
            # It answers no more: whoever asks the hub hears it, though the stream is as it was.
            engine.is_answering = False
            found = eventually(
                lambda: (one := hub.replica("e1")) and one["state"] == "unready" and one
            )
        finally:
            driver.stop()
            thread.join(WITHIN_S)
        assert not thread.is_alive()
        assert hub.replica("e1") is None


def _checkpoint(url: str, folder: Path) -> Path:
    from thinwire.follow import Follower

    with Follower(url, folder, lease=False) as follower:
        follower.catch_up()
    return folder
