"""An unsigned stream whose bucket belongs to an attacker: valid JSON that means harm.

Whatever it says, nothing is written outside the sink's folder, memory and fetched bytes stay
bounded, and errors are ours. Hints that are garbage or lies do not keep followers from the head.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import (
    FormatError,
    LimitExceeded,
    NotFound,
    StreamError,
    ThinwireError,
    Unavailable,
    Unsupported,
)
from thinwire.follow import CheckpointSink, Follower, open_stream
from thinwire.maintain import Maintainer, fsck
from thinwire.publish import Publisher
from thinwire.store import CountingStore
from thinwire.stream.encoding import MAX_MANIFEST_BYTES
from thinwire.stream.records import Policy

from .making import (
    Arrays,
    Content,
    DictStore,
    all_bytes,
    blake3_of,
    content_of,
    first_arrays,
    read_checkpoint,
    read_mark,
    sink_bytes,
    stepped,
)

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
HEAD = 9
Objects = dict[str, bytes]
Record = dict[str, Any]
Change = Callable[[Record], Record]

# What a follower may hold while it refuses something; the objects themselves are the store's.
MEMORY_BYTES = 48 << 20


class Honest:
    """A stream of nine versions, with merges and later anchors, and sinks at some of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        store = DictStore()
        policy = Policy(merge_levels=(2, 4), anchor_every=3)
        self.arrays: dict[int, Arrays] = {}
        arrays = first_arrays()
        with Publisher(open_stream(store, policy=policy), root / "p", maintain=False) as publisher:
            for version in range(1, HEAD + 1):
                arrays = self.arrays[version] = stepped(arrays, version)
                publisher.publish(arrays, step=version)
                if version % 3 == 1:
                    with Maintainer(open_stream(store), root / "work") as maintainer:
                        maintainer.run_once()
        self.objects = dict(store.objects)
        self.lineage = next(k for k in store.objects if "/manifests/" in k).partition("/")[0]
        for version in (3, 8):
            for part in (False, True):
                folder = root / f"at-{version}{'-part' if part else ''}"
                with self.follower(store, folder, part) as follower:
                    follower.catch_up(version)
        self.store = store

    @staticmethod
    def follower(store: Any, folder: Path, part: bool = False) -> Follower:
        tensors = ["layers.0.*"] if part else None
        sink = CheckpointSink(folder, workers=1)
        return Follower(open_stream(store), sink, tensors=tensors, lease=False)

    def check(self, sink: Path, before: dict[str, bytes], part: bool) -> None:
        """It is as it was, or further on at a version as it was published."""
        mark = read_mark(sink)
        if sink_bytes(sink) == before:
            return
        assert mark is not None
        version = mark["version"]
        assert mark["manifest"] == blake3_of(self.objects[self.key(version)])
        assert read_checkpoint(sink) == self.content(version, part)
        if ".thinwire-mark" in before:
            assert version > json.loads(before[".thinwire-mark"])["version"]

    def content(self, version: int, part: bool) -> Content:
        content = content_of(self.arrays[version])
        return content.part("layers.0.*") if part else content

    def key(self, version: int) -> str:
        return f"{self.lineage}/manifests/{version:012d}.json"

    def manifest(self, version: int) -> Record:
        found: Record = json.loads(self.objects[self.key(version)])
        return found

    @property
    def catalog_key(self) -> str:
        return f"{self.lineage}/catalog.json"

    @property
    def catalog(self) -> Record:
        found: Record = json.loads(self.objects[self.catalog_key])
        return found

    def anchor_key(self) -> str:
        """A later anchor's manifest, the newest."""
        return max(k for k in self.objects if re.search(r"anchors/\d+\.json", k))

    def merge_key(self) -> str:
        return max(k for k in self.objects if "/merges/" in k)


@pytest.fixture(scope="module")
def honest() -> Iterator[Honest]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Honest(Path(folder))


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder with a sink in it and things that are nobody's business."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root = Path(folder) / "home"
        (root / "neighbour").mkdir(parents=True)
        (root / "neighbour" / "model.safetensors").write_bytes(b"not yours")
        (root / "x").write_bytes(b"mine")
        yield root


