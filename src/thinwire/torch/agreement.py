"""What ranks agree on in the trainer's own thread: whether a publish takes place, and how."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Literal

import msgspec

from thinwire.errors import Deadline, InvalidArgument, ThinwireError
from thinwire.publish.publisher import facts_of
from thinwire.publish.ranks import Fault, Ranks
from thinwire.stream.version import Version
from thinwire.torch.ticket import Ticket

_LOG = logging.getLogger("thinwire")

WhenBusy = Literal["latest", "block"]


class Go(msgspec.Struct):
    """What rank 0 tells the others at each publish.

    ``line``: the name of the line for bulk data. ``fault``: there will be no publish.
    """

    step: int | None = None
    line: str = ""
    is_skipped: bool = False
    fault: Fault | None = None


class Agreement:
    """Has all ranks do what rank 0 does at a publish.

    Args:
        ranks: The line to the other ranks.
        deadline_s: How long a publish may wait for the one before.
    """

    def __init__(self, ranks: Ranks, deadline_s: float) -> None:
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._line = "0"

    def go(
        self,
        topic: str,
        step: int | None,
        last: Ticket | None,
        when_busy: WhenBusy,
        must_mend: bool,
    ) -> Go:
        """Whether this publish takes place, as rank 0 decides.

        Args:
            topic: Of this publish.
            step: The trainer's step.
            last: The publish before.
            when_busy: What to do where it is not done.
            must_mend: Whether the line for bulk data is to be made anew.
        """
        if self._ranks.rank == 0:
            go = self._decide(topic, last, when_busy)
            if must_mend and not go.is_skipped:
                self._line = topic
            go.line = self._line
            with suppress(ThinwireError):
                go.step = facts_of(step, None).step
            self._ranks.tell(f"{topic}/go", msgspec.msgpack.encode(go))
        heard = self._ranks.hear(f"{topic}/go", sign_of_life=f"{topic}/alive")
        return msgspec.msgpack.decode(heard, type=Go)

    def check_step(self, go: Go, step: int | None, head: Version | None) -> None:
        """Make sure that this rank publishes what rank 0 does.

        Args:
            go: What rank 0 told.
            step: This rank's step.
            head: The newest version.

        Raises:
            InvalidArgument: It publishes another step.
        """
        if head is not None and head.step is not None and step is not None and step < head.step:
            _LOG.warning(
                "step %s follows step %s in one lineage: where the trainer was restarted from an "
                "older checkpoint, new_lineage=True tells the followers",
                step,
                head.step,
            )
        if go.step != step:
            raise InvalidArgument(
                f"rank {self._ranks.rank} publishes step {step}, rank 0 step {go.step}",
                hint="Every rank must call publish at the same steps, with the same step",
            )

    def _decide(self, topic: str, last: Ticket | None, when_busy: WhenBusy) -> Go:
        if last is None or last.is_done:
            return Go()
        if when_busy == "latest":
            return Go(is_skipped=True)
        until_s = time.monotonic() + self._deadline_s
        while not last.is_done and time.monotonic() < until_s:
            self._ranks.tell(f"{topic}/alive", str(time.monotonic()).encode())
            with suppress(ThinwireError):
                last.wait(min(1.0, self._deadline_s / 4))
        if last.is_done:
            return Go()
        error = Deadline(
            f"the version before is still on its way after {self._deadline_s:g} s",
            hint="Is the store reachable? The observer is told of every failure",
        )
        return Go(fault=Fault.of(error))
