"""A Fireworks deployment that follows a stream: snapshots in its bucket, announced by hot load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from thinwire.codec.delta_set import DeltaSet
from thinwire.errors import Deadline, InvalidArgument, ThinwireError
from thinwire.follow import Mark
from thinwire.interop.destination import Destination, MirroredVersion
from thinwire.interop.fireworks.hot_load import HotLoad, PromptCache
from thinwire.interop.formats import format_named
from thinwire.interop.mirror import MirrorSink
from thinwire.interop.snapshot_plan import FULL_EVERY, check_identity
from thinwire.store import Store, open_store

_RETRY_MARK = "-full-"


class FireworksSink(MirrorSink):
    """Turns a stream into hot-load snapshots in a customer's bucket, and has them loaded.

    Each version becomes a snapshot: first a full one, then incremental ones, a full one every
    ``full_every``, and after each failure. With a ``hot_load`` client it is announced once it is in
    the bucket whole, and a follower's step ends when the replicas serve it. Where they do not, the
    step raises ``EngineError`` or ``Deadline``: folder and bucket have the version then, and
    :meth:`deliver` tries again.

    Args:
        folder: The sink's own copy of the model.
        bucket: The URL, or store, of the deployment's hot-load bucket and path.
        stream: The id of the stream; see ``stream.record().stream``.
        hot_load: The deployment; None: snapshots are only written.
        compression_format: "arc_v1", "arc_v2" or "arc_v3".
        reset_prompt_cache: What becomes of cached prompts; None: as the deployment does it.
        may_drop_reset: As for :meth:`HotLoad.signal`.
        full_every: Every this many snapshots one is full.
        keep_full: Full snapshots to keep, with the incremental ones after the oldest of them.
        wait_s: How long the replicas may take for one snapshot.
        replica_count: How many must serve it; None: all.
        workers: Threads.

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
        workers: int = 1,
    ) -> None:
        if full_every < 1:
            raise InvalidArgument(f"full_every is {full_every}", hint="Give at least 1")
        store = open_store(bucket) if isinstance(bucket, str) else bucket

        def open_destination(work_dir: Path) -> Destination:
            return Destination(
                store,
                format_named("fireworks"),
                stream,
                options={"compression_format": compression_format},
                # So many deltas lie between two full ones.
                full_every=full_every - 1,
                keep_full=keep_full,
                work_dir=work_dir,
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
        # Full snapshots that were there already may have been announced by an earlier process.
        self._announced: set[str] = set()

    @property
    def destination(self) -> Destination:
        """Where the snapshots are; errors as a mirror's."""
        is_new = self._destination is None
        found = super().destination
        if is_new:
            self._announced.update(row.name for row in found.record.versions)
        return found

    def naming(self, mark: Mark) -> dict[str, Any]:
        """A snapshot's identity: never used before, and the same after a crash."""
        identity = f"v{mark.version:08d}-{mark.manifest[:8]}"
        newest = self.destination.newest
        if newest is not None and newest.version == mark.version and self._must_be_full:
            _, _, count = newest.name.partition(_RETRY_MARK)
            identity += f"{_RETRY_MARK}{int(count or 0) + 1}"
        check_identity(identity)
        return {"identity": identity}

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
        if self._must_be_full:
            mark = self.mark()
            assert mark is not None
            self._write_full(mark)
            newest = self.destination.newest
            assert newest is not None
        elif newest.name == self._served:
            return newest
        way = self._way(newest)
        if way is None:
            self._must_be_full = True
            return self.deliver()
        for snapshot, base in way:
            self._load(self._hot_load, snapshot, base)
        return newest

    def _write_delta(self, delta: DeltaSet, held: Mark, mark: Mark) -> None:
        if not self._must_be_full and not self._every_is_full:
            super()._write_delta(delta, held, mark)

    def _way(self, newest: MirroredVersion) -> list[tuple[MirroredVersion, str | None]] | None:
        """The snapshots to load, each with its base; None: none leads there.

        An identity is announced once: a full snapshot that was announced, or may have been before
        this process began, is not announced again.
        """
        rows = self.destination.record.versions
        way: list[tuple[MirroredVersion, str | None]] = []
        for number in range(rows.index(newest), -1, -1):
            row = rows[number]
            if row.base is None:
                return None if row.name in self._announced else [(row, None), *way]
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
                hot_load.hint(snapshot.name, key.rpartition("/")[2])
        self._announced.add(snapshot.name)
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
        with self._noting_failure():
            hot_load.wait(identity, self._wait_s, replica_count=self._replica_count)
        self._served, self._pending = identity, None
        self._must_be_full = False

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
        """What every replica serves; empty: not one thing. The newest, if they load it, is awaited.

        Raises:
            ThinwireError: As :meth:`deliver`.
        """
        replicas = hot_load.status()
        if replicas and all(
            one.mentions(newest) and not one.has_failed(newest) for one in replicas
        ):
            self._pending = newest
            self._wait(hot_load, newest)
            return newest
        served = {replica.identity for replica in replicas}
        if len(served) != 1 or not all(replica.is_ready for replica in replicas):
            return ""
        return served.pop() or ""