def encode(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def surroundings(outside: Path) -> dict[str, bytes]:
    root = outside.parent
    found = {name: data for name, data in all_bytes(root).items() if "home/sink" not in name}
    return found | {
        str(path.relative_to(root)): b""
        for path in root.rglob("*")
        if path.is_dir() and "home/sink" not in str(path)
    }


def refuses(
    honest: Honest,
    objects: Objects,
    outside: Path,
    name: str,
    kinds: type[ThinwireError] | tuple[type[ThinwireError], ...] = (FormatError, StreamError),
    *,
    target: Any = "latest",
    fetched_bytes: int = 4 << 20,
) -> ThinwireError:
    """A follower meets hostile objects: it raises, and is where it was, or on the way there."""
    sink = outside / "sink"
    if name == "none" or name == "none-part":
        sink.mkdir()
    else:
        shutil.copytree(honest.root / name, sink)
    before, around = sink_bytes(sink), surroundings(outside)
    store = CountingStore(DictStore(objects))
    tracemalloc.start()
    try:
        with (
            honest.follower(store, sink, name.endswith("part")) as follower,
            pytest.raises(kinds) as found,
        ):
            follower.catch_up(target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    honest.check(sink, before, name.endswith("part"))
    assert surroundings(outside) == around
    assert peak < memory_for(objects), f"{peak} bytes of memory"
    assert store.counts().downloaded_bytes <= fetched_bytes
    assert sum(store.counts().requests.values()) < 100
    assert str(found.value)
    assert len(str(found.value)) < 2000
    shutil.rmtree(sink)
    return found.value


def reaches(
    honest: Honest, objects: Objects, outside: Path, names: list[str], most_bytes: int = 4 << 20
) -> None:
    """Whatever lies there, the follower ends at the right bits of the head.

    The memory of the first is traced, which makes it three times as slow.
    """
    for name in names:
        sink = outside / "sink"
        if name == "none" or name == "none-part":
            sink.mkdir()
        else:
            shutil.copytree(honest.root / name, sink)
        around = surroundings(outside)
        store = CountingStore(DictStore(objects))
        if name == names[0]:
            tracemalloc.start()
        part = name.endswith("part")
        try:
            with honest.follower(store, sink, part) as follower:
                try:
                    assert follower.catch_up().version == HEAD
                except ThinwireError as error:
                    raise AssertionError(f"{name} met {error!r}") from error
            # Nothing where it is not traced.
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert read_checkpoint(sink) == honest.content(HEAD, part)
        assert surroundings(outside) == around
        assert peak < memory_for(objects), f"{peak} bytes of memory"
        assert store.counts().downloaded_bytes < most_bytes
        shutil.rmtree(sink)


def memory_for(objects: Objects) -> int:
    """What a follower may take: some, and a few times what it has to parse."""
    records = [len(data) for key, data in objects.items() if key.endswith(".json")]
    return MEMORY_BYTES + 10 * max(size for size in records if size <= MAX_MANIFEST_BYTES)


# File names in anchors. Those that are fine on some system and not on another are refused on all.
BAD_NAMES = [
    "../x",
    "..",
    ".",
    "",
    "/etc/x",
    "a/b",
    "neighbour/../../x",
    "..\\x",
    "a\\b",
    "C:x",
    "C:\\x",
    "x\0y",
    "x\ny",
    "\x7f",
    "\u0085",
    ".thinwire-redo",
    ".thinwire-mark",
    ".thinwire-lock",
    ".thinwire-follower",
    ".Thinwire-Mark",
    ".thinwire",
    "..x",
    "n" * 256,
    "ü" * 128,
    "\ud800",
    ".nfs0000",
    "file://x",
]
CLASHES = [
    ("config.json", "Config.json"),
    ("stra\u00dfe", "STRASSE"),
    ("\u00e9", "e\u0301"),
    ("model.safetensors", "model.safetensors"),
    ("MODEL.safetensors", "model.safetensors"),
]


def file_record(name: str, data: bytes = b"{}") -> Record:
    return {"size": len(data), "block": 1 << 18, "blocks": [blake3_of(data)], "name": name}


class TestNames:
    @pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name[:20]))
    def test_of_files_in_the_first_version(self, honest: Honest, outside: Path, name: str) -> None:
        manifest = honest.manifest(1)
        manifest["files"].append(file_record(name))
        objects = self.with_file(honest, manifest, honest.key(1), name)
        for who in ("none", "none-part"):
            refuses(honest, objects, outside, who, FormatError, target=1)

    @pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name[:20]))
    def test_of_files_in_later_anchors(self, honest: Honest, outside: Path, name: str) -> None:
        """There are other ways to the head."""
        key = honest.anchor_key()
        anchor = json.loads(honest.objects[key])
        anchor["files"].append(file_record(name))
        objects = self.with_file(honest, anchor, key, name)
        reaches(honest, objects, outside, ["none"])

    @pytest.mark.parametrize("names", CLASHES, ids=lambda names: ascii(names[0]))
    def test_that_are_one_on_some_systems(
        self, honest: Honest, outside: Path, names: tuple[str, str]
    ) -> None:
        manifest = honest.manifest(1)
        manifest["files"] += [file_record(name) for name in names]
        objects = dict(honest.objects)
        for name in names:
            objects |= self.with_file(honest, manifest, honest.key(1), name)
        refuses(honest, objects, outside, "none", FormatError, target=1)

    def test_of_a_source(self, honest: Honest, outside: Path) -> None:
        """A folder that a manifest names is never opened by itself."""
        secret = outside / "neighbour"
        manifest = honest.manifest(1)
        step = honest.manifest(2)
        for kind, name in (("folder", str(secret)), ("huggingface", "../../neighbour")):
            manifest |= {
                "kind": "reference",
                "content": "0" * 64,
                "shards": step["shards"],
                "source": {"kind": kind, "name": name, "revision": "../.."},
            }
            manifest.pop("files", None)
            objects = {**honest.objects, honest.key(1): encode(manifest)}
            refuses(honest, objects, outside, "none", ThinwireError, target=1)

    @staticmethod
    def with_file(honest: Honest, record: Record, key: str, name: str) -> Objects:
        """The file is there, wherever the name leads."""
        try:
            data = encode(record)
        except UnicodeEncodeError:
            data = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        version = record.get("version") or record["target"]["version"]
        folder = f"{record['lineage']}/anchors/{version:012d}-{record['session'][:16]}"
        places = {f"{folder}/{name}": b"{}", os.path.normpath(f"{folder}/{name}"): b"{}"}
        return {**honest.objects, **places, key: data}


