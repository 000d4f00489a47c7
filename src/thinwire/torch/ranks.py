"""The line between the ranks of a ``torch.distributed`` job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from thinwire.errors import Deadline, ThinwireError, Unavailable
from thinwire.publish.ranks import Alone, LineBroken, PeerFailed, Ranks, is_before
from thinwire.stream.blocks import digest_of

T = TypeVar("T")
# How often the job's store is asked; its server answers thousands a second.
_POLL_S = 0.005
_LONGEST_POLL_S = 0.1
_BEAT_S = 1.0
# A value in the job's store may have 8 MiB.
_PIECE_BYTES = 4 << 20
_FAILED = -1
# How many publishers a process made for each set of ranks: the same on all of these.
_numbers: dict[str, count[int]] = {}


class _Caller:
    """Makes calls that may never return, on a thread of their own."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._is_stuck = False
        threading.Thread(target=self._run, name="thinwire-store", daemon=True).start()

    def call(self, call: Callable[[], T], timeout_s: float) -> T:
        """The result of a call; one that did not begin in time is not made later on.

        Raises:
            Deadline: It did not return in time, or one before it has not yet.
        """
        future: Future[T] = Future()
        if not self._is_stuck:
            self._calls.put((call, future))
            try:
                return future.result(timeout_s)
            except FutureTimeout:
                self._is_stuck = not future.cancel()
                if self._is_stuck and future.done():
                    self._is_stuck = False  # it returned just now
        raise Deadline(
            f"the job's key-value store did not answer within {timeout_s:g} s",
            hint="The process that runs it, mostly rank 0's or the launcher, hangs",
        )

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            self._is_stuck = False


