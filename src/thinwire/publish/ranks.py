"""What the ranks of one publisher tell each other. Alone, there is nobody to talk to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec

from thinwire.errors import InvalidArgument, ThinwireError, Unavailable, from_os_error


class PeerFailed(Unavailable):
    """Another rank could not do its part; what went wrong there is told by that rank."""


class LineBroken(Unavailable):
    """The line for bulk data failed: another rank is gone, or lags."""


class Ranks(Protocol):
    """One rank's line to the others. Rank 0 decides; all call the same things in the same order.

    ``exchange`` moves bulk data and is called from one thread only; after an error of it other than
    ``PeerFailed`` that line is broken until :meth:`use_line` makes another one. The others are
    small messages, each under a topic of its own.

    Attributes:
        rank: This rank, from 0 on.
        size: How many there are.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def exchange(self, outgoing: Mapping[int, bytes] | None) -> dict[int, bytes | memoryview]:
        """Send something to some ranks and receive what they send here, by rank.

        None: this rank failed; then, and where another one did, everybody gets ``PeerFailed``.
        """

    @property
    def is_broken(self) -> bool:
        """Whether the line for bulk data is."""

    def use_line(self, name: str) -> None:
        """Use the line for bulk data of that name, and make it if it is another one than before.

        Raises:
            Unavailable: Not every rank came to make it.
        """

    def working(self, topic: str) -> AbstractContextManager[None]:
        """Show rank 0 meanwhile that this rank lives."""

    def tell(self, topic: str, data: bytes) -> None:
        """From rank 0 to all."""

    def hear(self, topic: str, *, sign_of_life: str = "") -> bytes:
        """What rank 0 tells.

        Raises:
            Deadline: Nothing came in time, nor a new sign of life under that topic.
        """

    def report(self, topic: str, data: bytes) -> None:
        """From any rank to rank 0."""

    def collect(self, topic: str, *, sign_of_life: str) -> list[bytes]:
        """On rank 0: what every rank reports. The others are shown meanwhile that it lives.

        Args:
            topic: What they report under; its first part is that of :meth:`working`.
            sign_of_life: Under what the others are shown it.

        Raises:
            Deadline: Some did not, and which, nor showed for so long that they work at it.
        """

    def forget_before(self, topic: str) -> None:
        """On rank 0: drop what was told and reported before a topic, all of which are numbers.

        Only where every rank is known to be done with it: who reports under a topic is.
        """

    def share(self, data: bytes) -> list[bytes]:
        """What each rank says, to all of them; called by every rank, from its main thread."""

    def close(self) -> None:
        """Let go of the line."""


class Alone:
    """The only rank."""

    rank = 0
    size = 1
    is_broken = False

    def __init__(self) -> None:
        self._told: dict[str, bytes] = {}

    def exchange(self, outgoing: Mapping[int, bytes] | None) -> dict[int, bytes | memoryview]:
        """See :class:`Ranks`."""
        if outgoing is None:
            raise PeerFailed("this rank failed")
        return dict(outgoing)

    def use_line(self, name: str) -> None:
        """See :class:`Ranks`."""

    def working(self, topic: str) -> AbstractContextManager[None]:
        """See :class:`Ranks`."""
        return nullcontext()

    def tell(self, topic: str, data: bytes) -> None:
        """See :class:`Ranks`."""
        self._told[topic] = data

    def hear(self, topic: str, *, sign_of_life: str = "") -> bytes:
        """See :class:`Ranks`."""
        return self._told[topic]

    def report(self, topic: str, data: bytes) -> None:
        """See :class:`Ranks`."""
        self._told[topic] = data

    def collect(self, topic: str, *, sign_of_life: str) -> list[bytes]:
        """See :class:`Ranks`."""
        return [self._told[topic]]

    def forget_before(self, topic: str) -> None:
        """See :class:`Ranks`."""
        for key in [key for key in list(self._told) if is_before(key, topic)]:
            del self._told[key]

    def share(self, data: bytes) -> list[bytes]:
        """See :class:`Ranks`."""
        return [data]

    def close(self) -> None:
        """See :class:`Ranks`."""


def is_before(key: str, topic: str) -> bool:
    """Whether a key is of an earlier topic than ``topic``."""
    first = key.partition("/")[0]
    return first.isdigit() and int(first) < int(topic)


class Fault(msgspec.Struct, array_like=True):
    """An error on its way to another rank."""

    code: str
    message: str
    hint: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """That of an error."""
        if isinstance(error, OSError) and not isinstance(error, ThinwireError):
            error = from_os_error(error, "cannot use", error.filename or "a file of this rank")
        if isinstance(error, ThinwireError):
            return cls(error.code, error.message, error.hint)
        return cls("", f"{type(error).__name__}: {error}", "")

    def error(self, rank: int | None = None) -> ThinwireError:
        """The error again, of the same kind; it names the rank that it comes from."""
        kind = _kind_of(self.code)
        message = self.message if rank is None else f"rank {rank}: {self.message}"
        return kind(message, hint=self.hint)


def _kind_of(code: str) -> type[ThinwireError]:
    kinds: list[type[ThinwireError]] = [ThinwireError]
    for kind in kinds:
        if kind.code == code and kind not in (PeerFailed, LineBroken):
            return kind
        kinds += kind.__subclasses__()
    return InvalidArgument if code else ThinwireError
