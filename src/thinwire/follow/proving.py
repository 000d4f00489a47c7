"""Records that came through somebody else's hands: what must hold before they are used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from thinwire.errors import Corrupt
from thinwire.stream.encoding import (
    MAX_MANIFEST_BYTES,
    MAX_SMALL_BYTES,
    parse,
    parse_hint,
)
from thinwire.stream.places import Place
from thinwire.stream.records import Anchor, Catalog, Head, Manifest, Merge, StreamRecord

_CLASSES: dict[str, Any] = {
    "stream": StreamRecord,
    "manifest": Manifest,
    "merge": Merge,
    "anchor": Anchor,
    "catalog": Catalog,
}
SMALL = frozenset({"stream", "head", "lease"})


def limit_of(place: Place) -> int:
    """The most bytes that a record at a place may have."""
    return MAX_SMALL_BYTES if place.kind in SMALL else MAX_MANIFEST_BYTES


def prove(
    place: Place, data: bytes, trusted_keys: Collection[str], *, url: str, stream: str = ""
) -> Any:
    """The record in ``data``, if it is one that may lie at ``place``.

    Args:
        place: Where it is said to lie; that of a record.
        data: Its bytes.
        trusted_keys: The pinned keys; empty: unsigned records are taken too.
        url: Where it came from, for messages.
        stream: The id of the stream it must be of; empty: any.

    Raises:
        FormatError, SignatureInvalid: It is not such a record.
    """
    what = f"{url}/{place.key}"
    if place.kind == "head":
        return parse_hint(data, Head, what)
    record = parse(data, _CLASSES[place.kind], what, trusted_keys)
    is_at_home = not stream or record.stream == stream
    if place.kind != "stream" and record.lineage != place.lineage:
        is_at_home = False
    if isinstance(record, Manifest) and record.version != place.version:
        is_at_home = False
    if isinstance(record, Anchor) and record.target.version != place.version:
        is_at_home = False
    if isinstance(record, Merge):
        spans = (record.base.version, record.target.version)
        is_at_home = is_at_home and spans == (place.base, place.version)
    if not is_at_home:
        raise Corrupt(
            f"{what} belongs elsewhere: it was renamed, or copied from another place",
            hint="Someone changed the bucket, or what lies between; `thinwire fsck` shows what "
            "else",
        )
    return record
