"""A stream's store behind a relay: reads go through the relay, and straight to the store else.

A relay is only ever believed as far as its bytes prove themselves. It may delay: by saying nothing
it costs some seconds once, as it is left alone until a thread beside has seen that it answers; by
giving rubbish a second request; by giving bytes slowly what ``relays`` allows; by hiding what is
new ``absence.ABSENT_CHECK_S``, and then less: what it says is missing is looked up more often.
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.follow.relay_first import RelayFirst
from thinwire.store import Store
from thinwire.store.clock import Clock, SystemClock
from thinwire.store.wrappers import RetryingStore, StoreWrapper, end_waits


class RelayedStore(StoreWrapper):
    """Reads go through a relay, and to the store itself where that has no answer or a wrong one.

    Signed records are proved before they are given out. Without pinned keys nothing would prove
    them, so they are read from the store itself; what they name is proved by them, and comes
    through the relay. What nothing proves, which is listings and the hint where the stream is,
    comes from the store while that answers.

    Args:
        relay: The relay's read side, without retries.
        upstream: The store, without retries.
        trusted_keys: The pinned public keys.
        retry_s: How long to go on when neither has an answer.
        clock: Tells the time.

    Attributes:
        upstream: The store itself, for what a relay gave wrongly.
    """

    def __init__(
        self,
        relay: Store,
        upstream: Store,
        *,
        trusted_keys: Collection[str] = (),
        retry_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._relay_first = RelayFirst(relay, upstream, frozenset(trusted_keys), clock)
        super().__init__(
            RetryingStore(
                self._relay_first, retry_s, clock=clock, stand_in=self._relay_first.stand_in
            )
        )
        self.upstream: Store = RetryingStore(upstream, retry_s, clock=clock)

    def end_waits(self) -> None:
        """See ``StoreWrapper.end_waits``; both ways."""
        super().end_waits()
        end_waits(self.upstream)

    def distrust(self, what: str) -> bool:
        """What this thread read last was wrong data; returns whether the relay gave it.

        It is then left alone for a while, longer each time.
        """
        return self._relay_first.judge(what)

    @property
    def relayed_bytes(self) -> int:
        """Data that the relay gave, right or wrong; records are not counted."""
        return self._relay_first.relayed_bytes

    def believe(self) -> None:
        """What this thread read last was right data."""
        self._relay_first.judge(None)
