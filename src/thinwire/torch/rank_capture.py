"""What a rank captures at a publish: its changes, and digests of what other ranks hold, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from thinwire.errors import ThinwireError
from thinwire.publish.making import Facts
from thinwire.publish.meeting import on_all
from thinwire.publish.rank_publisher import Captured, RankPublisher
from thinwire.publish.replicas import check_replicas, replicated
from thinwire.publish.staging import Staging
from thinwire.stream.events import Observer, Observers
from thinwire.torch.capture import Capture, digests_of
from thinwire.torch.device_diff import DeviceDiffMode
from thinwire.torch.state import Source


class RankCapture:
    """Captures what one rank holds, publish after publish. Every rank makes one.

    Args:
        publisher: Whose baseline tensors are compared with.
        sources: The tensors as they are now.
        folder: Where changes go that are too many for memory.
        memory_limit_bytes: What they may take there.
        device_diff: Whether changes are looked for on the GPU on which the weights lie.
        observer: Told of a GPU that is not asked for changes any more.

    Raises:
        TensorMismatch: Ranks that hold the same part of a tensor hold other weights.
        InvalidArgument: Changes are to be found on a GPU, and cannot be.
    """

    def __init__(
        self,
        publisher: RankPublisher,
        sources: list[Source],
        folder: Path,
        *,
        memory_limit_bytes: int,
        device_diff: DeviceDiffMode,
        observer: Observer | None,
    ) -> None:
        self._publisher = publisher
        self._folder = folder
        self._memory_limit_bytes = memory_limit_bytes
        self._observers = Observers(observer)
        self._count = 0
        ranks = publisher.ranks
        own = msgspec.msgpack.encode(on_all(ranks, lambda: self._replicas(sources)))
        said = [msgspec.msgpack.decode(one, type=dict[str, int]) for one in ranks.share(own)]
        check_replicas(publisher.plan, said)
        self._capture = on_all(
            ranks,
            lambda: Capture(
                publisher.baseline, sources, device_diff=device_diff, on_refused=self._refused
            ),
        )

    @property
    def device_choices(self) -> Mapping[str, str]:
        """By GPU: whether changes are found there, and why."""
        return self._capture.device_choices

    def settle(self) -> None:
        """Before the next capture: it is known what became of the last one."""
        self._capture.settle(self._publisher.head)

    def take(self, sources: Iterable[Source], facts: Facts) -> tuple[Captured, int]:
        """Capture everything where there is no baseline yet, else what differs from it.

        Returns:
            What the publisher is given, and how many words differ.

        Raises:
            TensorMismatch: The tensors are not those that it was opened with.
        """
        self._count += 1
        if not self._publisher.has_base:
            self._capture.fill(sources)
            return Captured(None, facts, self._replicas(sources)), 0
        staging = Staging(self._folder, self._memory_limit_bytes)
        try:
            changed_count = self._capture.diff(sources, staging)
            return Captured(staging, facts, self._replicas(sources)), changed_count
        except BaseException:
            staging.close()
            raise

    def close(self) -> None:
        """Give back what is held on devices and in pinned memory."""
        self._capture.close()

    def _replicas(self, sources: Iterable[Source]) -> dict[str, int]:
        """Digests of tensors that other ranks hold, too; of those that are drawn there are none."""
        ranks = self._publisher.ranks
        if ranks.size == 1 or not isinstance(sources, list):
            return {}
        return digests_of(sources, replicated(self._publisher.plan, ranks.rank, self._count))

    def _refused(self, error: ThinwireError) -> None:
        head = self._publisher.head
        version = 0 if head is None else head.version
        self._observers.refuse(self._publisher.stream.url, "", version, error)