HUGE = 2**62
SHARDS: dict[str, Change] = {
    "a size beyond all": lambda s: {**s, "size": HUGE},
    "a size beyond 64 bits": lambda s: {**s, "size": 2**70},
    "a negative size": lambda s: {**s, "size": -1},
    "a size of its own that fits": lambda s: {**s, "size": s["size"] - 1},
    "too long by a byte": lambda s: {**s, "size": s["size"] + 1},
    "a size of nothing": lambda s: {**s, "size": 0},
    "no blocks": lambda s: {**s, "blocks": []},
    "too many blocks": lambda s: {**s, "blocks": s["blocks"] * 3},
    "many blocks": lambda s: {**s, "blocks": s["blocks"] * 100_000},
    "a block of nothing": lambda s: {**s, "block": 0},
    "a block of one": lambda s: {**s, "block": 1, "blocks": s["blocks"] * s["size"]},
    "a negative block": lambda s: {**s, "block": -(1 << 18)},
    "a huge block": lambda s: {**s, "block": 1 << 40},
    "an odd block": lambda s: {**s, "block": (1 << 18) + 1},
    "a float": lambda s: {**s, "size": float(s["size"])},
    "a float block": lambda s: {**s, "block": 262144.0},
    "text": lambda s: {**s, "size": str(s["size"])},
    "a boolean": lambda s: {**s, "size": True},
    "nothing": lambda s: {**s, "size": None},
    "a path for a digest": lambda s: {**s, "blocks": ["../../../../etc/passwd"]},
    "a digest with a line": lambda s: {**s, "blocks": [s["blocks"][0] + "\n"]},
    "a digest in capitals": lambda s: {**s, "blocks": [s["blocks"][0].upper()]},
    "a short digest": lambda s: {**s, "blocks": [s["blocks"][0][:32]]},
    "an unknown field": lambda s: {**s, "url": "http://127.0.0.1/"},
    "16 GiB in right blocks": lambda s: {
        **s,
        "size": 1 << 34,
        "block": 1 << 26,
        "blocks": s["blocks"] * 256,
    },
    "32 TiB in right blocks": lambda s: {
        **s,
        "size": 1 << 45,
        "block": 1 << 26,
        "blocks": s["blocks"] * (1 << 19),
    },
}


class TestSizes:
    @pytest.mark.parametrize("change", SHARDS.values(), ids=SHARDS)
    def test_of_shards(self, honest: Honest, outside: Path, change: Change) -> None:
        """Of the newest version: there is no way around it."""
        manifest = honest.manifest(HEAD)
        manifest["shards"] = [change(manifest["shards"][0])]
        objects = {**honest.objects, honest.key(HEAD): encode(manifest)}
        for name in ("at-8", "at-8-part", "at-3"):
            self.refused(honest, objects, outside, name)

    @pytest.mark.parametrize("change", SHARDS.values(), ids=SHARDS)
    def test_of_files(self, honest: Honest, outside: Path, change: Change) -> None:
        manifest = honest.manifest(1)
        manifest["files"] = [change(manifest["files"][0])]
        objects = {**honest.objects, honest.key(1): encode(manifest)}
        for name in ("none", "none-part"):
            self.refused(honest, objects, outside, name, target=1)

    @pytest.mark.parametrize("change", SHARDS.values(), ids=SHARDS)
    def test_of_merges_and_anchors(self, honest: Honest, outside: Path, change: Change) -> None:
        """Those are not needed: everybody gets to the head."""
        objects = dict(honest.objects)
        for key, data in honest.objects.items():
            record = json.loads(data) if key.endswith(".json") else {}
            if "/merges/" in key:
                record["shards"] = [change(record["shards"][0])]
                objects[key] = encode(record)
            elif re.search(r"anchors/\d+\.json", key):
                record["files"] = [change(record["files"][0])]
                objects[key] = encode(record)
        names = ["none", "at-3-part"]
        reaches(honest, objects, outside, names, most_bytes=150 << 20)

    def test_a_delta_larger_than_any_can_be(self, honest: Honest, outside: Path) -> None:
        """It is there, and right, but ten times the model."""
        data = os.urandom(80 << 20)
        blocks = [blake3_of(data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20)]
        manifest = honest.manifest(HEAD)
        shard = {"size": len(data), "block": 1 << 20, "blocks": blocks}
        manifest["shards"] = [shard]
        digest = blake3_of("".join(blocks).encode())[:32]
        folder = f"{honest.lineage}/deltas/{HEAD - 1:012d}-{HEAD:012d}"
        key = f"{folder}/{manifest['session'][:16]}-0000-{digest}.tw"
        objects = {**honest.objects, honest.key(HEAD): encode(manifest), key: data}
        error = refuses(honest, objects, outside, "at-8", LimitExceeded)
        assert "limit" in error.code

    def test_many_shards(self, honest: Honest, outside: Path) -> None:
        manifest = honest.manifest(HEAD)
        manifest["shards"] *= 5000
        objects = {**honest.objects, honest.key(HEAD): encode(manifest)}
        refuses(honest, objects, outside, "at-8", LimitExceeded, fetched_bytes=8 << 20)

    def test_the_same_shard_again(self, honest: Honest, outside: Path) -> None:
        """Each is small; together they would be fetched a thousand times over."""
        manifest = honest.manifest(HEAD)
        shard = manifest["shards"][0]
        manifest["shards"] = [shard] * 1000
        objects = {**honest.objects, honest.key(HEAD): encode(manifest)}
        folder = f"{honest.lineage}/deltas/{HEAD - 1:012d}-{HEAD:012d}"
        prefix = f"{folder}/{manifest['session'][:16]}"
        data = next(d for k, d in honest.objects.items() if k.startswith(folder))
        for number in range(1000):
            objects[f"{prefix}-{number:04d}-{shard['blocks'][0][:32]}.tw"] = data
        sink = outside / "sink"
        shutil.copytree(honest.root / "at-8", sink)
        before = sink_bytes(sink)
        store = CountingStore(DictStore(objects))
        with honest.follower(store, sink) as follower, pytest.raises(ThinwireError):
            follower.catch_up()
        assert sink_bytes(sink) == before
        assert store.counts().downloaded_bytes < 1000 * len(data) + (4 << 20)

    def test_an_anchor_larger_than_the_disk(self, honest: Honest, outside: Path) -> None:
        free = shutil.disk_usage(outside).free
        count = free // (1 << 26) + 2
        manifest = honest.manifest(1)
        record = manifest["files"][0]
        record |= {"size": count << 26, "block": 1 << 26, "blocks": record["blocks"] * count}
        objects = {**honest.objects, honest.key(1): encode(manifest)}
        refuses(
            honest,
            objects,
            outside,
            "none",
            (Unavailable, FormatError),
            target=1,
            fetched_bytes=8 << 20,
        )

    @staticmethod
    def refused(
        honest: Honest, objects: Objects, outside: Path, name: str, target: Any = "latest"
    ) -> None:
        # Such an object would lie elsewhere, so it may also be that it is not there.
        kinds = (FormatError, StreamError, Unavailable, NotFound)
        refuses(honest, objects, outside, name, kinds, target=target, fetched_bytes=100 << 20)


