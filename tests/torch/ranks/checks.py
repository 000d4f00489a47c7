"""What a follower sees of a stream, compared with what the weights were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from ranks.harness import Job
from ranks.weights import weights_at
from thinwire import Follower, Stream, Version, fsck, open_stream
from thinwire.errors import NotFound

Weights = Mapping[str, torch.Tensor]


class Sampler:
    """A follower in a folder, that looks at every version on its way.

    Args:
        url: The stream.
        folder: Where it keeps its copy.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.seen: list[Version] = []

    def take_all(self, due_of: Callable[[Version], Weights]) -> list[Version]:
        """Go to every version that there is since the last call; each must be what is due.

        Returns:
            These versions.
        """
        found: list[Version] = []
        stream = open_stream(self.url)
        head = head_of(stream)
        with Follower(stream, self.folder, accept_new_lineages=True, lease=False) as follower:
            held = follower.version()
            for number in range(1 if held is None else held.version + 1, head + 1):
                version = follower.catch_up(number)
                assert version.version == number
                self._compare(version, due_of(version))
                found.append(version)
        self.seen += found
        return found

    def _compare(self, version: Version, due: Weights) -> None:
        held: dict[str, torch.Tensor] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            held.update(load_file(path))
        where = f"version {version.version}, step {version.step}"
        assert held.keys() == due.keys(), where
        for name, tensor in due.items():
            assert held[name].dtype == tensor.dtype, f"{where}: {name}"
            assert held[name].shape == tensor.shape, f"{where}: {name}"
            differing = int((_bits(held[name]) != _bits(tensor)).sum())
            assert differing == 0, f"{where}: {differing} of {tensor.numel()} of {name}"


def head_of(stream: Stream) -> int:
    """The newest version of a stream; 0: there is none, or no stream yet."""
    try:
        head = stream.tip().head
    except NotFound:
        return 0
    return 0 if head is None else head.version


def gathered_by(job: Job) -> Callable[[Version], Weights]:
    """What a job's ranks gathered at a version's step."""

    def due_of(version: Version) -> Weights:
        due: dict[str, torch.Tensor] = {}
        paths = list(job.folder.glob(f"step{version.step}.*.safetensors"))
        assert paths, f"step {version.step} was not gathered"
        for path in paths:
            due.update(load_file(path))
            path.unlink()
        return due

    return due_of


def dealt(version: Version) -> Weights:
    """The known weights at a version's step."""
    assert version.step is not None
    weights = weights_at(version.metadata["seed"], version.step)
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def check_whole(url: str, versions: int) -> None:
    """The stream has so many versions, and each can be rebuilt in every way that it promises."""
    report = fsck(open_stream(url), deep=True)
    assert report.problems == []
    assert report.rebuilt_count >= versions
    assert report.version_count == versions


def steps_of(versions: Sequence[Version]) -> list[int | None]:
    return [version.step for version in versions]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)