class JobRanks:
    """Ranks of a process group, as :class:`thinwire.publish.ranks.Ranks`.

    Small messages go through the job's own key-value store, on a connection of our own; bulk data
    through a gloo group of our own. Neither the trainer's groups nor its accelerators are used, so
    nothing here can wait for, or be mixed up with, what training does.

    Args:
        group: The process group; None: all ranks of the job.
        deadline_s: How long to wait for another rank.
    """

    def __init__(self, group: Any = None, deadline_s: float = 600.0) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._deadline_s = deadline_s
        # Ranks make the publishers of one group in the same order.
        members = digest_of(str(self._members).encode())[:16]
        prefix = f"thinwire/{members}/{next(_numbers.setdefault(members, count()))}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore(prefix, store.clone())
        self._caller = _Caller()
        self._written: set[str] = set()  # on rank 0
        self._shared = count()
        self._pulses: set[str] = set()  # keys of them, on rank 0
        self.is_broken = False
        self._line = "0"
        self._bulk = self._new_bulk(self._line)

    def exchange(self, outgoing: Mapping[int, bytes] | None) -> dict[int, bytes | memoryview]:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        sizes = [_FAILED] * self.size
        if outgoing is not None:
            sizes = [len(outgoing.get(rank, b"")) for rank in range(self.size)]
        incoming = torch.empty(self.size, dtype=torch.int64)
        self._all_to_all(incoming, torch.tensor(sizes, dtype=torch.int64), [], [])
        incoming_sizes = incoming.tolist()
        if outgoing is None or _FAILED in incoming_sizes:
            ranks = [rank for rank, size in enumerate(incoming_sizes) if size == _FAILED]
            raise PeerFailed(f"ranks {ranks} could not do their part")
        sent = np.empty(sum(sizes), np.uint8)
        at = 0
        for rank, size in enumerate(sizes):
            sent[at : at + size] = np.frombuffer(outgoing.get(rank, b""), np.uint8)
            at += size
        received = torch.empty(sum(incoming_sizes), dtype=torch.uint8)
        self._all_to_all(received, torch.from_numpy(sent), incoming_sizes, sizes)
        view: memoryview = received.numpy().data
        found: dict[int, bytes | memoryview] = {}
        at = 0
        for rank, size in enumerate(incoming_sizes):
            if size:
                found[rank] = view[at : at + size]
            at += size
        return found

    def use_line(self, name: str) -> None:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        if name == self._line:
            return
        self._bulk = None
        self._line = name
        self.is_broken = True
        self._bulk = self._new_bulk(name)
        self.is_broken = False

    @contextmanager
    def working(self, topic: str) -> Iterator[None]:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._beat, args=(topic, is_over), name="thinwire-pulse", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _beat(self, topic: str, is_over: threading.Event) -> None:
        beats = 0
        while not is_over.wait(min(_BEAT_S, self._deadline_s / 8)):
            beats += 1
            with suppress(ThinwireError):
                if self.rank == 0:
                    self.tell(f"{topic}/alive", f"pulse {beats}".encode())
                self._call(partial(self._store.set, f"{topic}/pulse/{self.rank}", str(beats)))

    def tell(self, topic: str, data: bytes) -> None:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        self._put(topic, data)

    def hear(self, topic: str, *, sign_of_life: str = "") -> bytes:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        return self._get(topic, "rank 0", sign_of_life)

    def report(self, topic: str, data: bytes) -> None:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        self._put(f"{topic}/{self.rank}", data)

    def collect(self, topic: str, *, sign_of_life: str) -> list[bytes]:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        until_s = time.monotonic() + self._deadline_s
        found: dict[int, bytes] = {}
        signs = 0
        for rank in range(self.size):
            pulse_key = f"{topic.partition('/')[0]}/pulse/{rank}"
            pulse = b""
            while rank not in found:
                left_s = min(_BEAT_S, self._deadline_s / 4, until_s - time.monotonic())
                with suppress(Deadline):
                    key = f"{topic}/{rank}"
                    found[rank] = self._get(key, f"rank {rank}", deadline_s=max(0.0, left_s))
                    self._written.add(key)
                    break
                now = self._value(pulse_key)
                if now != pulse:
                    pulse, until_s = now, max(until_s, time.monotonic() + self._deadline_s)
                if time.monotonic() >= until_s:
                    break
                signs += 1
                self.tell(sign_of_life, str(signs).encode())
            self._pulses.add(pulse_key)
        missing = sorted(set(range(self.size)) - set(found))
        if missing:
            ranks = ", ".join(str(rank) for rank in missing[:16])
            raise Deadline(
                f"rank {ranks} did not do its part, and was silent for {self._deadline_s:g} s",
                hint="It died, or lags: look at its log. Nothing was published; the next publish "
                "sends everything that changed since the last version",
                ranks=missing,
            )
        return [found[rank] for rank in range(self.size)]

    def forget_before(self, topic: str) -> None:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        gone = {key for key in list(self._written) if is_before(key, topic)}
        self._written -= gone
        for key in gone:
            for piece in range(self._piece_count(key)):
                self._call(partial(self._store.delete_key, f"{key}/{piece}"))
            self._call(partial(self._store.delete_key, key))
        for key in [key for key in self._pulses if is_before(key, topic)]:
            self._pulses.discard(key)
            self._call(partial(self._store.delete_key, key))

    def share(self, data: bytes) -> list[bytes]:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        topic = f"share{next(self._shared)}"
        self.report(topic, data)
        if self.rank == 0:
            said = self.collect(topic, sign_of_life=f"{topic}/alive")
            self.tell(f"{topic}/all", msgspec.msgpack.encode(said))
        heard = self.hear(f"{topic}/all", sign_of_life=f"{topic}/alive")
        return msgspec.msgpack.decode(heard, type=list[bytes])

    def close(self) -> None:
        """See :class:`thinwire.publish.ranks.Ranks`."""
        self._bulk = None

    def _new_bulk(self, name: str) -> Any:
        """A group of our own on keys of our own: torch's names of groups depend on the others."""
        store = dist.distributed_c10d.PrefixStore(f"bulk{name}", self._store)
        timeout = timedelta(seconds=self._deadline_s)
        make: Any = dist.distributed_c10d.ProcessGroupGloo
        return self._bulk_call(lambda: make(store, self.rank, self.size, timeout))

    def _all_to_all(
        self, out: torch.Tensor, data: torch.Tensor, out_sizes: list[int], sizes: list[int]
    ) -> None:
        self._bulk_call(lambda: self._bulk.alltoall_base(out, data, out_sizes, sizes).wait())

    def _bulk_call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            self.is_broken = True
            raise LineBroken(
                f"another rank is gone, or did not answer within {self._deadline_s:g} s: "
                f"{str(error).splitlines()[0]}",
                hint="Look at the logs of the other ranks",
            ) from error

    def _put(self, key: str, data: bytes) -> None:
        pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._call(partial(self._store.set, f"{key}/{number}", piece))
        # Last: whoever sees it finds the pieces.
        self._call(partial(self._store.set, key, str(len(pieces))))
        if self.rank == 0:
            self._written.add(key)

    def _get(
        self, key: str, whom: str, sign_of_life: str = "", deadline_s: float | None = None
    ) -> bytes:
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        until_s = time.monotonic() + limit_s
        sign = b""
        poll_s = _POLL_S
        while not self._call(partial(self._store.check, [key])):
            if sign_of_life and self._call(partial(self._store.check, [sign_of_life])):
                now = self._pieces(sign_of_life)
                if now != sign:
                    sign, until_s = now, time.monotonic() + limit_s
            if time.monotonic() >= until_s:
                raise Deadline(
                    f"nothing was heard from {whom} within {limit_s:g} s",
                    hint="It died, or lags: look at its log",
                )
            time.sleep(poll_s)
            poll_s = min(_LONGEST_POLL_S, 1.2 * poll_s)
        return self._pieces(key)

    def _value(self, key: str) -> bytes:
        """What a key holds now; empty where it is not there."""
        if not self._call(partial(self._store.check, [key])):
            return b""
        return bytes(self._call(partial(self._store.get, key)))

    def _pieces(self, key: str) -> bytes:
        names = [f"{key}/{number}" for number in range(self._piece_count(key))]
        return b"".join(self._call(partial(self._store.get, name)) for name in names)

    def _piece_count(self, key: str) -> int:
        return int(self._call(partial(self._store.get, key)))

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return self._caller.call(call, self._deadline_s)
        except (RuntimeError, dist.DistError) as error:
            raise Unavailable(
                f"the job's key-value store does not answer: {str(error).splitlines()[0]}",
                hint="The process that runs it, mostly rank 0's or the launcher, is gone",
            ) from error


def ranks_of(group: Any, deadline_s: float) -> Ranks:
    """The line between the ranks of a process group.

    Args:
        group: The group; None: the job's; False: no other rank, whatever the job is.
        deadline_s: How long to wait for another rank.
    """
    is_job = group is not False and dist.is_available() and dist.is_initialized()
    if is_job and dist.get_world_size(group) > 1:
        return JobRanks(group, deadline_s)
    return Alone()
