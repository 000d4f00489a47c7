"""Who writes to a destination: the holder of its record.

The records lie in ``thinwire-mirror/``, each with a number, and the one with the highest counts. It
says of which stream the chain is a copy, in which format, which versions of it are there, which one
is being written, and by whom.

No record is ever written over. Each one is made by put-if-absent, under the number after the one
that it was made from, by the holder as by one that begins and so becomes the holder. So of all that
go on from the same record one does, and the others stop: nothing that a record ever said is lost.
What belongs to a version is put after a record says that it is being written; and before it puts a
file, the holder looks for a higher number, and stops if there is one.

A number that is free may have been taken and given back: old records go. So whoever made one looks
once more, and stops if there is a higher one, which never goes.

What is left cannot be ruled out by put-if-absent: files that are on their way while another one
begins arrive after it looked. They have the same bytes as the other one's, unless the two were
asked for other options, or one of them writes the version in full and the other one does not. So
begin one at a time.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

import msgspec

from thinwire.errors import AlreadyExists, Fenced, LimitExceeded, StoreError, UnsafeStore
from thinwire.interop.formats import Format
from thinwire.interop.mirror_record import (
    MAX_NUMBER,
    MAX_RECORD_BYTES,
    MirrorRecord,
    list_records,
    read_record,
    record_key,
)
from thinwire.store import Store, prove_put_if_absent

# A listing may miss what is made and what is deleted meanwhile: these stay, so that it shows one.
_KEPT = 4


class HeldRecord:
    """The record of a destination, read; and written, once this one is its holder.

    Attributes:
        record: As it was read, or last written.
        was_found: Whether there was one.
        is_in_doubt: Whether the store failed while one was written: open the destination anew.

    Args:
        store: The destination.
        format: In which format.
        stream: The id of what it is a copy of.

    Raises:
        Corrupt: The record is malformed.
        InvalidArgument: It is of another format, or of a copy of something else.
        Fenced: Another one writes here at this moment.
    """

    def __init__(self, store: Store, format: Format, stream: str) -> None:
        self._store = store
        self._format = format
        self._numbers = list_records(store)
        self._is_holder = False
        self.record = MirrorRecord(format.name, stream, secrets.token_hex(8))
        self.was_found = bool(self._numbers)
        self.is_in_doubt = False
        if self._numbers:
            found = read_record(store, self._numbers[-1], format, stream)
            if found is None:
                raise self._fenced()
            self.record = msgspec.structs.replace(found, holder=self.record.holder)

    def hold(self) -> None:
        """Become the holder; later on, look whether this one still is.

        Raises:
            Fenced: Another one is.
        """
        if not self._is_holder:
            self.save()
        elif list_records(self._store, after=self._numbers[-1]):
            raise self._fenced()

    def save(self, **changes: Any) -> None:
        """Write the record, with changes; with the first one become the holder.

        Raises:
            Fenced: Another one wrote since this one did, or looked.
            UnsafeStore: The store ignores put-if-absent: nobody would know of another one.
            LimitExceeded: It names more than a reader would take.
            StoreError: The store failed: whether it is written is not known.
        """
        record = msgspec.structs.replace(self.record, **changes)
        size_bytes = len(msgspec.json.encode(record))
        number = self._numbers[-1] + 1 if self._numbers else 1
        if size_bytes > MAX_RECORD_BYTES or number > MAX_NUMBER:
            raise LimitExceeded(
                f"the record at {self._store.url} would be number {number}, of {size_bytes} bytes;"
                f" it may have {MAX_RECORD_BYTES}",
                hint="Keep fewer versions, or go on at another destination",
            )
        try:
            self._create(number, record)
        except StoreError:
            self.is_in_doubt = True
            raise
        self.record = record
        self._is_holder = True
        self._numbers.append(number)
        # What is left of them goes the next time.
        with suppress(StoreError):
            self._store.delete(record_key(old) for old in self._numbers[:-_KEPT])
            del self._numbers[:-_KEPT]

    def _create(self, number: int, record: MirrorRecord) -> None:
        """Make the record of a number, which nobody else did nor went beyond."""
        key, data = record_key(number), msgspec.json.encode(record)
        unsafe: UnsafeStore | None = None
        try:
            self._store.put_if_absent(key, data)
            if not self._is_holder:
                prove_put_if_absent(self._store, key, data)
        except UnsafeStore as error:
            unsafe = error
        except AlreadyExists:
            # It may be this one's own, of an attempt whose answer was lost.
            found = read_record(self._store, number, self._format, record.stream)
            if found != record:
                raise self._fenced() from None
        # Also where it could be made twice, as others went on so far that it was gone meanwhile.
        if list_records(self._store, after=number):
            raise self._fenced()
        if unsafe is not None:
            raise unsafe

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self._store.url}: another one began to write to this destination",
            hint="Stop one of them; one at a time writes to a destination",
            url=self._store.url,
        )
