"""A destination that is away: nothing is begun in its place."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from tests.interop.mirror_lab import Lab, shown

from thinwire.errors import Unavailable
from thinwire.interop.mirror import Mirror
from thinwire.store import StoreWrapper, open_store
from thinwire.store.wrappers import RetryingStore


@pytest.mark.parametrize("is_there", [True, False])
def test_started_while_its_destination_is_away(lab: Lab, is_there: bool) -> None:
    """The folder is not mounted: it is empty, or not there."""
    lab.publish(1)
    lab.catch_up()
    away = lab.chain.rename(lab.root / "away")
    if is_there:
        lab.chain.mkdir()
    for _ in range(2):
        lab.publish(1)
        with pytest.raises(Unavailable, match="there was a copy"):
            lab.catch_up()
    assert not lab.chain.exists() or not list(lab.chain.iterdir())
    shutil.rmtree(lab.chain, ignore_errors=True)
    away.rename(lab.chain)
    assert shown(lab.catch_up()) == [(2, 1), (3, 2)]
    assert lab.states() == lab.wanted(1, 2, 3)


def test_another_destination_for_the_same_folder(lab: Lab) -> None:
    """It is begun, and missed in its turn."""
    lab.publish(1)
    lab.catch_up()
    lab.chain = lab.root / "another"
    assert shown(lab.catch_up()) == [(1, None)]
    shutil.rmtree(lab.chain)
    with pytest.raises(Unavailable, match="there was a copy") as raised:
        lab.catch_up()
    # It was emptied on purpose.
    (lab.root / "copy" / str(raised.value.hint).rpartition("/")[2]).unlink()
    assert shown(lab.catch_up()) == [(1, None)]


class FailingStore(StoreWrapper):
    """Takes no file any more, once it is told so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(open_store(str(folder), retry_s=0))
        self.asked: set[str] = set()

    def put_file(self, key: str, path: Path) -> None:
        self.asked.add(key)
        raise Unavailable("no answer")


def test_it_is_stopped_while_its_destination_is_away(lab: Lab) -> None:
    lab.publish(1)
    failing = FailingStore(lab.chain)
    ended: list[Exception] = []

    def run(mirror: Mirror) -> None:
        try:
            list(mirror.catch_up())
        except Unavailable as error:
            ended.append(error)

    with lab.mirror(store=RetryingStore(failing, 600)) as mirror:
        thread = threading.Thread(target=run, args=(mirror,))
        thread.start()
        until_s = time.monotonic() + 60
        # All that are uploaded side by side.
        while len(failing.asked) < 3 and time.monotonic() < until_s:
            time.sleep(0.01)
        mirror.stop()
        # Not the ten minutes that calls are tried again for.
        thread.join(60)
        assert not thread.is_alive()
    assert len(ended) == 1