FIELDS: dict[str, Change] = {
    "version of another": lambda m: {**m, "version": HEAD + 1},
    "version 0": lambda m: {**m, "version": 0},
    "negative version": lambda m: {**m, "version": -HEAD},
    "version beyond the limit": lambda m: {**m, "version": 10**12},
    "version as float": lambda m: {**m, "version": float(HEAD)},
    "version as text": lambda m: {**m, "version": str(HEAD)},
    "version beyond 64 bits": lambda m: {**m, "version": 2**64 + HEAD},
    "first after it": lambda m: {**m, "first": HEAD + 1},
    "first is itself": lambda m: {**m, "first": HEAD},
    "negative first": lambda m: {**m, "first": -1},
    "negative count": lambda m: {**m, "changed_count": -1},
    "negative raw bytes": lambda m: {**m, "raw_bytes": -1},
    "words as float": lambda m: {**m, "word_count": 1e6},
    "no base": lambda m: {k: value for k, value in m.items() if k != "base"},
    "base of nothing": lambda m: {**m, "base": None},
    "base is itself": lambda m: {**m, "base": {**m["base"], "version": HEAD}},
    "base long ago": lambda m: {**m, "base": {**m["base"], "version": 2}},
    "base of other bytes": lambda m: {**m, "base": {**m["base"], "manifest": "0" * 64}},
    "base with a path": lambda m: {**m, "base": {**m["base"], "manifest": "../" * 9}},
    "another lineage": lambda m: {**m, "lineage": "f" * 32},
    "lineage with a path": lambda m: {**m, "lineage": "../../../etc/x"},
    "session with a path": lambda m: {**m, "session": "../../../../../../etc/passwd"},
    "session with dots": lambda m: {**m, "session": "." * 32},
    "another stream": lambda m: {**m, "stream": "f" * 32},
    "a kind of anchor": lambda m: {**m, "kind": "anchor"},
    "a kind of reference": lambda m: {**m, "kind": "reference"},
    "an end without successor": lambda m: {**m, "kind": "end"},
    "a kind of its own": lambda m: {**m, "kind": "evil"},
    "a delta with files": lambda m: {**m, "files": [file_record("x")]},
    "a delta with a source": lambda m: {**m, "source": {"kind": "folder", "name": "/"}},
    "no shards": lambda m: {**m, "shards": []},
    "other weights": lambda m: {**m, "weights": "0" * 64},
    "no weights": lambda m: {**m, "weights": ""},
    "weights with a path": lambda m: {**m, "weights": "../x"},
    "an unknown field": lambda m: {**m, "zzz": 1},
    "another type": lambda m: {**m, "type": "merge"},
    "no type": lambda m: {k: value for k, value in m.items() if k != "type"},
    "format 0": lambda m: {**m, "format": 0},
    "negative format": lambda m: {**m, "format": -1},
    "format as float": lambda m: {**m, "format": 1.0},
    "format as text": lambda m: {**m, "format": "1"},
    "format as boolean": lambda m: {**m, "format": True},
    "much metadata": lambda m: {**m, "metadata": {"x": "y" * 20_000}},
    "metadata in a list": lambda m: {**m, "metadata": []},
    "step as float": lambda m: {**m, "step": 1.5},
    "created as text": lambda m: {**m, "created_ms": "now"},
    "half a signature": lambda m: {**m, "signer": "a" * 64},
    "no signer": lambda m: {**m, "signature": "a" * 128},
    "a wrong signature": lambda m: {**m, "signer": "a" * 64, "signature": "b" * 128},
    "a long signer": lambda m: {**m, "signer": "a" * 100_000, "signature": "b"},
    "a default written out": lambda m: {**m, "successor": ""},
}


