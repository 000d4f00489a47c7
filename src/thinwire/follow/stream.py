"""An opened stream: verified reads of what it says of itself."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import msgspec

from thinwire.errors import (
    Corrupt,
    FormatError,
    InvalidArgument,
    NotFound,
    SignatureInvalid,
    StreamError,
)
from thinwire.follow.presence import KnownStore
from thinwire.store import Store
from thinwire.store.wrappers import end_waits
from thinwire.stream import keys
from thinwire.stream.encoding import (
    MAX_MANIFEST_BYTES,
    MAX_SMALL_BYTES,
    digest_of_record,
    link_of,
    parse,
    parse_hint,
    policy_fault,
)
from thinwire.stream.records import (
    FORMAT,
    Anchor,
    AnchorHint,
    Catalog,
    Head,
    Link,
    Manifest,
    Merge,
    MergeHint,
    Policy,
    StreamRecord,
)
from thinwire.stream.signing import SigningKey, check_public


class Tip(NamedTuple):
    """Where a stream is.

    Attributes:
        head: The newest version; None: none was published yet.
        end: The end of the head's lineage, whose successor has no version yet; usually None.
    """

    head: Manifest | None
    end: Manifest | None


class Stream:
    """A stream at a URL. Opening asks the store nothing; reading verifies everything.

    Make one with :func:`open_stream`. Safe to use from several threads.

    Attributes:
        store: Its object store.
        trusted_keys: The pinned public keys; empty: unsigned streams are taken too.
        signing_key: What publishers and maintainers sign with.
        model: The model's name, for a stream yet to be created.
        asked_policy: The policy that was asked for; None: none was.
        policy: The policy, for a stream yet to be created.
    """

    def __init__(
        self,
        store: Store,
        *,
        model: str = "",
        policy: Policy | None = None,
        signing_key: SigningKey | None = None,
        trusted_keys: Collection[str] = (),
    ) -> None:
        self.store = store
        self.model = model
        self.asked_policy = policy
        self.policy = policy or Policy()
        if fault := policy_fault(self.policy):
            raise InvalidArgument(f"policy: {fault}", hint="See docs/operations.md")
        self.signing_key = signing_key
        if signing_key is not None and not trusted_keys:
            trusted_keys = [signing_key.public]
        self.trusted_keys = frozenset(map(check_public, trusted_keys))
        if signing_key is not None and signing_key.public not in self.trusted_keys:
            raise InvalidArgument(
                f"the signing key's own public key {signing_key.public} is not pinned: what it "
                "signs would be refused here too",
                hint="Pin it beside the others (trusted_keys=, --trust)",
            )
        self._known = KnownStore(store)
        self._record: StreamRecord | None = None
        # Of all streams that were read here: one may have been replaced.
        self._ids: set[str] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it is; holds no credential."""
        return self.store.url

    def __repr__(self) -> str:
        return f"Stream({self.url!r})"

    def record(self) -> StreamRecord:
        """What the stream says of itself; read once.

        Raises:
            NotFound: There is no stream at this URL.
            Unavailable: There is none, and there was one: the store is away.
        """
        with self._lock:
            if self._record is None:
                self._record = self._read_record()
            return self._record

    def expect(self, holder: object = "") -> None:
        """Say that there was a stream at this URL: if there is none now, the store is away.

        Args:
            holder: What holds a version of it, such as a folder.
        """
        self._known.expect(holder)

    def may_be(self, stream: str) -> bool:
        """Whether it is the stream of that id, as far as was read; asks the store nothing."""
        return not self._ids or stream in self._ids

    def forget(self) -> None:
        """Have :meth:`record` read again: its policy may have been changed."""
        with self._lock:
            self._record = None

    def check_there(self) -> None:
        """Make sure that the stream is still there, before something is made in it.

        Raises:
            NotFound, Unavailable: As :meth:`record`.
        """
        self.forget()
        self.record()

    def end_waits(self) -> None:
        """Have calls to the store that are being tried again fail now. From any thread."""
        end_waits(self.store)

    def check_key(self) -> None:
        """Refuse to write unsigned records to a signed stream: pinned followers could not use them.

        Raises:
            InvalidArgument: The stream is signed, and there is no signing key.
        """
        if self.record().signer and self.signing_key is None:
            raise InvalidArgument(
                f"{self.url} is signed by {self.record().signer}, and no signing key was given",
                hint="Give the key (signing_key=, --key or THINWIRE_SIGNING_KEY)",
            )

    def manifest(self, lineage: str, version: int) -> Manifest | None:
        """A version's manifest, or the end of the lineage in its place; None: not there (yet)."""
        key = keys.manifest(lineage, version)
        try:
            data = self.store.get(key, limit_bytes=MAX_MANIFEST_BYTES)
        except NotFound:
            return None
        found = parse(data, Manifest, self._name(key), self.trusted_keys)
        self._check_belongs(found, lineage, key)
        if found.version != version:
            raise self._misplaced(key)
        return found

    def require(self, lineage: str, link: Link) -> Manifest:
        """The manifest that a link names.

        Raises:
            Corrupt: Another one lies in its place.
            NotFound: Nothing does.
        """
        key = keys.manifest(lineage, link.version)
        found = self.manifest(lineage, link.version)
        if found is None:
            raise NotFound(f"{self._name(key)} is not there", hint="`thinwire fsck` shows more")
        if digest_of_record(found) != link.manifest:
            raise Corrupt(
                f"{self._name(key)} is not the manifest that the chain names",
                hint="Someone replaced it; `thinwire fsck` shows what else",
            )
        return found

    def anchor(self, lineage: str, version: int) -> Anchor | None:
        """The manifest of an anchor made later on, or None."""
        key = keys.anchor(lineage, version)
        try:
            data = self.store.get(key, limit_bytes=MAX_MANIFEST_BYTES)
        except NotFound:
            return None
        found = parse(data, Anchor, self._name(key), self.trusted_keys)
        self._check_belongs(found, lineage, key)
        if found.target.version != version:
            raise self._misplaced(key)
        return found

    def merge(self, lineage: str, base: int, version: int) -> Merge | None:
        """The manifest of a merged delta, or None."""
        key = keys.merge(lineage, base, version)
        try:
            data = self.store.get(key, limit_bytes=MAX_MANIFEST_BYTES)
        except NotFound:
            return None
        found = parse(data, Merge, self._name(key), self.trusted_keys)
        self._check_belongs(found, lineage, key)
        if (found.base.version, found.target.version) != (base, version):
            raise self._misplaced(key)
        return found

    def catalog(self, lineage: str) -> Catalog:
        """What there is besides step deltas; empty where there is nothing to be used.

        It may be out of date, or missing. On a signed stream it must be signed.
        """
        key = keys.catalog(lineage)
        empty = self.empty_catalog(lineage)
        try:
            data = self.store.get(key, limit_bytes=MAX_MANIFEST_BYTES)
            found = parse(data, Catalog, self._name(key), self.trusted_keys)
        except (NotFound, FormatError, SignatureInvalid):
            return empty
        if (found.lineage, found.stream) != (lineage, empty.stream):
            return empty
        return found

    def empty_catalog(self, lineage: str) -> Catalog:
        """A catalog that says nothing."""
        return Catalog(
            format=FORMAT,
            type=Catalog.TYPE,
            stream=self.record().stream,
            created_ms=0,
            lineage=lineage,
        )

    def listed(self, lineage: str) -> Catalog:
        """What a catalog would say, from listings: for when there is none that is of use.

        Asks for every manifest of a merged delta: many requests, in a case that is rare.
        """
        merges = []
        for base, version in self.listed_merges(lineage):
            with suppress(FormatError, StreamError):
                if (found := self.merge(lineage, base, version)) is not None:
                    merges.append(MergeHint(base, version, found.payload_bytes))
        anchors = []
        for version in self.listed_anchors(lineage):
            with suppress(FormatError, StreamError):
                if (anchor := self.anchor(lineage, version)) is not None:
                    anchors.append(AnchorHint(version, anchor.payload_bytes))
        return msgspec.structs.replace(self.empty_catalog(lineage), merges=merges, anchors=anchors)

    def listed_merges(self, lineage: str) -> list[tuple[int, int]]:
        """The merged deltas that a listing shows, as (base, version)."""
        folder = keys.merges(lineage)
        names = (entry.key.removeprefix(folder) for entry in self.store.list(folder))
        found = (keys.versions_of(name.removesuffix(".json")) for name in names)
        return [versions for versions in found if versions is not None]

    def listed_anchors(self, lineage: str) -> list[int]:
        """The versions of the anchors made later on that a listing shows."""
        folder = keys.anchors(lineage)
        found = []
        for entry in self.store.list(folder):
            name = entry.key.removeprefix(folder)
            version = keys.version_of(name.removesuffix(".json"))
            if name.endswith(".json") and version is not None:
                found.append(version)
        return found

    def head_hint(self) -> Head | None:
        """About where the stream is, or None."""
        try:
            data = self.store.get(keys.HEAD, limit_bytes=MAX_SMALL_BYTES)
            found = parse_hint(data, Head, self._name(keys.HEAD))
        except (NotFound, FormatError):
            return None
        usable = keys.is_lineage(found.lineage) and 1 <= found.version <= keys.MAX_VERSION
        return found if usable else None

    def tip(self, start: Manifest | None = None) -> Tip:
        """Where the stream is now: the truth, found from a hint.

        Versions of a lineage have no holes, so the newest is found by doubling steps and halving
        from one that exists: requests grow with the logarithm of what lies between.

        Args:
            start: A version known to exist; None: begin at the hint.
        """
        at = start or self._hinted() or self._listed(self.record().lineage)
        if at is None:
            return Tip(None, None)
        seen: set[str] = set()
        while True:
            at = self._last_of_lineage(at)
            if at.kind != "end":
                return Tip(at, None)
            seen.add(at.lineage)
            following = self.manifest(at.successor, at.version)
            if following is None:
                return Tip(self._before(at), at)
            follows = following.base == link_of(at) and following.previous == at.lineage
            if not follows or following.lineage in seen:
                raise Corrupt(
                    f"{self.url}: the lineage that begins with version {at.version} does not follow"
                    " the one that ends there",
                    hint="Someone changed the bucket; `thinwire fsck` shows what else",
                )
            at = following

    def _hinted(self) -> Manifest | None:
        hint = self.head_hint()
        # A hint may name anything: what it leads to counts only if it is right.
        with suppress(FormatError, SignatureInvalid):
            return None if hint is None else self.manifest(hint.lineage, hint.version)
        return None

    def newest_listed(self, lineage: str) -> int:
        """The newest version of a lineage that a listing shows; 0: none."""
        folder = keys.manifests(lineage)
        newest = 0
        for entry in self.store.list(folder):
            name = entry.key.removeprefix(folder).removesuffix(".json")
            newest = max(newest, keys.version_of(name) or 0)
        return newest

    def _listed(self, lineage: str) -> Manifest | None:
        newest = self.newest_listed(lineage)
        return self.manifest(lineage, newest) if newest else None

    def _last_of_lineage(self, at: Manifest) -> Manifest:
        low, stride = at, 1
        while True:
            found = self._probe(low, low.version + stride)
            if found is None:
                break
            low, stride = found, stride * 2
        high = low.version + stride
        while high - low.version > 1:
            middle = self._probe(low, (low.version + high) // 2)
            if middle is None:
                high = (low.version + high) // 2
            else:
                low = middle
        return low

    def _probe(self, low: Manifest, version: int) -> Manifest | None:
        if low.kind == "end" or version > keys.MAX_VERSION:
            return None
        return self.manifest(low.lineage, version)

    def _before(self, end: Manifest) -> Manifest | None:
        """The last version before the end of a lineage; None: it had none."""
        if end.base is None or end.version == end.first:
            return None
        return self.require(end.lineage, end.base)

    def _read_record(self) -> StreamRecord:
        try:
            data = self._known.get(keys.STREAM, limit_bytes=MAX_SMALL_BYTES)
        except NotFound as error:
            raise NotFound(
                f"there is no stream at {self.url}",
                hint="Check the URL; the first publish makes the stream",
                url=self.url,
            ) from error
        record = parse(data, StreamRecord, self._name(keys.STREAM), self.trusted_keys)
        self._ids.add(record.stream)
        return record

    def _check_belongs(self, record: Manifest | Merge | Anchor, lineage: str, key: str) -> None:
        if record.lineage != lineage or record.stream != self.record().stream:
            raise self._misplaced(key)

    def _misplaced(self, key: str) -> Corrupt:
        return Corrupt(
            f"{self._name(key)} belongs elsewhere: it was renamed, or copied from another place",
            hint="Someone changed the bucket; `thinwire fsck` shows what else",
        )

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"
