"""Every sharding in use: followers hold what torch gathers, bit for bit, at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: shardings were not tested")

from thinwire import open_stream  # noqa: E402

from .checks import Sampler, check_whole, gathered_by, steps_of  # noqa: E402
from .harness import Job  # noqa: E402

Start = Callable[..., Job]


@pytest.mark.parametrize(
    ("layout", "size", "steps", "options"),
    [
        ("fsdp", 2, 20, {}),
        ("fsdp", 4, 20, {"baseline": "disk"}),
        ("tp-fsdp", 4, 20, {}),
        ("hsdp", 4, 20, {"maintain": True}),
        ("tp", 2, 6, {}),
        ("ddp", 3, 5, {}),
    ],
)
def test_followers_hold_what_was_gathered(
    start: Start, tmp_path: Path, layout: str, size: int, steps: int, options: dict[str, Any]
) -> None:
    url = str(tmp_path / "stream")
    job = start("train", size, url=url, layout=layout, first=1, last=steps, **options)
    job.wait()
    versions = Sampler(url, tmp_path / "sampler").take_all(gathered_by(job))
    assert steps_of(versions) == list(range(1, steps + 1))
    # Most weights stay: what travels are deltas.
    assert all(0 < v.changed_count < v.word_count for v in versions[1:])
    if options.get("maintain"):
        check_whole(url, steps)


def test_tied_weights_are_published_once(start: Start, tmp_path: Path) -> None:
    url = str(tmp_path / "stream")
    job = start("train", 4, url=url, layout="tied", first=1, last=4)
    job.wait()
    versions = Sampler(url, tmp_path / "sampler").take_all(gathered_by(job))
    assert steps_of(versions) == [1, 2, 3, 4]
    # Also on a rank that holds no row of a tied tensor, where no memory is shared.
    for rank in range(4):
        (opened,) = job.entries(rank, "open")
        assert opened["tied"] == {"head.weight": "embed.weight", "gate_again": "gate"}


def test_adapters_are_a_stream_of_their_own(start: Start, tmp_path: Path) -> None:
    url, base_url = str(tmp_path / "stream"), str(tmp_path / "base")
    options = {"url": url, "base_url": base_url, "only": "lora_*"}
    job = start("adapters", 4, first=1, last=6, **options)
    job.wait()
    versions = Sampler(url, tmp_path / "sampler").take_all(gathered_by(job))
    assert steps_of(versions) == [1, 2, 3, 4, 5, 6]
    assert versions[-1].raw_bytes == 3 * 2 * (4 * 258 + 258 * 4)
    # What is frozen did not change.
    base = open_stream(base_url).tip().head
    assert base is not None
    assert (base.version, base.changed_count) == (2, 0)
    check_whole(url, 6)
    check_whole(base_url, 2)


@pytest.mark.parametrize(("layout", "steps"), [("stages", 5), ("placed", 4)])
def test_every_rank_publishes_what_it_holds(
    start: Start, tmp_path: Path, layout: str, steps: int
) -> None:
    url = str(tmp_path / "stream")
    job = start("change", 4, url=url, layout=layout, first=1, last=steps)
    job.wait()
    versions = Sampler(url, tmp_path / "sampler").take_all(gathered_by(job))
    assert steps_of(versions) == list(range(1, steps + 1))
    check_whole(url, steps)
