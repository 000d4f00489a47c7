"""A little follower of thinwire streams in a folder, written from docs/stream.md alone.

It shares nothing with the library, holds everything in memory, and follows whole models only. The
deltas are read by ``tests/independent/decoder.py``. § 8 and the like are sections of the document.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from .records import MissingError, RefusedError, canonical, check, parse


def _decoder() -> Any:
    path = Path(__file__).resolve().parents[1] / "independent" / "decoder.py"
    spec = importlib.util.spec_from_file_location("thinwire_independent_decoder", path)
    assert spec is not None
    assert spec.loader is not None
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]


decoder = _decoder()


# § 6: digests


def digest_of(data: bytes) -> str:
    return str(blake3(data).hexdigest())


def object_digest(record: dict[str, Any]) -> str:
    blocks = record["blocks"]
    return blocks[0] if len(blocks) == 1 else digest_of("".join(blocks).encode())


Row = tuple[str, str, Any, bytes]


def rows_digest(rows: Iterable[Row]) -> str:
    """§ 6.3 and 6.4; the last of a row is an XXH3-64 as format.md writes it, little-endian."""
    lines = [
        canonical([*row, digest[::-1].hex()]) + b"\n"
        for *row, digest in sorted(rows, key=lambda row: row[0].encode())
    ]
    return digest_of(b"".join(lines))


# Checkpoints in memory


@dataclass
class Model:
    """A checkpoint: weights files as header and tensors, and all other files."""

    headers: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, contents: dict[str, bytes]) -> Model:
        model = cls()
        for name, data in contents.items():
            if not name.endswith(".safetensors"):
                model.files[name] = data
                continue
            start = 8 + int.from_bytes(data[:8], "little")
            model.headers[name] = data[:start]
            for tensor, entry in spans(data[:start]).items():
                low, high = entry["data_offsets"]
                check(tensor not in model.tensors, "a tensor is there twice")
                model.tensors[tensor] = data[start + low : start + high]
        return model

    def contents(self) -> dict[str, bytes]:
        """Every file."""
        found = dict(self.files)
        for name, header in self.headers.items():
            ordered = sorted(spans(header).items(), key=lambda item: item[1]["data_offsets"])
            found[name] = header + b"".join(self.tensors[tensor] for tensor, _ in ordered)
        return found

    def weights(self) -> str:
        """The digest of weights, from the bytes."""
        rows = []
        for header in self.headers.values():
            for name, entry in spans(header).items():
                width = decoder.DTYPES[entry["dtype"]].width
                digest = decoder.run_digest(self.tensors[name], width << 20)
                rows.append((name, entry["dtype"], entry["shape"], digest))
        return rows_digest(rows)

    def layout(self) -> str:
        """The digest of all else, from the bytes."""
        files = {"header": self.headers, "file": self.files}
        return rows_digest(
            (name, kind, len(data), decoder.hash64(data))
            for kind, found in files.items()
            for name, data in found.items()
        )

    def content(self) -> str:
        """§ 6.5."""
        lines = [
            f"{digest_of(self.tensors[name])} {name}\n".encode()
            for name in sorted(self.tensors, key=str.encode)
        ]
        return digest_of(b"".join(lines))


def spans(header: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(header[8:])
    found.pop("__metadata__", None)
    return found


Record = dict[str, Any]
Link = dict[str, Any]


def link_of(manifest: Record) -> Link:
    return {"version": manifest["version"], "manifest": digest_of(canonical(manifest))}


def makes(record: Record) -> tuple[str, str]:
    """What a manifest, a merge or an anchor says that there will be."""
    return record["weights"], record["layout"]


class Reader:
    """A stream in a folder, read with pinned keys or without."""

    def __init__(self, folder: Path, pinned: Iterable[str] = ()) -> None:
        self._folder = folder
        self._pinned = frozenset(pinned)
        self.stream = self._signed(parse(self._get("stream.json"), "stream"))

    # § 3, 7, 5

    def _get(self, key: str) -> bytes:
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            raise MissingError(key) from None

    def _signed(self, record: Record) -> Record:
        signer, signature = record.get("signer", ""), record.get("signature", "")
        if not signer and not signature:
            check(not self._pinned, "not signed")
            return record
        check(not self._pinned or signer in self._pinned, "signed by a stranger")
        bare = {name: value for name, value in record.items() if name != "signature"}
        message = b"thinwire " + record["type"].encode() + b"\n" + canonical(bare)
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(
                bytes.fromhex(signature), message
            )
        except (InvalidSignature, ValueError):
            raise RefusedError("the signature does not fit") from None
        return record

    def _belongs(self, record: Record, lineage: str) -> Record:
        check(record["stream"] == self.stream["stream"], "of another stream")
        check(record["lineage"] == lineage, "of another lineage")
        return record

    def manifest(self, lineage: str, version: int) -> Record | None:
        try:
            data = self._get(f"{lineage}/manifests/{version:012}.json")
        except MissingError:
            return None
        found = self._belongs(self._signed(parse(data, "version")), lineage)
        check(found["version"] == version, "of another version")
        return found

    def require(self, lineage: str, link: Link) -> Record:
        found = self.manifest(lineage, link["version"])
        check(found is not None and link_of(found) == link, "not the manifest that a link names")
        assert found is not None
        return found

    def catalog(self, lineage: str) -> Record:
        """§ 5.5; a catalog that cannot be used is an empty one."""
        try:
            data = self._get(f"{lineage}/catalog.json")
            found = self._belongs(self._signed(parse(data, "catalog")), lineage)
        except RefusedError:
            return {"merges": [], "anchors": []}
        return {"merges": [], "anchors": []} | found

    def listed(self, lineage: str) -> Record:
        """§ 10.2: what a catalog would say, from listings."""
        found: Record = {"merges": [], "anchors": []}
        for kind, parts in (("merge", "shards"), ("anchor", "files")):
            for path in sorted((self._folder / lineage / f"{kind}s").glob("*.json")):
                try:
                    record = self._belongs(self._signed(parse(path.read_bytes(), kind)), lineage)
                except RefusedError:
                    continue
                hint = {"version": record["target"]["version"]}
                if kind == "merge":
                    hint["base"] = record["base"]["version"]
                hint["size"] = sum(part["size"] for part in record[parts])
                found[f"{kind}s"].append(hint)
        return found

    def merge(self, lineage: str, base: int, version: int) -> Record:
        data = self._get(f"{lineage}/merges/{base:012}-{version:012}.json")
        found = self._belongs(self._signed(parse(data, "merge")), lineage)
        ends = (found["base"]["version"], found["target"]["version"])
        check(ends == (base, version), "of other versions")
        return found

    # § 8

    def head(self) -> Record | None:
        """The newest version."""
        at = self._start()
        passed = set()
        while at is not None:
            at = self._last(at)
            if at["kind"] != "end":
                return at
            following = self.manifest(at["successor"], at["version"])
            if following is None:
                return self.require(at["lineage"], at["base"])
            check(following.get("base") == link_of(at), "the new lineage does not follow the end")
            check(following["previous"] == at["lineage"], "it follows another lineage")
            passed.add(at["lineage"])
            check(following["lineage"] not in passed, "the lineages lead in a circle")
            at = following
        return None

    def _start(self) -> Record | None:
        try:
            hint = parse(self._get("head.json"), "head")
            found = self.manifest(hint["lineage"], hint["version"])
        except RefusedError:
            found = None
        if found is not None:
            return found
        lineage = self.stream["lineage"]
        listed = sorted((self._folder / lineage / "manifests").glob("*.json"))
        return self.manifest(lineage, int(listed[-1].stem)) if listed else None

    def _last(self, at: Record) -> Record:
        stride = 1
        while at["kind"] != "end":
            found = self.manifest(at["lineage"], at["version"] + stride)
            if found is None:
                break
            at, stride = found, 2 * stride
        missing = at["version"] + stride
        while at["kind"] != "end" and missing - at["version"] > 1:
            middle = (at["version"] + missing) // 2
            found = self.manifest(at["lineage"], middle)
            at, missing = (at, middle) if found is None else (found, missing)
        return at

    def history(self, newest: Record) -> list[Record]:
        """Every manifest back to the first version, ends left out, each link verified (§ 8)."""
        found = [newest]
        while found[-1].get("base"):
            at = found[-1]
            below = self.require(at.get("previous", at["lineage"]), at["base"])
            if below["kind"] == "end":
                check(below["successor"] == at["lineage"], "the end names another successor")
                below = self.require(below["lineage"], below["base"])
            else:
                check(below["first"] == at["first"], "first differs within a lineage")
            found.append(below)
        check(found[-1]["lineage"] == self.stream["lineage"], "it begins in another lineage")
        return found[::-1]

    # § 10

    def rebuild(self, wanted: Record, by: str = "merges", copy: Model | None = None) -> Model:
        """A version from nothing: by "steps", "merges" where they are, or the newest "anchor".

        Where the catalog leads nowhere, by what listings show.
        """
        try:
            return self._rebuild(wanted, self.catalog(wanted["lineage"]), by, copy)
        except MissingError:
            return self._rebuild(wanted, self.listed(wanted["lineage"]), by, copy)

    def _rebuild(self, wanted: Record, catalog: Record, by: str, copy: Model | None) -> Model:
        lineage = wanted["lineage"]
        model, at = self._begin(wanted, catalog, by, copy)
        while at != link_of(wanted):
            wide = [
                hint["version"]
                for hint in catalog["merges"]
                if by != "steps"
                and hint["base"] == at["version"]
                and hint["version"] <= wanted["version"]
            ]
            if wide:
                merge = self.merge(lineage, at["version"], max(wide))
                check(merge["base"] == at, "the merge starts from another version")
                model, at = self.merged(model, merge), merge["target"]
                continue
            found = self.manifest(lineage, at["version"] + 1)
            check(found is not None and found["kind"] == "delta", "a version is missing")
            assert found is not None
            check(found["base"] == at, "the chain is broken")
            folder = f"{lineage}/deltas/{at['version']:012}-{found['version']:012}"
            model, at = self._apply(model, folder, found, found), link_of(found)
        check((model.weights(), model.layout()) == makes(wanted), "not what the manifest says")
        return model

    def merged(self, model: Model, merge: Record) -> Model:
        """What a merged delta makes of a model that holds its base."""
        target = self.require(merge["lineage"], merge["target"])
        check(makes(merge) == makes(target), "the merge makes something else")
        name = f"{merge['base']['version']:012}-{target['version']:012}"
        folder = f"{merge['lineage']}/deltas/{name}"
        return self._apply(model, folder, merge, target)

    def _begin(
        self, wanted: Record, catalog: Record, by: str, copy: Model | None
    ) -> tuple[Model, Link]:
        lineage = wanted["lineage"]
        later = [
            hint["version"]
            for hint in catalog["anchors"]
            if by == "anchor" and wanted["first"] < hint["version"] <= wanted["version"]
        ]
        if later:
            data = self._get(f"{lineage}/anchors/{max(later):012}.json")
            anchor = self._belongs(self._signed(parse(data, "anchor")), lineage)
            check(anchor["target"]["version"] == max(later), "of another version")
            target = self.require(lineage, anchor["target"])
            check(makes(anchor) == makes(target), "the anchor holds something else")
            return self._anchor(anchor, target), anchor["target"]
        first = self.manifest(lineage, wanted["first"])
        check(first is not None, "the first version is missing")
        assert first is not None
        if first["kind"] == "anchor":
            return self._anchor(first, first), link_of(first)
        check(copy is not None and copy.content() == first["content"], "no copy, or another one")
        assert copy is not None
        folder = f"{lineage}/deltas/{first['version']:012}-{first['version']:012}"
        return self._apply(copy, folder, first, first), link_of(first)

    def _anchor(self, record: Record, target: Record) -> Model:
        name = f"{target['version']:012}-{record['session'][:16]}"
        folder = f"{record['lineage']}/anchors/{name}"
        names = [file["name"] for file in record["files"]]
        check(len({name.casefold() for name in names}) == len(names), "two names are one")
        model = Model.of(
            {f["name"]: self._object(f"{folder}/{f['name']}", f) for f in record["files"]}
        )
        check((model.weights(), model.layout()) == makes(target), "the anchor's content")
        return model

    def _object(self, key: str, record: Record) -> bytes:
        """§ 5.7."""
        data = self._get(key)
        check(len(data) == record["size"], f"{key}: size")
        block = record["block"]
        for number, digest in enumerate(record["blocks"]):
            check(digest_of(data[number * block : (number + 1) * block]) == digest, f"{key}: block")
        return data

    def _apply(self, base: Model, folder: str, record: Record, target: Record) -> Model:
        """A step: its shards, the weights at both ends, the files (§ 10, 6.3, 6.4)."""
        old: list[Row] = []
        new: list[Row] = []
        layout: list[Row] = []
        is_old_known = True
        made = Model()
        for number, shard in enumerate(record["shards"]):
            name = f"{record['session'][:16]}-{number:04}-{object_digest(shard)[:32]}.tw"
            data = self._object(f"{folder}/{name}", shard)
            for tensor in decoder.read(data).tensors:
                row = (tensor.name, tensor.dtype, tensor.shape)
                is_old_known &= tensor.kind != "full"
                old.append((*row, tensor.digests[0]))
                if tensor.kind != "removed":
                    new.append((*row, tensor.digests[-1]))
            made.tensors |= decoder.decode(data, base.tensors)
            entries = {a.name: a for a in decoder.read(data).attachments if a.kind != "removed"}
            layout += [(a.name, a.kind, a.size, a.digest) for a in entries.values()]
            for file, content in decoder.attachments(data, base.headers | base.files).items():
                (made.headers if entries[file].kind == "header" else made.files)[file] = content
        check(rows_digest(new) == target["weights"], "the new weights")
        check(rows_digest(layout) == target["layout"], "the new files")
        check(not is_old_known or rows_digest(old) == base.weights(), "the old weights")
        return made
