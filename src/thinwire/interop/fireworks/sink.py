"""A Fireworks deployment that follows a stream: snapshots in its bucket, announced by hot load."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.threads import default_workers
from thinwire.errors import Deadline, InvalidArgument, ThinwireError
from thinwire.follow import Mark
from thinwire.interop.destination import Destination
from thinwire.interop.fireworks.hot_load import HotLoad, PromptCache
from thinwire.interop.formats import format_named
from thinwire.interop.mirror_record import MirroredVersion
from thinwire.interop.mirror_sink import MirrorSink
from thinwire.store import Store, open_store

FULL_EVERY = 25
"""Every this many snapshots one is full. Fireworks advises 20 to 30."""

_RETRY_MARK = "-full-"
# A wait is cut into pieces, so that a stop is heard.
_WAIT_PIECE_S = 5.0


class FireworksSink(MirrorSink):
    """Turns a stream into hot-load snapshots in a customer's bucket, and has them loaded.

    Each version becomes a snapshot: first a full one, then incremental ones, a full one every
    ``full_every``, and after each failure. With a ``hot_load`` client it is announced once it is in
    the bucket whole, and a step ends when the replicas serve it. Where they do not, it raises
    ``EngineError`` or ``Deadline``: folder and bucket have the version then, and :meth:`deliver`,
    which a :class:`thinwire.interop.mirror.Mirror` calls, tries again.

    An identity is announced once, also across restarts: what was announced is in the bucket's
    record. Nothing that the served snapshot needs is deleted.

    Args:
        folder: The sink's own copy of the model.
        bucket: The URL, or store, of the deployment's hot-load bucket and path.
        stream: The id of the stream; see ``stream.record().stream``.
        hot_load: The deployment; None: snapshots are only written.
        compression_format: "arc_v1", "arc_v2" or "arc_v3".
        reset_prompt_cache: What becomes of cached prompts; None: as the deployment does it.
        may_drop_reset: As for :meth:`HotLoad.signal`.
        full_every: Every this many snapshots one is full; 1: all. 0: only where it must be.
        keep_full: Full snapshots to keep, with the incremental ones after the oldest of them; 0:
            all.
        wait_s: How long the replicas may take for one snapshot.
        replica_count: How many must serve it; None: all.
        workers: Threads; None: one for each processor, at most eight.

    Raises:
        InvalidArgument: An argument is not what it should be.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        bucket: str | Store,
        stream: str,
        *,
        hot_load: HotLoad | None = None,
        compression_format: str = "arc_v2",
        reset_prompt_cache: PromptCache | None = None,
        may_drop_reset: bool = False,
        full_every: int = FULL_EVERY,
        keep_full: int = 2,
        wait_s: float = 1800.0,
        replica_count: int | None = None,
        workers: int | None = None,
    ) -> None:
        if full_every < 0 or keep_full < 0:
            raise InvalidArgument(
                f"full_every is {full_every} and keep_full {keep_full}", hint="Give at least 0"
            )
        options = {"compression_format": compression_format}
        format = format_named("fireworks")
        format.check_options(options)
        store = open_store(bucket) if isinstance(bucket, str) else bucket
        workers = default_workers() if workers is None else workers

        def open_destination(work_dir: Path, between: Callable[[], None]) -> Destination:
            return Destination(
                store,
                format,
                stream,
                options=options,
                # So many deltas lie between two full ones.
                full_every=max(0, full_every - 1),
                keep_full=keep_full,
                keeps_served=hot_load is not None,
                work_dir=work_dir,
                workers=workers,
                between=between,
            )

        super().__init__(Path(folder), open_destination, workers=workers)
        self._hot_load = hot_load
        self._compression_format = compression_format
        self._reset_prompt_cache = reset_prompt_cache
        self._may_drop_reset = may_drop_reset
        self._every_is_full = full_every == 1
        self._wait_s = wait_s
        self._replica_count = replica_count
        self._served: str | None = None  # the identity that the replicas were seen to serve
        self._pending: str | None = None  # one that was announced, and not yet seen to be served
        self._must_be_full = False
        self._is_stopped = threading.Event()

    def naming(self, mark: Mark) -> dict[str, Any]:
        """A snapshot's identity: never used before, and the same after a crash."""
        identity = f"v{mark.version:08d}-{mark.manifest[:8]}"
        newest = self.destination.newest
        if newest is not None and newest.version == mark.version:
            # The version is there already: another attempt, with full weights.
            _, _, count = newest.name.partition(_RETRY_MARK)
            identity += f"{_RETRY_MARK}{int(count or 0) + 1}"
        return {"identity": identity}

    def stop(self) -> None:
        """End a wait for replicas, or for the destination's store. From any thread."""
        self._is_stopped.set()
        super().stop()

    def deliver(self) -> MirroredVersion | None:
        """Have the replicas serve the newest snapshot, and wait for it.

        Returns:
            That snapshot; None: there is none yet.

        Raises:
            EngineError: It was refused, or a replica gave it up. The next one will be full.
            Deadline: They are not through yet; call it again to wait on.
            EngineUnreachable: Nobody knows; call it again.
        """
        newest = super().deliver()
        if self._hot_load is None or newest is None:
            return newest
        if self._pending is not None:
            self._wait(self._hot_load, self._pending)
        if self._served is None:
            self._served = self._ask_served(self._hot_load, newest.name)
        if newest.name == self._served:
            return newest
        way = None if self._must_be_full and newest.base is not None else self._way(newest)
        if way is None:
            newest = self._write_again(newest)
            way = [(newest, None)]
        for snapshot, base in way:
            self._load(self._hot_load, snapshot, base)
        return newest

    def _write_delta(self, delta: DeltaSet, held: Mark, mark: Mark) -> None:
        if not self._must_be_full and not self._every_is_full:
            super()._write_delta(delta, held, mark)

    def _write_again(self, newest: MirroredVersion) -> MirroredVersion:
        """The newest version once more, in full and under a new identity."""
        mark = self.mark()
        assert mark is not None
        if mark.version != newest.version:
            raise InvalidArgument(
                f"{self.folder} is at version {mark.version}, the bucket at {newest.version}",
                hint="Let the folder catch up first: run it as a Mirror",
            )
        self._write_full(mark)
        written = self.destination.newest
        assert written is not None
        if newest.base is None and newest.name != self._served:
            # An attempt in full that failed: nobody serves it, and one of them is enough.
            self.destination.drop(newest.name)
        return written

    def _way(self, newest: MirroredVersion) -> list[tuple[MirroredVersion, str | None]] | None:
        """The snapshots to load, each with its base; None: none leads there."""
        rows, announced = self.destination.record.versions, self.destination.record.announced
        way: list[tuple[MirroredVersion, str | None]] = []
        for number in range(rows.index(newest), -1, -1):
            row = rows[number]
            if row.name in announced:
                return None
            if row.base is None:
                return [(row, None), *way]
            if number == 0 or row.base != rows[number - 1].version:
                return None
            base = rows[number - 1].name
            way.insert(0, (row, base))
            if base == self._served:
                return way
        return None

    def _load(self, hot_load: HotLoad, snapshot: MirroredVersion, base: str | None) -> None:
        # Only a help: signal() says what is wrong, if anything is.
        with suppress(ThinwireError):
            for key in snapshot.keys:
                if not hot_load.hint(snapshot.name, key.rpartition("/")[2]):
                    break
        self.destination.note_announced(snapshot.name)
        with self._noting_failure():
            hot_load.signal(
                snapshot.name,
                base,
                compression_format=self._compression_format,
                reset_prompt_cache=self._reset_prompt_cache,
                may_drop_reset=self._may_drop_reset,
            )
        self._pending = snapshot.name
        self._wait(hot_load, snapshot.name)

    def _wait(self, hot_load: HotLoad, identity: str) -> None:
        end_s = hot_load.clock.now_s() + self._wait_s
        with self._noting_failure():
            while True:
                left_s = end_s - hot_load.clock.now_s()
                try:
                    hot_load.wait(
                        identity,
                        max(0.0, min(left_s, _WAIT_PIECE_S)),
                        replica_count=self._replica_count,
                    )
                    break
                except Deadline:
                    if left_s <= _WAIT_PIECE_S or self._is_stopped.is_set():
                        raise
                self.between()
        self._served, self._pending, self._must_be_full = identity, None, False
        self.destination.note_served(identity)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """After a failure nobody knows what the replicas hold: only a full snapshot is sure."""
        try:
            yield
        except Deadline:
            # They may come through yet.
            raise
        except ThinwireError:
            self._served = self._pending = None
            self._must_be_full = True
            raise

    def _ask_served(self, hot_load: HotLoad, newest: str) -> str:
        """What every replica serves and nothing else; empty: not one thing.

        The newest, if they load it, is awaited. Where one failed to load something of ours, only
        full weights are sure.

        Raises:
            ThinwireError: As :meth:`deliver`.
        """
        replicas = hot_load.status()
        if any(one.target is not None and one.has_failed(one.target) for one in replicas):
            self._must_be_full = True
            return ""
        if replicas and all(one.mentions(newest) for one in replicas):
            self._pending = newest
            self._wait(hot_load, newest)
            return newest
        served = {replica.identity for replica in replicas}
        if len(served) != 1 or not all(replica.is_ready for replica in replicas):
            return ""
        return served.pop() or ""
