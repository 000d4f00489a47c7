"""What a hub sees of ``thinwire serve`` before its model is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import InvalidArgument
from thinwire.report import HubClient

from .making import NAME, eventually, running, training

pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
pytest.importorskip("transformers", reason="NOT RUN: transformers is not installed")


def test_a_replica_is_known_while_its_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes: it must not look as if it had left."""
    from thinwire.engines.transformers import serving

    seen: list[dict[str, Any]] = []
    with training(tmp_path) as trainer, running(trainer.url) as hub:
        trainer.publish()

        def load(*_: Any, **__: Any) -> Any:
            seen.append(eventually(lambda: hub.replica("r1")))
            raise InvalidArgument("no model")

        monkeypatch.setattr(serving, "load", load)
        client = HubClient(hub.url, NAME, replica="r1", engine="torch")
        settings = serving.Settings(url=trainer.url, folder=tmp_path / "f", poll_s=0.05)
        with pytest.raises(InvalidArgument), serving.serving(settings, None, hub=client):
            pass
        # It says why it ended, and not that it left.
        ended = eventually(lambda: (found := hub.replica("r1")) and found["beat"].get("fault"))
    assert (seen[0]["state"], ended["message"]) == ("joining", "no model")
