"""One stream, and jobs of other sizes and shardings one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: resharding was not tested")

from .checks import Sampler, check_whole, gathered_by, steps_of  # noqa: E402
from .harness import Job  # noqa: E402


class Run(NamedTuple):
    """A job of a chain: how it is spread, and whose weights it begins with."""

    layout: str
    size: int
    steps: int
    load: str = ""
    save: str = ""
    options: tuple[tuple[str, Any], ...] = ()


# The weights that a job begins with are not always those of the head: the publisher compares, and
# assumes nothing. "older" are those of a step long published, no name at all stands for new ones.
CHAIN = [
    Run("fsdp", 2, 3, "", "older"),
    Run("tp-fsdp", 4, 3, "older", "newest"),
    Run("alone", 1, 3, "newest", "newest", (("baseline", "disk"),)),
    Run("hsdp", 4, 2, "older", "newest", (("maintain", True),)),
    Run("ddp", 3, 2, "newest", ""),
    Run("fsdp", 2, 2, "", ""),
]
SHORT_CHAIN = [
    Run("fsdp", 2, 2, "", "older"),
    Run("tp", 2, 2, "older", "older"),
    Run("hsdp", 4, 2, "older", ""),
]


@pytest.mark.parametrize("is_same_folder", [True, False], ids=["caught-up", "fetched"])
def test_a_stream_goes_on_whatever_the_ranks(
    start: Callable[..., Job], tmp_path: Path, is_same_folder: bool
) -> None:
    url = str(tmp_path / "stream")
    sampler = Sampler(url, tmp_path / "sampler")
    first = 1
    chain = CHAIN if is_same_folder else SHORT_CHAIN
    for number, run in enumerate(chain):
        last = first + run.steps - 1
        options = dict(run.options)
        if is_same_folder:
            options["scratch"] = str(tmp_path)
        job = start(
            "train",
            run.size,
            url=url,
            layout=run.layout,
            seed=number,
            first=first,
            last=last,
            load=run.load and str(tmp_path / run.load),
            save=run.save and str(tmp_path / run.save),
            **options,
        )
        job.wait()
        versions = sampler.take_all(gathered_by(job))
        assert steps_of(versions) == list(range(first, last + 1))
        first = last + 1
    assert len({version.lineage for version in sampler.seen}) == 1
    assert [version.kind for version in sampler.seen[1:]] == ["delta"] * (len(sampler.seen) - 1)
    check_whole(url, len(sampler.seen))
