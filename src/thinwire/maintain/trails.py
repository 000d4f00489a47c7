"""Copies of the model at the places where merged deltas begin and end."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from thinwire.follow import CheckpointSink, Follower, Stream
from thinwire.stream.events import Observer, Refusals
from thinwire.stream.records import Manifest


class Trail(NamedTuple):
    """A copy of the model, and what brings it to a version."""

    sink: CheckpointSink
    follower: Follower


class Trails:
    """A copy for the head and one for each merge level, made when first needed.

    They stay on disk from run to run: each is where the next merged delta of its level begins.
    """

    def __init__(
        self,
        stream: Stream,
        folder: Path,
        base: str | os.PathLike[str] | None,
        observer: Observer,
        workers: int,
    ) -> None:
        self._stream = stream
        self._folder = folder
        self._base = base
        self._observer = Refusals(observer)
        self._workers = workers
        self._trails: dict[int, Trail] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        """Let go of the copies."""
        self._stack.close()

    def at(self, level: int, manifest: Manifest) -> Trail:
        """The copy of a level (0: of the head), brought to a version.

        Raises:
            ThinwireError: It cannot be brought there.
        """
        trail = self.of(level)
        trail.follower.bring_to(manifest)
        return trail

    def of(self, level: int) -> Trail:
        """The copy of a level, wherever it is."""
        if level not in self._trails:
            name = "head" if level == 0 else f"level-{level}"
            sink = CheckpointSink(self._folder / name, workers=self._workers)
            follower = Follower(
                self._stream,
                sink,
                base=self._base,
                accept_new_lineages=True,
                lease=False,
                observer=self._observer,
            )
            self._stack.enter_context(follower)
            self._trails[level] = Trail(sink, follower)
        return self._trails[level]
