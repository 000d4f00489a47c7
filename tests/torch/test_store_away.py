"""A store that is away, be it for a moment, is no place for another stream."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch

from thinwire.errors import LineageChanged, Unavailable
from thinwire.follow import open_stream
from thinwire.publish.rank_publisher import RankPublisher
from thinwire.publish.settings import Settings
from thinwire.publish.spreading import Holding
from thinwire.torch import TorchPublisher

from .making import ThreadRanks, on_ranks
from .training import done


def by_a_trainer(url: Path, scratch: Path) -> int:
    """Open, publish a version and close; returns its number."""
    weights = {"w": torch.randn(400, generator=torch.Generator().manual_seed(1))}
    stream = open_stream(url, retry_s=0)
    with TorchPublisher(lambda: weights, stream, folder=scratch, maintain=False) as publisher:
        return done(publisher.publish()).version


def by_two_ranks(url: Path, scratch: Path, hosts: tuple[int, int] = (0, 1)) -> int:
    """Only open; which rank's folder is which."""

    def act(line: ThreadRanks) -> int:
        folder = scratch / f"host{hosts[line.rank]}"
        folder.mkdir(parents=True, exist_ok=True)
        half = (((200 * line.rank, 200 * (line.rank + 1)),),)
        stream = open_stream(url, retry_s=0)
        holdings = [Holding("w", "BF16", (400,), half)]
        settings = Settings(maintain=False)
        RankPublisher(stream, line, folder, holdings, settings).close()
        return 0

    return max(on_ranks(2, act))


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("publish", [by_a_trainer, by_two_ranks])
def test_none_is_made_in_its_place(
    publish: Callable[[Path, Path], int], is_empty: bool, tmp_path: Path
) -> None:
    url, scratch = tmp_path / "store", tmp_path / "scratch"
    first = publish(url, scratch)
    url.rename(tmp_path / "away")
    if is_empty:
        url.mkdir()
    with pytest.raises(Unavailable, match=r"scratch.* belongs to a stream") as raised:
        publish(url, scratch)
    assert "mounted" in raised.value.hint
    assert not any(tmp_path.glob("store/*"))
    if is_empty:
        url.rmdir()
    assert not url.exists()
    (tmp_path / "away").rename(url)
    assert publish(url, scratch) == 2 * first


def test_another_folder_begins_another_stream(tmp_path: Path) -> None:
    by_a_trainer(tmp_path / "store", tmp_path / "scratch")
    assert by_a_trainer(tmp_path / "other", tmp_path / "scratch") == 1
    (tmp_path / "store").rename(tmp_path / "away")
    assert by_a_trainer(tmp_path / "store", tmp_path / "more scratch") == 1


def test_another_rank_remembers_it(tmp_path: Path) -> None:
    """Rank 0 of the restarted job is on a host that never saw the stream."""
    url, scratch = tmp_path / "store", tmp_path / "scratch"
    by_two_ranks(url, scratch)
    url.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match=r"scratch.* belongs to a stream"):
        by_two_ranks(url, scratch, (2, 0))
    assert not url.exists()
    (tmp_path / "away").rename(url)
    by_two_ranks(url, scratch, (2, 0))
    # It remembers now, too.
    url.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match=r"scratch.* belongs to a stream"):
        by_two_ranks(url, scratch, (2, 3))


@pytest.mark.parametrize("publish", [by_a_trainer, by_two_ranks])
def test_another_stream_in_its_place(publish: Callable[[Path, Path], int], tmp_path: Path) -> None:
    url, scratch = tmp_path / "store", tmp_path / "scratch"
    publish(url, scratch)
    url.rename(tmp_path / "away")
    publish(url, tmp_path / "others")
    with pytest.raises(LineageChanged, match=r"scratch.* is of another stream") as raised:
        publish(url, scratch)
    assert "remove the folder" in raised.value.hint