class TestFields:
    @pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS)
    def test_of_the_newest_version(self, honest: Honest, outside: Path, change: Change) -> None:
        manifest = change(honest.manifest(HEAD))
        objects = {**honest.objects, honest.key(HEAD): encode(manifest)}
        for name in ("at-8", "at-8-part", "at-3", "none"):
            error = refuses(honest, objects, outside, name)
            assert not error.retryable

    @pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS)
    def test_of_a_version_on_the_way(self, honest: Honest, outside: Path, change: Change) -> None:
        """With nothing else to go by."""
        others = re.compile(r"/merges/|/catalog|/anchors/\d+\.json")
        objects = {k: d for k, d in honest.objects.items() if not others.search(k)}
        objects[honest.key(5)] = encode(change(honest.manifest(5)))
        for name in ("at-3", "none"):
            refuses(honest, objects, outside, name)

    @pytest.mark.parametrize("when", [1, HEAD])
    def test_a_newer_format(self, honest: Honest, outside: Path, when: int) -> None:
        """Also where nothing else of it is known here."""
        for record in ({"format": 2}, {**honest.manifest(when), "format": 99, "new": [[]]}):
            objects = {**honest.objects, honest.key(when): encode(record)}
            name = "none" if when == 1 else "at-8"
            refuses(honest, objects, outside, name, Unsupported, target=when)
        objects = {**honest.objects, "stream.json": encode({"format": 2})}
        refuses(honest, objects, outside, "none", Unsupported)


def blanks(data: bytes) -> bytes:
    return data.replace(b'":', b'": ', 1)


WRITTEN: dict[str, Callable[[bytes], bytes]] = {
    "a blank": blanks,
    "a line after it": lambda d: d + b"\n",
    "a line before it": lambda d: b"\n" + d,
    "a byte order mark": lambda d: b"\xef\xbb\xbf" + d,
    "keys in another order": lambda d: json.dumps(
        dict(reversed(json.loads(d).items())), separators=(",", ":")
    ).encode(),
    "a key twice": lambda d: b'{"changed_count":0,' + d[1:],
    "a key twice, the same": lambda d: (
        d[:-1] + b',"word_count":' + str(json.loads(d)["word_count"]).encode() + b"}"
    ),
    "an escape": lambda d: d.replace(b'"kind"', b'"\\u006bind"'),
    "an exponent": lambda d: d.replace(b'"format":1', b'"format":1e0'),
    "minus zero": lambda d: d.replace(b'"raw_bytes":', b'"raw_bytes":-0,"x":'),
    "a leading zero": lambda d: d.replace(b'"format":1', b'"format":01'),
    "not a number": lambda d: d.replace(b'"format":1', b'"format":NaN'),
    "another value after it": lambda d: d + b"{}",
    "nothing": lambda d: b"",
    "null": lambda d: b"null",
    "a list": lambda d: b"[" + d + b"]",
    "a text": lambda d: json.dumps(d.decode()).encode(),
    "deep lists": lambda d: b"[" * 100_000,
    "deep objects": lambda d: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep metadata": lambda d: (
        d[:-1] + b',"metadata":{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}}"
    ),
    "deep and small metadata": lambda d: d.replace(
        b'"lineage"', b'"metadata":{"x":' + b"[" * 2000 + b"]" * 2000 + b'},"lineage"'
    ),
    "not unicode": lambda d: d.replace(b'"delta"', b'"\xff\xfe"'),
    "half a surrogate": lambda d: d.replace(b'"delta"', b'"\\ud800"'),
    "a long number": lambda d: d.replace(b'"format":1', b'"format":' + b"9" * 100_000),
    "a long negative number": lambda d: d.replace(b'"format":1', b'"format":-' + b"9" * 100_000),
    "zeros": lambda d: bytes(len(d)),
    "an open text": lambda d: b'"' + b"a" * 100_000,
    "another compression": lambda d: b"\x1f\x8b\x08" + d,
}


