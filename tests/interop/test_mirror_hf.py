"""A mirror of plain checkpoints: `latest` is its own, and names a whole version."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.interop.mirror_lab import RECORD, Died, Lab, copy_of, restore, shown

from thinwire.errors import AlreadyExists, Fenced
from thinwire.store import open_store
from thinwire.testing.faults import FaultStore


def test_killed_and_its_work_folder_lost(lab: Lab) -> None:
    """From the moment when `latest` is put: the stream moves on, and the next run has no folder."""
    lab.publish(2)
    stream = {name: copy_of(lab.root / name) for name in ("stream", "state")}
    lab.publish(1)
    newer = {name: copy_of(lab.root / name) for name in ("stream", "state")}
    _restore_all(lab.root, stream)
    calls: list[tuple[str, ...]] = []
    counting = FaultStore(
        open_store(str(lab.chain)), random.Random(1), hook=lambda *call: calls.append(call)
    )
    lab.catch_up(format="hf", store=counting)
    for death in range(calls.index(("before", "put_file", "latest")), len(calls)):
        _restore_all(lab.root, {"chain": {}, "copy": {}, **stream})
        left = [death]

        def die(*_: str, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Died
            left[0] -= 1

        with pytest.raises(Died):
            lab.catch_up(
                format="hf",
                store=FaultStore(open_store(str(lab.chain)), random.Random(1), hook=die),
            )
        _restore_all(lab.root, {"copy": {}, **newer})
        named = []

        def look(*_: str, named: list[bool] = named) -> None:
            # Whoever reads `latest` meanwhile finds what it names.
            latest = lab.chain / "latest"
            name = latest.read_text().strip() if latest.exists() else ""
            named.append(not name or (lab.chain / name / "config.json").exists())

        watched = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=look)
        assert shown(lab.catch_up(format="hf", store=watched))[-1] == (3, None), calls[death]
        assert all(named)
        assert (lab.chain / "latest").read_text() == "version_000003\n"
        assert {row["name"] for row in lab.record()["versions"]} == {
            name for name in lab.names() if name not in (RECORD, "latest")
        }


def _restore_all(root: Path, folders: dict[str, dict[str, bytes]]) -> None:
    for name, files in folders.items():
        restore(root / name, files)


def test_latest_of_somebody_else_is_not_replaced(lab: Lab) -> None:
    lab.publish(1)
    lab.chain.mkdir()
    (lab.chain / "latest").write_text("theirs")
    for _ in range(2):
        with pytest.raises(AlreadyExists, match="latest exists"):
            lab.catch_up(format="hf")
    assert (lab.chain / "latest").read_text() == "theirs"


def test_latest_that_comes_late_does_not_stay(lab: Lab) -> None:
    """Put by one that is not the holder any more, after it had looked."""
    lab.publish(1)
    lab.catch_up(format="hf")
    lab.publish(1)

    def take_over(when: str, operation: str, key: str) -> None:
        if (when, operation, key) == ("before", "put_file", "latest") and lab.count == 2:
            lab.publish(3)
            lab.catch_up(format="hf", copy="copy-2", keep_full=1)

    late = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=take_over)
    with pytest.raises(Fenced):
        lab.catch_up(format="hf", store=late)
    assert (lab.chain / "latest").read_text() == "version_000002\n"
    assert not (lab.chain / "version_000002").exists()
    assert lab.catch_up(format="hf", copy="copy-2", keep_full=1) == []
    assert (lab.chain / "latest").read_text() == "version_000005\n"
