"""Records to bytes and back: one encoding, signed, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from thinwire.errors import Corrupt, FormatError, InvalidArgument, LimitExceeded, Unsupported
from thinwire.stream.blocks import DIGEST, ObjectRecord, check_record, digest_of
from thinwire.stream.keys import MAX_VERSION, is_lineage
from thinwire.stream.records import (
    FORMAT,
    Anchor,
    Catalog,
    Head,
    Lease,
    Link,
    Manifest,
    Merge,
    Policy,
    Signed,
    StreamRecord,
)
from thinwire.stream.signing import SigningKey, check_signature

# Before anything is fetched or parsed.
MAX_MANIFEST_BYTES = 1 << 25
MAX_SMALL_BYTES = 1 << 16
MAX_SHARDS = 1 << 12
MAX_FILES = 1 << 14
# A sink's mark, at most 64 KiB, holds it too.
MAX_METADATA_BYTES = 1 << 14
MAX_TEXT = 1 << 10
MAX_NUMBER = 1 << 62
# What a delta may need in blocks of all shards together is bounded by the manifest's own size.

_S = TypeVar("_S", bound=Signed)
_R = TypeVar("_R", Head, Lease)


class _Probe(msgspec.Struct):
    """What may hold anything, unread: an object of megabytes could take gigabytes once it is."""

    format: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()


def encode(record: msgspec.Struct) -> bytes:
    """The one encoding of a record."""
    return msgspec.json.encode(record, order="sorted")


def sign(record: _S, key: SigningKey | None) -> _S:
    """The record, signed; without a key as it is."""
    if key is None:
        return record
    named = msgspec.structs.replace(record, signer=key.public, signature="")
    return msgspec.structs.replace(named, signature=key.sign(_signed_bytes(named)))


def seal(record: _S, key: SigningKey | None) -> tuple[_S, bytes]:
    """The record, signed where there is a key, and its bytes: what is going to be committed.

    Raises:
        InvalidArgument: No reader would take it; the message says why.
    """
    signed = sign(record, key)
    data = encode(signed)
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise LimitExceeded(f"it takes {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}")
        parse(data, type(signed), "it")
    except FormatError as error:
        raise InvalidArgument(
            f"this {record.type} cannot be published, because no reader would take it: "
            f"{error.message}",
            hint="See the limits in docs/stream.md",
        ) from error
    return signed, data


def digest_of_record(record: Signed) -> str:
    """The digest by which others link to a record."""
    return digest_of(encode(record))


def link_of(manifest: Manifest) -> Link:
    """How other records name a version."""
    return Link(manifest.version, digest_of_record(manifest))


def parse(data: bytes, cls: type[_S], what: str, trusted: Collection[str] = ()) -> _S:
    """The record in ``data``, its signature and its content checked.

    Args:
        data: The bytes of an object.
        cls: The record it must be.
        what: Its name for messages.
        trusted: The pinned keys; empty: unsigned records are taken too.

    Raises:
        Unsupported: Of a newer format.
        Corrupt, LimitExceeded: Not such a record, or one that contradicts itself.
        SignatureInvalid: As :func:`thinwire.stream.signing.check_signature`.
    """
    record: _S = _decode(data, cls, what)
    if record.type != cls.TYPE:
        raise Corrupt(f"{what} is a {record.type[:40]!r} where a {cls.TYPE!r} belongs")
    check_parsed(record, what, trusted)
    return record


def check_parsed(record: Signed, what: str, trusted: Collection[str]) -> None:
    """Check the signature and the content of a record, which may have come inside another."""
    check_signature(_signed_bytes(record), record.signer, record.signature, trusted, what)
    if not is_lineage(record.stream):
        raise Corrupt(f"{what}: the stream's id is malformed")
    if not 0 <= record.created_ms < MAX_NUMBER:
        raise Corrupt(f"{what}: its time is out of range")
    _CHECKS[type(record)](record, what)


def parse_hint(data: bytes, cls: type[_R], what: str) -> _R:
    """An unsigned hint. Errors as :func:`parse`; whoever reads a hint can do without it."""
    record: _R = _decode(data, cls, what)
    return record


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON gives it back; scalars of numpy and torch are taken for what they hold.

    Raises:
        InvalidArgument: It is not JSON, or too large; names the key.
    """
    plain = {key: _plain(key, value) for key, value in metadata.items()}
    size = len(msgspec.json.encode(plain, order="sorted"))
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata takes {size} bytes; the limit is {MAX_METADATA_BYTES}",
            hint="Put large things into the checkpoint or elsewhere",
        )
    return plain


