"""Where the next version goes, and its commit: the only code that makes a version exist."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import NamedTuple

from thinwire.errors import AlreadyExists, CommitConflict, Fenced, LineageChanged, NotFound
from thinwire.follow import Stream
from thinwire.follow.fetch import in_parallel
from thinwire.stream import keys
from thinwire.stream.encoding import digest_of_record, encode, link_of, seal
from thinwire.stream.places import objects_of
from thinwire.stream.records import FORMAT, Head, Link, Manifest

# Objects that are looked for at a time.
_LOOKS = 16


class Place(NamedTuple):
    """Where the next version goes.

    Attributes:
        lineage: Its lineage.
        first: The first version of that.
        version: Its number.
        base: The version before, or the end of the lineage before; None: there is none.
        previous: For the first version of a lineage: the lineage that it follows, if any.
    """

    lineage: str
    first: int
    version: int
    base: Link | None
    previous: str

    @property
    def is_first(self) -> bool:
        """Whether it begins a lineage."""
        return self.version == self.first


class Landed(Exception):
    """An earlier attempt of ours, whose answer was lost, had succeeded."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.manifest = manifest


class Committer:
    """Knows the head of a stream, as one publisher sees it, and moves it.

    Attributes:
        session: A random id of this publisher's; part of the keys of what it uploads.
        head: The newest version; None: there is none.
        end: The end of the head's lineage, whose successor has no version yet; usually None.
    """

    def __init__(self, stream: Stream, *, new_lineage: bool) -> None:
        self._stream = stream
        self._begins_lineage = new_lineage
        self._fenced: str | None = None
        self.session = secrets.token_hex(16)
        self._sessions = {self.session}
        self._id = stream.record().stream
        self.head, self.end = stream.tip()

    def check_open(self) -> None:
        """Raise Fenced if this publisher was superseded."""
        if self._fenced is not None:
            raise Fenced(
                f"{self._stream.url}: this publisher was superseded: {self._fenced}",
                hint="Stop it, or open it again if it is the one that shall go on",
            )

    @property
    def goes_on(self) -> bool:
        """Whether the next version follows the head in its lineage."""
        begins = self._begins_lineage or self.end is not None
        return self.head is not None and not begins

    def renew_session(self) -> None:
        """Take another id, where an upload could replace what an earlier attempt uploaded."""
        self.session = secrets.token_hex(16)
        self._sessions.add(self.session)

    def place(self) -> Place:
        """Where the next version goes; begins the new lineage, if one was asked for.

        Raises:
            Fenced: This publisher was superseded.
            Unavailable, LineageChanged: What it goes after is not there.
            StoreError: The store failed.
        """
        self.check_open()
        self._check_there()
        if self._begins_lineage and self.end is None and self.head is not None:
            self.end = self._end_lineage(self.head)
        end, head = self.end, self.head
        if end is not None:
            return Place(end.successor, end.version, end.version, link_of(end), end.lineage)
        if head is None:
            return Place(self._stream.record().lineage, 1, 1, None, "")
        return Place(head.lineage, head.first, head.version + 1, link_of(head), "")

    def check_objects(self, manifest: Manifest) -> None:
        """Make sure that what a version is made of is there, as seen from here.

        Ranks upload by their own ways: one of them may have written to another place than this
        process would commit to. So may this one, if the store was away meanwhile.

        Raises:
            NotFound: An object is not there.
            Unavailable, LineageChanged: Nor is what the version goes after.
            StoreError: The store failed; also where an object is too short.
        """

        def look(key: str, size_bytes: int) -> None:
            try:
                self._stream.store.get_range(key, size_bytes, size_bytes)
            except NotFound as error:
                self._check_there()
                raise NotFound(
                    f"{key} was uploaded, and is not in {self._stream.url}: version "
                    f"{manifest.version} is not committed",
                    hint="Was the store away, or does a rank write to another one? Then publish"
                    " again",
                    key=key,
                ) from error

        objects = objects_of(manifest)
        in_parallel([partial(look, key, record.size) for key, record in objects.items()], _LOOKS)

    def commit(self, manifest: Manifest, data: bytes) -> None:
        """Make a version exist.

        Args:
            manifest: Its manifest, sealed.
            data: The bytes of that.

        Raises:
            CommitConflict, Fenced: Someone else took its place.
            Landed: An earlier attempt of ours took it; it is the head now.
            Unavailable, LineageChanged: What it goes after is not there; it does not exist.
            StoreError: The store failed; the version may or may not exist.
        """
        self._check_there()
        try:
            key = keys.manifest(manifest.lineage, manifest.version)
            self._stream.store.put_if_absent(key, data)
        except AlreadyExists:
            found = self._stream.manifest(manifest.lineage, manifest.version)
            if found is None or encode(found) != data:
                self._judge(found, manifest)
        self._move(manifest)

    def announce(self) -> None:
        """Write the hint where the head is.

        Raises:
            StoreError: It could not be written; that does no harm.
        """
        assert self.head is not None
        hint = Head(FORMAT, self.head.lineage, self.head.version)
        self._stream.store.put(keys.HEAD, encode(hint))

    def _check_there(self) -> None:
        """Make sure that what the next version goes after is in the store.

        A place that is empty, or another stream's, would take the version without a word, and the
        stream would lack it for ever once its own store is back.

        Raises:
            Unavailable: There is no stream: its store is away.
            LineageChanged: It was replaced, or set back.
        """
        last = self.end or self.head
        if last is not None:
            found = self._stream.manifest(last.lineage, last.version)
            if found is not None and digest_of_record(found) == digest_of_record(last):
                return
        self._stream.forget()
        if self._stream.record().stream == self._id and last is None:
            return
        # What is there now may be gone again at the next attempt.
        self._stream.forget()
        raise LineageChanged(
            f"{self._stream.url} is not the stream that this publisher published to, or was set"
            " back behind what it published last",
            hint="Find out who did that. Meant: open the publisher again, in another folder or with"
            " new_lineage=True (--new-lineage)",
        )

    def _move(self, head: Manifest) -> None:
        self.head, self.end = head, None
        self._begins_lineage = False

    def _judge(self, found: Manifest | None, ours: Manifest) -> None:
        """Who took our place?"""
        if found is not None and found.session in self._sessions and found.kind != "end":
            self._move(found)
            raise Landed(found)
        if found is not None and found.kind == "end":
            self._fenced = f"a new lineage was begun at version {found.version}"
            self.check_open()
        self._fenced = f"another publisher committed version {ours.version}"
        raise CommitConflict(
            f"{self._stream.url}: another publisher committed version {ours.version} first",
            hint="Only one trainer may publish to a stream. If the other one is gone, open the "
            "publisher again: it goes on from the head",
            version=ours.version,
        )

    def _end_lineage(self, head: Manifest) -> Manifest:
        """Take the place after the head, so that nobody else can go on there."""
        while True:
            end = Manifest(
                format=FORMAT,
                type=Manifest.TYPE,
                stream=head.stream,
                created_ms=time.time_ns() // 1_000_000,
                kind="end",
                lineage=head.lineage,
                first=head.first,
                version=head.version + 1,
                session=self.session,
                base=link_of(head),
                successor=secrets.token_hex(16),
            )
            end, data = seal(end, self._stream.signing_key)
            try:
                key = keys.manifest(end.lineage, end.version)
                self._stream.store.put_if_absent(key, data)
            except AlreadyExists:
                found = self._stream.manifest(end.lineage, end.version)
                if found is None:
                    raise
                if found.kind == "end":
                    return found
                head = found
            else:
                return end
