"""Who writes to a destination: the holder of its record.

The records lie in ``thinwire-mirror/``, each with a number, and the one with the highest counts. It
says of which stream the chain is a copy, in which format, which versions of it are there, which one
is being written, and by whom.

Who writes to a destination first becomes its *holder*: it creates the record of the next number by
put-if-absent, and only the holder writes the record of its number. So of several that begin at the
same moment one becomes the holder, and the others stop before they wrote anything. Who held the
destination before looks for a higher number before it puts any file, and stops; and the file that
makes a version exist is put by put-if-absent too, if it is small and the version's own.

What is left cannot be ruled out by put-if-absent alone, as large files are not put so: files that
are on their way while another one begins arrive after it looked. They have the same bytes as the
other one's, unless the two were asked for other options, or one of them writes the version in full
and the other one does not. So begin one at a time.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

import msgspec

from thinwire.errors import AlreadyExists, Fenced, LimitExceeded, StoreError
from thinwire.interop.formats import Format
from thinwire.interop.mirror_record import (
    MAX_RECORD_BYTES,
    MirrorRecord,
    list_records,
    read_record,
    record_key,
)
from thinwire.store import Store


class HeldRecord:
    """The record of a destination, read; and written, once this one is its holder.

    Attributes:
        record: As it was read, or last written.

    Args:
        store: The destination.
        format: In which format.
        stream: The id of what it is a copy of.

    Raises:
        Corrupt: The record is malformed.
        InvalidArgument: It is of another format, or of a copy of something else.
        Fenced: Another one begins to write here at this moment.
    """

    def __init__(self, store: Store, format: Format, stream: str) -> None:
        self._store = store
        self._format = format
        self.record = MirrorRecord(format.name, stream, secrets.token_hex(8))
        self._older = list_records(store)
        self._number = self._older[-1] + 1 if self._older else 1
        self._is_holder = False
        self._found = self._read_newest()
        if self._found is not None:
            self.record = msgspec.structs.replace(self._found, holder=self.record.holder)

    def hold(self) -> None:
        """Become the holder; later on, look whether this one still is.

        Raises:
            Fenced: Another one is.
        """
        if not self._is_holder:
            self.save()
        elif list_records(self._store, after=self._number):
            raise self._fenced()

    def save(self, **changes: Any) -> None:
        """Write the record, with changes; with the first one become the holder.

        Raises:
            Fenced: Another one is, or wrote here since this one looked.
            LimitExceeded: It names more than a reader would take.
        """
        record = msgspec.structs.replace(self.record, **changes)
        data = msgspec.json.encode(record)
        if len(data) > MAX_RECORD_BYTES:
            raise LimitExceeded(
                f"the record at {self._store.url} would have {len(data)} bytes; it may have"
                f" {MAX_RECORD_BYTES}",
                hint="Keep fewer versions, or go on at another destination",
            )
        if not self._is_holder:
            self._claim(data)
        else:
            self._store.put(record_key(self._number), data)
        self.record = record

    def _claim(self, data: bytes) -> None:
        """Create the record of the next number: of several that try, one succeeds.

        Raises:
            Fenced: Another one did, or wrote here since this one looked.
        """
        key = record_key(self._number)
        if self._read_newest() != self._found:
            raise self._fenced()
        try:
            self._store.put_if_absent(key, data)
        except AlreadyExists:
            there = self._read_record(self._number)
            if there is None or there.holder != self.record.holder:
                raise self._fenced() from None
            # An attempt of this one, whose answer was lost.
            self._store.put(key, data)
        self._is_holder = True
        # Nobody reads them any more: what is left of them goes the next time.
        with suppress(StoreError):
            self._store.delete(record_key(number) for number in self._older)

    def _read_newest(self) -> MirrorRecord | None:
        """The record of whoever held this before; None: nobody did.

        Raises:
            Fenced: It is gone, as another one has begun.
        """
        if not self._older:
            return None
        found = self._read_record(self._older[-1])
        if found is None:
            raise self._fenced()
        return found

    def _read_record(self, number: int) -> MirrorRecord | None:
        return read_record(self._store, number, self._format, self.record.stream)

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self._store.url}: another one began to write to this destination",
            hint="Stop one of them; one at a time writes to a destination",
            url=self._store.url,
        )