def _plain(key: Any, value: Any) -> Any:
    where = f"metadata[{key!r}]"
    if not isinstance(key, str):
        raise InvalidArgument(f"{where}: the key is {type(key).__name__}, not text")
    try:
        data = msgspec.json.encode(value, order="sorted", enc_hook=_scalar)
        plain = msgspec.json.decode(data)
        is_same = bool(plain == value)
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as error:
        raise InvalidArgument(f"{where} is not JSON: {error}") from None
    if not is_same:
        raise InvalidArgument(
            f"{where} is {str(value)[:80]}, which JSON does not give back as it was",
            hint="Use text, finite numbers, lists and tables; write NaN as None",
            key=key,
        )
    return plain


def _scalar(value: Any) -> Any:
    """The Python number in a scalar of another library."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not text, a number, a list or a table")


def _signed_bytes(record: Signed) -> bytes:
    bare = msgspec.structs.replace(record, signature="")
    return b"thinwire " + record.TYPE.encode() + b"\n" + encode(bare)


def _decode(data: bytes, cls: type[Any], what: str) -> Any:
    try:
        probe = msgspec.json.decode(data, type=_Probe)
        found = bytes(probe.format)
        if found.isdigit() and len(found) < 10 and int(found) > FORMAT:
            raise Unsupported(
                f"{what} is of stream format {int(found)}; this release reads {FORMAT}",
                hint="Upgrade thinwire",
            )
        if len(bytes(probe.metadata)) > MAX_METADATA_BYTES:
            raise LimitExceeded(f"{what}: too much metadata")
        record = msgspec.json.decode(data, type=cls)
        same = encode(record) == data
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise Corrupt(f"{what} is malformed: {str(error)[:200]}") from None
    if record.format != FORMAT or not same:
        raise Corrupt(f"{what} is not written the one way it can be")
    return record


def _check_stream(record: StreamRecord, what: str) -> None:
    if not is_lineage(record.lineage) or len(record.model) > MAX_TEXT:
        raise Corrupt(f"{what}: lineage or model name is malformed")
    if fault := policy_fault(record.policy):
        raise Corrupt(f"{what}: {fault}")


def policy_fault(policy: Policy) -> str | None:
    """What is wrong with a policy, or None."""
    levels = policy.merge_levels
    numbers = (policy.anchor_every, policy.keep_versions, policy.keep_age_s, policy.grace_s)
    if min(numbers) < 0 or max(numbers) > MAX_VERSION:
        return "a number of it is negative or absurdly large"
    if len(levels) > 16 or any(level < 2 or level > MAX_VERSION for level in levels):
        return "a merge level is below 2, or there are more than 16"
    for small, large in pairwise(levels):
        if large <= small or large % small:
            return f"merge level {large} is not a multiple of {small}"
    return None


def _check_version(record: Manifest, what: str) -> None:
    _check_place(record.lineage, record.session, what)
    if not 1 <= record.first <= record.version <= MAX_VERSION:
        raise Corrupt(f"{what}: version {record.version} of a lineage from {record.first} on")
    _check_base(record, what)
    counts = (record.raw_bytes, record.word_count, record.changed_count)
    if min(counts) < 0 or max(counts) >= MAX_NUMBER or abs(record.step or 0) >= MAX_NUMBER:
        raise Corrupt(f"{what}: a count or the step is out of range")
    if record.kind == "end":
        texts = record.weights + record.layout + record.content
        others = (record.shards, record.files, record.source, texts)
        leads_on = is_lineage(record.successor) and record.successor != record.lineage
        if not leads_on or any(others) or record.version == record.first:
            raise Corrupt(f"{what}: it does not hold what the end of a lineage holds")
        return
    if (record.version == record.first) == (record.kind == "delta"):
        raise Corrupt(f"{what}: version {record.version} cannot be of kind {record.kind!r}")
    has = (bool(record.files), bool(record.shards), record.source is not None)
    wanted = {
        "anchor": (True, False, False),
        "delta": (False, True, False),
        "reference": (False, True, True),
    }
    if has != wanted[record.kind] or record.successor:
        raise Corrupt(f"{what}: it does not hold what a version of kind {record.kind!r} holds")
    _check_digest(record.weights, what)
    _check_digest(record.layout, what)
    if record.kind == "reference":
        _check_digest(record.content, what)
    elif record.content:
        raise Corrupt(f"{what}: it names the content of a copy")
    if record.source is not None:
        source = record.source
        if max(len(source.name), len(source.revision)) > MAX_TEXT or not source.name.isprintable():
            raise Corrupt(f"{what}: its source is malformed")
    _check_parts(record.shards, MAX_SHARDS, what)
    _check_parts(record.files, MAX_FILES, what)


def _check_base(record: Manifest, what: str) -> None:
    follows = bool(record.previous)
    is_other = is_lineage(record.previous) and record.previous != record.lineage
    if follows and (record.version != record.first or not is_other):
        raise Corrupt(f"{what}: the lineage it follows is malformed")
    if record.base is None:
        if follows or record.version != record.first:
            raise Corrupt(f"{what}: it names no base")
        return
    _check_link(record.base, what)
    # The end of a lineage takes the number that the next one begins with.
    expected = record.version if record.version == record.first else record.version - 1
    if record.base.version != expected or follows != (record.version == record.first):
        raise Corrupt(f"{what}: version {record.version} on {record.base.version}")


def _check_merge(record: Merge, what: str) -> None:
    _check_place(record.lineage, record.session, what)
    for link in (record.base, record.target):
        _check_link(link, what)
    if record.base.version >= record.target.version or not record.shards:
        raise Corrupt(f"{what}: from {record.base.version} to {record.target.version}")
    _check_digest(record.weights, what)
    _check_digest(record.layout, what)
    _check_parts(record.shards, MAX_SHARDS, what)


def _check_anchor(record: Anchor, what: str) -> None:
    _check_place(record.lineage, record.session, what)
    _check_link(record.target, what)
    _check_digest(record.weights, what)
    _check_digest(record.layout, what)
    if not record.files:
        raise Corrupt(f"{what}: it has no files")
    _check_parts(record.files, MAX_FILES, what)


def _check_catalog(record: Catalog, what: str) -> None:
    """Whether what it lists is there shows only when it is used."""
    if not is_lineage(record.lineage) or not 0 <= record.steps_from <= MAX_VERSION:
        raise Corrupt(f"{what}: lineage or steps_from is malformed")
    listed = [(merge.version, merge.size) for merge in record.merges]
    for version, size in [*listed, *((hint.version, hint.size) for hint in record.anchors)]:
        if not 0 <= size < MAX_NUMBER or not 1 <= version <= MAX_VERSION:
            raise Corrupt(f"{what}: it lists version {version} of {size} bytes")
    for merge in record.merges:
        if not 1 <= merge.base < merge.version:
            raise Corrupt(f"{what}: it lists a delta from {merge.base} to {merge.version}")
    for entry in record.retired:
        if not 0 <= entry.base <= entry.version <= MAX_VERSION:
            raise Corrupt(f"{what}: versions {entry.base} to {entry.version} were dropped")


_CHECKS: dict[type[Signed], Callable[[Any, str], None]] = {
    StreamRecord: _check_stream,
    Manifest: _check_version,
    Merge: _check_merge,
    Anchor: _check_anchor,
    Catalog: _check_catalog,
}


def _check_place(lineage: str, session: str, what: str) -> None:
    if not is_lineage(lineage) or not is_lineage(session):
        raise Corrupt(f"{what}: lineage or session is malformed")


def _check_link(link: Link, what: str) -> None:
    if not 1 <= link.version <= MAX_VERSION:
        raise Corrupt(f"{what}: it links to version {link.version}")
    _check_digest(link.manifest, what)


def _check_digest(digest: str, what: str) -> None:
    if not DIGEST.fullmatch(digest):
        raise Corrupt(f"{what}: a digest is malformed")


def _check_parts(parts: list[Any], limit: int, what: str) -> None:
    if len(parts) > limit:
        raise LimitExceeded(f"{what}: {len(parts)} objects; the limit is {limit}")
    for part in parts:
        assert isinstance(part, ObjectRecord)
        check_record(part, what)
