"""The thread that makes versions of what was captured, while training goes on."""

from __future__ import annotations

import threading

from thinwire.errors import Deadline, ThinwireError
from thinwire.publish.rank_publisher import Captured, RankPublisher
from thinwire.publish.ranks import Fault
from thinwire.publish.staging import Staging
from thinwire.stream.version import Version
from thinwire.torch.ticket import Ticket


class PublishThread:
    """Makes one version at a time.

    Args:
        publisher: What makes it, on every rank at once.
        deadline_s: How long :meth:`finish` waits.

    Attributes:
        ticket: That of the version that was begun last; None: none was.
    """

    def __init__(self, publisher: RankPublisher, deadline_s: float) -> None:
        self._publisher = publisher
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self.ticket: Ticket | None = None

    def start(
        self, topic: str, line: str, captured: Captured, ticket: Ticket, owner: object
    ) -> None:
        """Begin a version; the one before was finished.

        Args:
            topic: As of :meth:`RankPublisher.publish`.
            line: So, too.
            captured: What it is made of; what is staged is let go of at the end.
            ticket: What the trainer holds meanwhile.
            owner: Who closes this thread. It lives until the version's end, whoever lets go of it:
                it holds the rank's folder, and is waited for when the process ends.
        """
        ticket._captured()
        self.ticket = ticket
        self._thread = threading.Thread(
            target=self._run,
            args=(topic, line, captured, ticket, owner),
            name="thinwire-publish",
            daemon=True,
        )
        self._thread.start()

    def finish(self) -> None:
        """Rank 0 is done with the version before: hear of it, if this rank has not yet.

        Raises:
            Deadline: It is still at it, or nothing is known of what became of it.
        """
        self.join(self._deadline_s)
        if self._thread is not None and self._thread.is_alive():
            raise Deadline(
                f"this rank is still busy with the version before after {self._deadline_s:g} s",
                hint="Look at the logs of the other ranks",
            )
        try:
            self._publisher.settle()
        except ThinwireError:
            # A failure was told by the ticket already; to know nothing is not good enough.
            if not self._publisher.is_settled:
                raise

    def join(self, timeout_s: float) -> None:
        """Wait for its end, so long at most."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(
        self, topic: str, line: str, captured: Captured, ticket: Ticket, owner: object
    ) -> None:
        version = None
        failure: ThinwireError | None = None
        try:
            manifest = self._publisher.publish(topic, line, captured, ticket._enter)
            version = Version.of(manifest)
        except Exception as error:
            failure = error if isinstance(error, ThinwireError) else Fault.of(error).error()
        if isinstance(captured.staging, Staging) and self._publisher.is_settled:
            captured.staging.close()
        ticket._end("failed" if failure else "committed", version, failure)