class TestWriting:
    """There is one way to write a record, and all others are refused, cheaply."""

    @pytest.mark.parametrize("change", WRITTEN.values(), ids=WRITTEN)
    def test_of_a_manifest(
        self, honest: Honest, outside: Path, change: Callable[[bytes], bytes]
    ) -> None:
        new = change(honest.objects[honest.key(HEAD)])
        assert new != honest.objects[honest.key(HEAD)]
        objects = {**honest.objects, honest.key(HEAD): new}
        for name in ("at-8", "none"):
            refuses(honest, objects, outside, name, FormatError)

    @pytest.mark.parametrize("change", WRITTEN.values(), ids=WRITTEN)
    def test_of_the_stream_record(
        self, honest: Honest, outside: Path, change: Callable[[bytes], bytes]
    ) -> None:
        data = honest.objects["stream.json"]
        if "word_count" in change.__code__.co_consts:
            pytest.skip("it has no such field")
        new = change(data)
        if new == data:
            pytest.skip("it has nothing to be changed so")
        refuses(honest, {**honest.objects, "stream.json": new}, outside, "none", FormatError)

    @pytest.mark.parametrize("change", WRITTEN.values(), ids=WRITTEN)
    def test_of_hints(
        self, honest: Honest, outside: Path, change: Callable[[bytes], bytes]
    ) -> None:
        """Nobody needs them."""
        for key, name in (("head.json", "none"), (honest.catalog_key, "at-3-part")):
            if "word_count" in change.__code__.co_consts:
                continue
            objects = {**honest.objects, key: change(honest.objects[key])}
            reaches(honest, objects, outside, [name])

    @pytest.mark.parametrize("key", ["manifest", "stream", "anchor"])
    def test_a_huge_one_is_not_read(self, honest: Honest, outside: Path, key: str) -> None:
        huge = b'{"format":1,"metadata":{"x":"' + b"a" * (100 << 20) + b'"}}'
        if key == "anchor":
            objects = {**honest.objects, honest.anchor_key(): huge}
            reaches(honest, objects, outside, ["none"])
            return
        objects = {**honest.objects, honest.key(HEAD) if key == "manifest" else "stream.json": huge}
        for name in ("none", "at-8"):
            refuses(honest, objects, outside, name, LimitExceeded)


def lie(honest: Honest, **fields: Any) -> bytes:
    """The catalog with other content, written the way it must be."""
    record = {**honest.catalog, **fields}
    defaults = {"merges": [], "anchors": [], "retired": [], "steps_from": 0, "is_over": False}
    return encode({k: v for k, v in record.items() if k not in defaults or v != defaults[k]})


CATALOGS: dict[str, Callable[[Honest], bytes]] = {
    "garbage": lambda h: os.urandom(5000),
    "empty": lambda h: b"",
    "huge": lambda h: b" " * (100 << 20),
    "of a newer format": lambda h: encode({"format": 2}),
    "of another lineage": lambda h: lie(h, lineage="f" * 32),
    "nothing": lambda h: lie(h, merges=[], anchors=[], steps_from=0),
    "no steps": lambda h: lie(h, steps_from=HEAD),
    "no steps for ever": lambda h: lie(h, steps_from=10**11),
    "no steps, ever": lambda h: lie(h, steps_from=2**63),
    "steps from before": lambda h: lie(h, steps_from=-5),
    "no steps and nothing else": lambda h: lie(h, merges=[], anchors=[], steps_from=HEAD),
    "anchors that are not": lambda h: lie(
        h, anchors=[{"version": v, "size": 1} for v in range(2, HEAD + 1)]
    ),
    "anchors beyond": lambda h: lie(
        h, anchors=[{"version": v, "size": 1} for v in (0, -1, HEAD + 1, 10**12, 2**63, 2**70)]
    ),
    "anchors for nothing": lambda h: lie(
        h, anchors=[{**a, "size": -(2**62)} for a in h.catalog["anchors"]]
    ),
    "anchors too dear": lambda h: lie(
        h, anchors=[{**a, "size": 2**62} for a in h.catalog["anchors"]]
    ),
    "many anchors": lambda h: lie(
        h, anchors=[{"version": v % HEAD + 1, "size": v} for v in range(20_000)]
    ),
    "many anchors far away": lambda h: lie(
        h, anchors=[{"version": v, "size": v} for v in range(20_000)]
    ),
    "merges that are not": lambda h: lie(
        h,
        merges=[
            {"base": b, "version": v, "size": 1} for v in range(2, HEAD + 1) for b in range(1, v)
        ],
    ),
    "merges for nothing": lambda h: lie(h, merges=[{**m, "size": 0} for m in h.catalog["merges"]]),
    "merges too dear": lambda h: lie(h, merges=[{**m, "size": 2**62} for m in h.catalog["merges"]]),
    "merges that go back": lambda h: lie(
        h,
        merges=[{**m, "base": m["version"], "version": m["base"]} for m in h.catalog["merges"]],
    ),
    "merges of nothing": lambda h: lie(h, merges=[{"base": 3, "version": 3, "size": 1}]),
    "merges from beyond": lambda h: lie(
        h, merges=[{"base": b, "version": HEAD, "size": 1} for b in (-1, 0, HEAD + 1, 2**70)]
    ),
    "many merges": lambda h: lie(
        h, merges=[{"base": v % 8 + 1, "version": v % 8 + 2, "size": v} for v in range(5000)]
    ),
    "many merges far away": lambda h: lie(
        h, merges=[{"base": v, "version": v + 1, "size": v} for v in range(1, 20_000)]
    ),
    "merges twice": lambda h: lie(h, merges=h.catalog["merges"] * 2),
    "no merges": lambda h: lie(h, merges=[]),
    "everything retired": lambda h: lie(
        h,
        retired=[
            {"kind": kind, "base": 0, "version": HEAD, "at_ms": 2**62}
            for kind in ("merge", "anchor", "steps")
        ],
    ),
    "it is over": lambda h: lie(h, is_over=True),
    "floats": lambda h: h.objects[h.catalog_key].replace(b'"size":', b'"size":1.5,"x":'),
    "a path": lambda h: lie(h, lineage="../../x"),
}

