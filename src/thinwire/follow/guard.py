"""Which moves a follower may make: never backwards, never to another stream, unless told to."""

from __future__ import annotations

from contextlib import suppress

from thinwire.errors import FormatError, InvalidArgument, LineageChanged
from thinwire.follow.install import Content
from thinwire.follow.selection import Selection
from thinwire.follow.sink import Mark, Sink
from thinwire.follow.stream import Stream
from thinwire.stream.encoding import digest_of_record
from thinwire.stream.records import Manifest


class Guard:
    """Compares what a sink holds with what a stream says.

    Args:
        stream: The stream.
        sink: The sink.
        selection: The tensors that the sink shall hold.
        accept_new_lineages: Whether to go along with them; None: as the stream's policy says.
    """

    def __init__(
        self,
        stream: Stream,
        sink: Sink,
        selection: Selection,
        accept_new_lineages: bool | None,
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._selection = selection
        self._accept_new_lineages = accept_new_lineages
        self._is_known = False

    def held(self) -> Mark | None:
        """What the sink holds; asks the stream nothing.

        Raises:
            LineageChanged: It is a version of another stream, as far as was read.
            InvalidArgument: It holds other tensors.
        """
        mark = self._sink.mark()
        if mark is None:
            return None
        if not self._stream.may_be(mark.stream):
            raise self._other_stream()
        if mark.tensors != self._selection.patterns:
            raise InvalidArgument(
                f"{self._sink} holds the tensors {mark.tensors or 'of the whole model'}, not "
                f"{self._selection.patterns or 'the whole model'}",
                hint="Follow into an empty folder, or with the same patterns",
            )
        return mark

    def mark(self) -> Mark | None:
        """What the sink holds, once it is known to be a version of this stream.

        Raises:
            LineageChanged: It is a version of another stream.
            Unavailable: There is no stream any more: its store is away.
            InvalidArgument: It holds other tensors.
        """
        mark = self.held()
        if mark is not None:
            self._stream.expect(self._sink)
            self._check_stream(mark)
        return mark

    def doubt(self) -> None:
        """Have :meth:`check_known` look again."""
        self._is_known = False

    def trust(self) -> None:
        """What the sink holds was just found in the stream."""
        self._is_known = True

    def check_known(self, mark: Mark) -> None:
        """Once: is the version that is held still what the stream says it was?

        Raises:
            LineageChanged: The stream was replaced by another, or set back.
            Unavailable: There is none any more: its store is away.
        """
        if self._is_known:
            return
        found = self._stream.manifest(mark.lineage, mark.version)
        if found is None:
            self._stream.forget()
            self._check_stream(mark)
        if found is None or digest_of_record(found) != mark.manifest:
            raise LineageChanged(
                f"version {mark.version}, which is held here, is not in {self._stream.url} any "
                "more: the stream was set back to an older state",
                hint="Find out who did that; reset=True (--reset) takes what the stream says now",
                version=mark.version,
            )
        self._is_known = True

    def _check_stream(self, mark: Mark) -> None:
        if mark.stream != self._stream.record().stream:
            raise self._other_stream()

    def _other_stream(self) -> LineageChanged:
        return LineageChanged(
            f"{self._sink} holds a version of another stream than the one at {self._stream.url}",
            hint="Check the URL, or follow into an empty folder: whoever begins anew there makes"
            " another stream",
        )

    def check_whole(self) -> None:
        """Refuse to prove a part of a model.

        Raises:
            InvalidArgument: The sink holds one; the manifest's digest is of all.
        """
        if not self._selection.is_all:
            raise InvalidArgument(
                f"{self._sink} holds a part of the model, and the digest of a version is of all",
                hint="Follow into an empty folder to have it fetched again",
            )

    def is_right(self, mark: Mark) -> bool:
        """Whether what the sink holds, read in full, is its version."""
        with suppress(FormatError, InvalidArgument):
            held = Content.of_checkpoint(self._sink.checkpoint())
            return held == Content(mark.weights, mark.layout)
        return False

    def check_direction(self, mark: Mark, wanted: Manifest) -> None:
        """May a sink go from what it holds to a version?

        Raises:
            LineageChanged: That would be backwards, or into a new lineage that is not accepted.
        """
        if wanted.version < mark.version:
            raise LineageChanged(
                f"version {wanted.version} is older than version {mark.version}, which is held",
                hint="Only reset=True (--reset) goes backwards",
                version=wanted.version,
            )
        accept = self._accept_new_lineages
        if accept is None:
            accept = self._stream.record().policy.accept_new_lineages
        if wanted.lineage != mark.lineage and not accept:
            raise LineageChanged(
                f"the stream went on in a new lineage with version {wanted.first}: the trainer "
                "restarted from other weights",
                hint="If that was meant, accept_new_lineages=True (--accept-new-lineages) follows",
                version=wanted.first,
            )