HEADS: dict[str, Callable[[Honest], bytes]] = {
    "garbage": lambda h: os.urandom(500),
    "empty": lambda h: b"",
    "huge": lambda h: b" " * (100 << 20),
    "of a newer format": lambda h: encode({"format": 2}),
    "version 0": lambda h: encode({"format": 1, "lineage": h.lineage, "version": 0}),
    "negative": lambda h: encode({"format": 1, "lineage": h.lineage, "version": -1}),
    "long ago": lambda h: encode({"format": 1, "lineage": h.lineage, "version": 1}),
    "beyond": lambda h: encode({"format": 1, "lineage": h.lineage, "version": HEAD + 1}),
    "far beyond": lambda h: encode({"format": 1, "lineage": h.lineage, "version": 10**12 - 1}),
    "too far": lambda h: encode({"format": 1, "lineage": h.lineage, "version": 10**12}),
    "beyond 64 bits": lambda h: encode({"format": 1, "lineage": h.lineage, "version": 2**70}),
    "another lineage": lambda h: encode({"format": 1, "lineage": "f" * 32, "version": 3}),
    "a path": lambda h: encode({"format": 1, "lineage": "../../x", "version": 3}),
    "a lineage of wrong length": lambda h: encode({"format": 1, "lineage": "", "version": 3}),
    "a float": lambda h: encode({"format": 1, "lineage": h.lineage, "version": 3.0}),
    "an unknown field": lambda h: encode(
        {"format": 1, "lineage": h.lineage, "version": 3, "url": "http://127.0.0.1"}
    ),
}


MERGES: dict[str, Callable[[Honest, Record], Record]] = {
    "of other links": lambda h, m: {**m, "target": {**m["target"], "manifest": "0" * 64}},
    "from other links": lambda h, m: {**m, "base": {**m["base"], "manifest": "0" * 64}},
    "of other weights": lambda h, m: {**m, "weights": "0" * 64},
    "of other sessions": lambda h, m: {**m, "session": "0" * 32},
    "that go back": lambda h, m: {**m, "base": m["target"], "target": m["base"]},
    "from elsewhere": lambda h, m: {**m, "base": {**m["base"], "version": 10**11}},
    "of another lineage": lambda h, m: {**m, "lineage": "f" * 32},
    "of another stream": lambda h, m: {**m, "stream": "f" * 32},
    "without shards": lambda h, m: {**m, "shards": []},
    "with shards twice": lambda h, m: {**m, "shards": m["shards"] * 2},
    "with shards of a step": lambda h, m: {**m, "shards": h.manifest(2)["shards"]},
    "with sessions that are paths": lambda h, m: {**m, "session": "../../../../../x"},
    "of the head": lambda h, m: {**m, "weights": h.manifest(HEAD)["weights"]},
}


class TestMerges:
    @pytest.mark.parametrize("change", MERGES.values(), ids=MERGES)
    def test_forged(
        self, honest: Honest, outside: Path, change: Callable[[Honest, Record], Record]
    ) -> None:
        objects = dict(honest.objects)
        for key, data in honest.objects.items():
            if "/merges/" in key:
                objects[key] = encode(change(honest, json.loads(data)))
        assert objects != honest.objects
        reaches(honest, objects, outside, ["none", "at-3", "at-3-part"])

    def test_a_merge_of_everything(self, honest: Honest, outside: Path) -> None:
        """From the first version to the head, where a delta of one step lies."""
        step = honest.manifest(HEAD)
        merge = json.loads(honest.objects[honest.merge_key()]) | {
            "base": honest.manifest(2)["base"],
            "target": {"version": HEAD, "manifest": blake3_of(honest.objects[honest.key(HEAD)])},
            "weights": step["weights"],
            "shards": step["shards"],
            "session": step["session"],
        }
        old = next(k for k in honest.objects if f"deltas/{HEAD - 1:012d}-{HEAD:012d}/" in k)
        objects = {
            **honest.objects,
            f"{honest.lineage}/merges/{1:012d}-{HEAD:012d}.json": encode(merge),
            honest.catalog_key: lie(honest, merges=[{"base": 1, "version": HEAD, "size": 1}]),
            old.replace(f"{HEAD - 1:012d}-", f"{1:012d}-"): honest.objects[old],
        }
        reaches(honest, objects, outside, ["none", "none-part"])


class TestHints:
    @pytest.mark.parametrize("make", CATALOGS.values(), ids=CATALOGS)
    def test_catalog(self, honest: Honest, outside: Path, make: Callable[[Honest], bytes]) -> None:
        objects = {**honest.objects, honest.catalog_key: make(honest)}
        names = ["none", "at-3-part", "at-8"]
        reaches(honest, objects, outside, names, most_bytes=40 << 20)

    @pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
    def test_head(self, honest: Honest, outside: Path, make: Callable[[Honest], bytes]) -> None:
        objects = {**honest.objects, "head.json": make(honest)}
        reaches(honest, objects, outside, ["none-part", "at-3"])

    def test_both_are_gone_or_lie(self, honest: Honest, outside: Path) -> None:
        for head in (HEADS["long ago"], HEADS["far beyond"], HEADS["another lineage"]):
            for name in ("anchors that are not", "no steps for ever", "merges that are not"):
                objects = {
                    **honest.objects,
                    "head.json": head(honest),
                    honest.catalog_key: CATALOGS[name](honest),
                }
                reaches(honest, objects, outside, ["none", "at-3"])

    @pytest.mark.parametrize("make", CATALOGS.values(), ids=CATALOGS)
    def test_maintainers_are_not_misled(
        self, honest: Honest, outside: Path, make: Callable[[Honest], bytes]
    ) -> None:
        """They write a right catalog again, and remove nothing that is needed."""
        store = DictStore({**honest.objects, honest.catalog_key: make(honest)})
        for number in range(2):
            with Maintainer(open_stream(store), outside / f"work-{number}") as maintainer:
                try:
                    maintainer.run_once()
                except ThinwireError as error:
                    pytest.fail(f"met {error!r}")
        kept = {k: d for k, d in store.objects.items() if not k.startswith("leases/")}
        for key, data in honest.objects.items():
            if "/manifests/" in key or "/deltas/" in key or "safetensors" in key:
                assert kept.get(key) == data, f"{key} was removed or changed"
        for number in range(2):
            shutil.rmtree(outside / f"work-{number}", ignore_errors=True)
        reaches(honest, kept, outside, ["none", "at-3"])
        # What the catalog says is not whole; what the versions need is, as it was before.
        merged = re.compile(r"merged delta|/deltas/|^catalog$")
        problems = fsck(open_stream(store)).problems
        assert all(merged.search(problem.where) for problem in problems), problems


class Patient(CountingStore):
    """A store that ends the test instead of answering for ever."""

    def _request(self, operation: str, count: int = 1) -> None:
        super()._request(operation, count)
        asked = sum(self.counts().requests.values())
        assert asked < 2000, "it asks for ever"


class TestEndlessStreams:
    def test_a_lineage_that_follows_itself(self, honest: Honest, outside: Path) -> None:
        """An end whose successor is its own lineage, or two that follow each other."""
        end = self.end_of(honest)
        for successor in (honest.lineage, "e" * 32):
            objects = {
                **honest.objects,
                honest.key(HEAD + 1): encode({**end, "successor": successor}),
            }
            back = {**end, "lineage": "e" * 32, "first": 1, "successor": honest.lineage}
            objects[f"{'e' * 32}/manifests/{HEAD + 1:012d}.json"] = encode(back)
            sink = outside / "sink"
            for name in ("none", "at-8"):
                if name == "none":
                    sink.mkdir()
                else:
                    shutil.copytree(honest.root / name, sink)
                store = Patient(DictStore(objects))
                with honest.follower(store, sink) as follower:
                    with pytest.raises(ThinwireError):
                        follower.catch_up()
                    assert sum(store.counts().requests.values()) < 200
                shutil.rmtree(sink)

    def test_ten_thousand_lineages(self, honest: Honest, outside: Path) -> None:
        """Each ends at once. A follower may give up, but not ask for ever."""
        end = self.end_of(honest)
        objects = dict(honest.objects)
        lineage, previous, first = honest.lineage, "", 1
        version = HEAD + 1
        base = end["base"]
        for number in range(10_000):
            successor = f"{number:032x}"
            record = {
                **end,
                "lineage": lineage,
                "version": version,
                "successor": successor,
                "first": first,
                "base": base,
            }
            if previous:
                record["previous"] = previous
            data = encode(record)
            objects[f"{lineage}/manifests/{version:012d}.json"] = data
            base = {"manifest": blake3_of(data), "version": version}
            previous, lineage, first = lineage, successor, version
        sink = outside / "sink"
        sink.mkdir()
        store = Patient(DictStore(objects))
        with honest.follower(store, sink) as follower:
            try:
                follower.catch_up()
            except ThinwireError:
                assert read_checkpoint(sink) is None
            else:
                assert read_checkpoint(sink) == content_of(honest.arrays[HEAD])
        assert sum(store.counts().requests.values()) < 2000

    @staticmethod
    def end_of(honest: Honest) -> Record:
        last = honest.manifest(HEAD)
        kept = ("format", "type", "stream", "created_ms", "session", "lineage", "first")
        return {name: last[name] for name in kept} | {
            "kind": "end",
            "version": HEAD + 1,
            "successor": "e" * 32,
            "base": {"manifest": blake3_of(honest.objects[honest.key(HEAD)]), "version": HEAD},
        }


def test_an_attackers_links_in_the_sink_are_not_followed(honest: Honest, outside: Path) -> None:
    """Whoever can write into the sink's folder is not the bucket's owner, but it costs nothing."""
    sink = outside / "sink"
    sink.mkdir()
    (sink / "model.safetensors").symlink_to(outside / "neighbour" / "model.safetensors")
    with honest.follower(DictStore(honest.objects), sink) as follower, pytest.raises(ThinwireError):
        follower.catch_up()
    assert (outside / "neighbour" / "model.safetensors").read_bytes() == b"not yours"


def test_the_honest_stream_is_whole(honest: Honest, outside: Path) -> None:
    reaches(honest, honest.objects, outside, ["none", "none-part", "at-3", "at-3-part", "at-8"])
    assert fsck(open_stream(DictStore(honest.objects)), deep=True).is_whole
