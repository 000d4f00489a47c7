"""Someone with access to the bucket changes it: nobody ever ends at wrong weights.

Every object of a small but complete stream is altered, swapped, removed, replayed and renamed. A
follower then raises an error of ours with its sink as it was, or ends at exactly the right bits of
a published version, which is never older than what it had.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import (
    FormatError,
    LineageChanged,
    NotFound,
    SignatureInvalid,
    ThinwireError,
    VersionGap,
)
from thinwire.follow import CheckpointSink, Follower, open_stream
from thinwire.maintain import Maintainer, fsck
from thinwire.publish import Publisher
from thinwire.store import Entry
from thinwire.stream.records import Policy
from thinwire.stream.signing import SigningKey

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
    write_checkpoint,
)

KEY, OTHER_KEY = SigningKey.generate(), SigningKey.generate()
POLICY = Policy(merge_levels=(2, 4), anchor_every=3)
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
PARTS = ["layers.1.*"]
Objects = dict[str, bytes]
Record = dict[str, Any]


class Asked(DictStore):
    """What somebody asked a bucket for, whether it was there or not."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.keys: set[str] = set()
        self.folders: set[str] = set()

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        self.folders.add(prefix)
        return super().list(prefix, after=after)

    def is_any_of(self, keys: Iterable[str]) -> bool:
        """Whether one of these keys could have changed what they were told."""
        return any(key in self.keys or key.startswith(tuple(self.folders)) for key in keys)

    def _found(self, key: str) -> bytes:
        self.keys.add(key)
        return super()._found(key)


@dataclass
class Bucket:
    """A stream's objects at several times, what its versions hold, and sinks made from it."""

    root: Path
    is_signed: bool
    trusted: list[str]
    times: dict[str, Objects] = field(default_factory=dict)
    contents: dict[str, tuple[int, Content]] = field(default_factory=dict)
    asked: dict[str, Asked] = field(default_factory=dict)

    @property
    def objects(self) -> Objects:
        return self.times["end"]

    @property
    def harms(self) -> list[str]:
        """What is done to objects: all of it where nothing is signed, where it is easiest."""
        most = ["middle bit", "cut"]
        return most if self.is_signed else [*most, "first bit", "last bit", "empty", "longer"]

    def follower(self, store: DictStore, folder: Path, part: bool, **options: Any) -> Follower:
        return Follower(
            open_stream(store, trusted_keys=self.trusted),
            CheckpointSink(folder, workers=1),
            tensors=PARTS if part else None,
            lease=False,
            **{"accept_new_lineages": True, **options},
        )

    def sink(self, name: str, folder: Path) -> Path:
        """A copy of the sink that was made earlier, or an empty one."""
        if name == "none" or name == "none-part":
            folder.mkdir()
        else:
            shutil.copytree(self.root / name, folder)
        return folder

    def asked_by(self, name: str, folder: Path) -> Asked:
        """What a follower with this sink asks the whole bucket for."""
        if name not in self.asked:
            self.asked[name] = Asked(self.objects)
            sink = self.sink(name, folder)
            with self.follower(self.asked[name], sink, name.endswith("part")) as follower:
                assert follower.catch_up().version == 10
            shutil.rmtree(sink)
        return self.asked[name]


@pytest.fixture
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[[str], Bucket]]:
    """The bucket of each kind, made once."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:

        @cache
        def make(kind: str) -> Bucket:
            trusted = [KEY.public] if kind == "pinned" else []
            return make_bucket(Bucket(Path(folder) / kind, kind != "unsigned", trusted))

        yield make


@pytest.fixture(params=["unsigned", "signed", "pinned"])
def bucket(request: pytest.FixtureRequest, made: Callable[[str], Bucket]) -> Bucket:
    return made(request.param)


@pytest.fixture
def pinned(made: Callable[[str], Bucket]) -> Bucket:
    return made("pinned")


@pytest.fixture
def unsigned(made: Callable[[str], Bucket]) -> Bucket:
    return made("unsigned")


def make_bucket(bucket: Bucket) -> Bucket:
    """Versions 1 to 6 and, in a second lineage, 7 to 10; a fork from 2 on; another stream."""
    store = DictStore()
    publish(bucket, store, "a", range(1, 3))
    early = dict(store.objects)
    follow(bucket, store, "at-2", 2)
    publish(bucket, store, "a", range(3, 7))
    for name in ("at-3", "at-3-part", "at-6"):
        follow(bucket, store, name, int(name[3]))
    tidy(bucket, store)
    bucket.times["six"] = dict(store.objects)
    publish(bucket, store, "b", range(7, 11), new_lineage=True)
    for name in ("at-7", "at-8-part", "at-10"):
        follow(bucket, store, name, int(name[3:].split("-")[0]))
    tidy(bucket, store)
    bucket.times["end"] = dict(store.objects)
    # The same first versions, and then others: by the same key, in the same stream and lineage.
    fork = DictStore(early)
    shutil.rmtree(bucket.root / "a")
    publish(bucket, fork, "a", range(103, 107))
    tidy(bucket, fork)
    bucket.times["fork"] = dict(fork.objects)
    other = DictStore()
    publish(bucket, other, "c", range(201, 208))
    tidy(bucket, other)
    bucket.times["other"] = dict(other.objects)
    assert fsck(open_stream(DictStore(bucket.objects)), deep=True).is_whole
    return bucket


def publish(
    bucket: Bucket, store: DictStore, name: str, steps: range, *, new_lineage: bool = False
) -> None:
    key = KEY if bucket.is_signed else None
    stream = open_stream(store, policy=POLICY, signing_key=key)
    with Publisher(
        stream, bucket.root / name, maintain=False, new_lineage=new_lineage
    ) as publisher:
        for step in steps:
            arrays = arrays_of(step)
            version = publisher.publish(arrays, step=step)
            bucket.contents[version.manifest] = version.version, content_of(arrays)


def arrays_of(step: int) -> Arrays:
    return stepped(first_arrays(), step, 0.01 if step % 3 else 0.3)


def tidy(bucket: Bucket, store: DictStore) -> None:
    key = KEY if bucket.is_signed else None
    folder = bucket.root / "work"
    with Maintainer(open_stream(store, signing_key=key), folder) as maintainer:
        maintainer.run_once()
    shutil.rmtree(folder)


def follow(bucket: Bucket, store: DictStore, name: str, version: int) -> None:
    with bucket.follower(store, bucket.root / name, name.endswith("part")) as follower:
        follower.catch_up(version)


def check(bucket: Bucket, folder: Path, before: Mapping[str, bytes], part: bool) -> int:
    """The sink holds exactly a published version, not an older one than before; which."""
    mark, found = read_mark(folder), read_checkpoint(folder)
    old = json.loads(before[".thinwire-mark"]) if ".thinwire-mark" in before else None
    if mark is None:
        assert found is None
        assert old is None
        return 0
    version, content = bucket.contents[mark["manifest"]]
    if part:
        content = content.part(PARTS[0])
    assert found == content, f"wrong bits of version {version}"
    assert mark["version"] == version
    assert old is None or old["version"] <= version
    if old is not None and old["manifest"] == mark["manifest"]:
        assert sink_bytes(folder) == before
    return version


SINKS = ["none", "none-part", "at-3", "at-3-part", "at-6", "at-7", "at-8-part"]


def attack(
    bucket: Bucket, objects: Objects, folder: Path, sinks: list[str], *, what: str
) -> list[tuple[str, object]]:
    """Let followers loose on a changed bucket, and mend it: returns what each of them met.

    Those who ask for nothing that was changed are left out: they see no difference.
    """
    results: list[tuple[str, object]] = []
    store = DictStore()
    keys = objects.keys() | bucket.objects.keys()
    changed = [key for key in keys if objects.get(key) != bucket.objects.get(key)]
    for name in sinks:
        if not bucket.asked_by(name, folder / "sink").is_any_of(changed):
            continue
        store.objects = dict(objects)
        sink = bucket.sink(name, folder / "sink")
        before = sink_bytes(sink)
        part = name.endswith("part")
        result: object
        follower = bucket.follower(store, sink, part)
        try:
            result = follower.catch_up()
        except ThinwireError as error:
            result = error
        try:
            version = check(bucket, sink, before, part)
            if not isinstance(result, ThinwireError):
                assert result.version == version
            # Whatever it was, once it is mended the follower goes on. What a stream says of
            # itself is read once.
            store.objects = dict(bucket.objects)
            if objects.get("stream.json") != bucket.objects["stream.json"]:
                follower.close()
                follower = bucket.follower(store, sink, part)
            assert follower.catch_up().version == 10
            assert check(bucket, sink, before, part) == 10
        except (AssertionError, ThinwireError) as error:
            raise AssertionError(f"{what}: a follower {name} met {result!r}") from error
        finally:
            follower.close()
        results.append((name, result))
        shutil.rmtree(sink)
    return results


def kind_of(key: str) -> str:
    """Objects of one kind could stand in for each other."""
    name = re.sub(r"[0-9a-f]{32}", "LINEAGE", key, count=1)
    return re.sub(r"[0-9][0-9a-f-]*", "N", name)


def describe(key: str) -> str:
    return re.sub(r"0{6,}", "", re.sub(r"[0-9a-f]{16,}", lambda found: found.group()[:4], key))


class TestEveryObject:
    """What needs no understanding of the format."""

    def test_altered(self, bucket: Bucket, fast: Path) -> None:
        outcomes = []
        for key, data in bucket.objects.items():
            for name, harm in harms(data).items():
                if name not in bucket.harms:
                    continue
                changed = {**bucket.objects, key: harm}
                outcomes += attack(bucket, changed, fast, SINKS, what=f"{describe(key)} {name}")
        assert_some_of_each(outcomes)

    def test_removed(self, bucket: Bucket, fast: Path) -> None:
        outcomes = []
        for key in bucket.objects:
            changed = {k: data for k, data in bucket.objects.items() if k != key}
            outcomes += attack(bucket, changed, fast, SINKS, what=f"without {describe(key)}")
        assert_some_of_each(outcomes)

    def test_swapped_with_another_of_its_kind(self, bucket: Bucket, fast: Path) -> None:
        outcomes = []
        objects = bucket.objects
        for key in objects:
            others = [k for k in objects if k != key and kind_of(k) == kind_of(key)]
            # Its neighbours and the farthest: the first and the last of the others.
            for other in {*others[:1], *others[-1:]}:
                changed = {**objects, key: objects[other], other: objects[key]}
                what = f"{describe(key)} and {describe(other)} swapped"
                outcomes += attack(bucket, changed, fast, SINKS, what=what)
                copied = {**objects, key: objects[other]}
                what = f"{describe(other)} copied to {describe(key)}"
                outcomes += attack(bucket, copied, fast, SINKS[:3], what=what)
        assert_some_of_each(outcomes)

    @pytest.mark.parametrize("source", ["six", "fork", "other"])
    def test_replayed_from_another_time_or_place(
        self, bucket: Bucket, fast: Path, source: str
    ) -> None:
        """What once was right, or is right elsewhere, and even signed."""
        theirs = bucket.times[source]
        placed = {place_of(key): key for key in theirs}
        for key, data in bucket.objects.items():
            replay = theirs.get(placed.get(place_of(key), ""))
            if replay is None or replay == data:
                continue
            changed = {**bucket.objects, key: replay}
            attack(bucket, changed, fast, SINKS, what=f"{describe(key)} of {source}")

    def test_renamed(self, bucket: Bucket, fast: Path) -> None:
        objects = bucket.objects
        for key, data in objects.items():
            for new in renames(key):
                changed = {k: d for k, d in objects.items() if k != key} | {new: data}
                what = f"{describe(key)} renamed to {describe(new)}"
                attack(bucket, changed, fast, ["none", "at-3-part"], what=what)
                if new not in objects:
                    added = {**objects, new: data}
                    what = f"{describe(key)} copied to {describe(new)}"
                    attack(bucket, added, fast, ["at-3", "at-10"], what=what)

    def test_two_objects_at_once(self, bucket: Bucket, fast: Path) -> None:
        """A manifest and what it names, from a fork: each fits the other, but not the chain."""
        fork = bucket.times["fork"]
        for version in range(3, 7):
            changed = dict(bucket.objects)
            for key, data in fork.items():
                if f"{version:012d}" in key and key not in bucket.times["six"]:
                    changed[key] = data
                if key.endswith(f"manifests/{version:012d}.json"):
                    changed[key] = data
            attack(bucket, changed, fast, SINKS, what=f"version {version} of the fork")


class TestWholeBucket:
    def test_set_back(self, bucket: Bucket, fast: Path) -> None:
        """Who has seen a newer version refuses; who has not cannot know."""
        for name in ("at-7", "at-8-part", "at-10"):
            sink = bucket.sink(name, fast / name)
            before = all_bytes(sink)
            part = name.endswith("part")
            with (
                bucket.follower(DictStore(bucket.times["six"]), sink, part) as follower,
                pytest.raises(LineageChanged),
            ):
                follower.catch_up()
            assert all_bytes(sink) == before
        sink = bucket.sink("at-3", fast / "at-3")
        with bucket.follower(DictStore(bucket.times["six"]), sink, False) as follower:
            assert follower.catch_up().version == 6

    def test_set_back_under_a_follower_that_runs(self, bucket: Bucket, fast: Path) -> None:
        store = DictStore(bucket.objects)
        with bucket.follower(store, fast / "f", False) as follower:
            assert follower.catch_up().version == 10
            before = sink_bytes(fast / "f")
            store.objects = dict(bucket.times["six"])
            for target in ("latest", 6, 3):
                with suppress(ThinwireError):
                    assert follower.catch_up(target).version == 10
                assert sink_bytes(fast / "f") == before

    def test_another_history(self, bucket: Bucket, fast: Path) -> None:
        """The same stream and lineage, signed by the same key, and other versions from 3 on."""
        fork = bucket.times["fork"]
        for name in ("at-3", "at-3-part", "at-6", "at-7", "at-10"):
            sink = bucket.sink(name, fast / name)
            before = all_bytes(sink)
            part = name.endswith("part")
            with (
                bucket.follower(DictStore(fork), sink, part) as follower,
                pytest.raises((LineageChanged, VersionGap)),
            ):
                follower.catch_up()
            assert all_bytes(sink) == before

    def test_another_history_under_a_follower_that_runs(self, bucket: Bucket, fast: Path) -> None:
        store = DictStore(bucket.times["six"])
        for version in range(3, 6):
            store.objects = dict(bucket.times["six"])
            sink = fast / str(version)
            with bucket.follower(store, sink, False) as follower:
                follower.catch_up(version)
                before = sink_bytes(sink)
                store.objects = dict(bucket.times["fork"])
                with pytest.raises(ThinwireError):
                    follower.catch_up()
                assert sink_bytes(sink) == before

    def test_another_stream(self, bucket: Bucket, fast: Path) -> None:
        for name in ("at-3", "at-8-part"):
            sink = bucket.sink(name, fast / name)
            before = all_bytes(sink)
            with (
                bucket.follower(
                    DictStore(bucket.times["other"]), sink, name.endswith("part")
                ) as follower,
                pytest.raises(LineageChanged),
            ):
                follower.catch_up()
            assert all_bytes(sink) == before

    def test_everything_of_one_kind_is_gone(self, bucket: Bucket, fast: Path) -> None:
        for word in ("/merges/", "/anchors/", "/deltas/", "catalog", "head.json", "stream.json"):
            changed = {k: data for k, data in bucket.objects.items() if word not in k}
            outcomes = attack(bucket, changed, fast, SINKS, what=f"no {word}")
            if word in ("/merges/", "catalog", "head.json"):
                assert all(not isinstance(result, ThinwireError) for _, result in outcomes)

    def test_a_damaged_merge_or_anchor_is_gone_around(self, bucket: Bucket, fast: Path) -> None:
        """All of them at once: the step deltas and the first anchor lead to the head."""
        changed = {
            key: data[:-1] + bytes([data[-1] ^ 1]) if is_replaceable(key) else data
            for key, data in bucket.objects.items()
        }
        assert changed != bucket.objects
        outcomes = attack(bucket, changed, fast, SINKS, what="all merges and later anchors")
        for name, result in outcomes:
            assert not isinstance(result, ThinwireError), (name, result)

    def test_fsck_finds_it(self, bucket: Bucket) -> None:
        """Every object that a reader could need, altered or gone."""
        for key, data in bucket.objects.items():
            if key == "head.json" or "leases" in key or key.endswith("catalog.json"):
                continue
            flipped = data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]
            for changed in (
                {**bucket.objects, key: flipped},
                {k: d for k, d in bucket.objects.items() if k != key},
            ):
                is_removed = key not in changed
                if is_removed and ("/merges/" in key or re.search(r"anchors/\d+\.json", key)):
                    continue  # nobody needs it then
                stream = open_stream(DictStore(changed), trusted_keys=bucket.trusted)
                try:
                    report = fsck(stream)
                except ThinwireError:
                    continue
                assert not report.is_whole, f"{describe(key)} {'removed' if is_removed else ''}"


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("harm", ["middle bit", "cut", "longer", "empty"])
def test_the_cache_that_followers_share(
    unsigned: Bucket, fast: Path, harm: str, part: bool
) -> None:
    """Anybody on the host may write there: a block is proved again when it is taken out."""
    store = DictStore(unsigned.objects)
    for number in range(2):
        cache, sink = fast / "cache", fast / str(number)
        with unsigned.follower(store, sink, part, cache_dir=cache) as follower:
            assert follower.catch_up().version == 10
        assert check(unsigned, sink, {}, part) == 10
        blocks = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
        assert blocks
        for path in blocks:
            path.write_bytes(harms(path.read_bytes())[harm])


class TestWithoutTheKey:
    """A pinned follower against someone who can write everything and sign nothing."""

    def assert_refused(
        self, bucket: Bucket, objects: Objects, fast: Path, sinks: list[str]
    ) -> None:
        for name in sinks:
            sink = bucket.sink(name, fast / "sink")
            before = sink_bytes(sink)
            part = name.endswith("part")
            with bucket.follower(DictStore(objects), sink, part) as follower:
                for target in ("latest", 10, 11, 7):
                    for reset in (False, True):
                        if reset and not name.startswith("none"):
                            continue
                        with pytest.raises((SignatureInvalid, NotFound, LineageChanged)) as found:
                            follower.catch_up(target, reset=reset)
                        if target == "latest":
                            assert isinstance(found.value, SignatureInvalid), repr(found.value)
                        assert sink_bytes(sink) == before
            shutil.rmtree(sink)

    @pytest.mark.parametrize("how", ["strip", "resign", "claim"])
    def test_everything_rewritten(self, pinned: Bucket, fast: Path, how: str) -> None:
        """Other weights, all digests right, unsigned or signed by another key."""
        objects = rewrite(pinned.objects, how, lambda record: record)
        self.assert_refused(pinned, objects, fast, ["none", "none-part", "at-3", "at-8-part"])

    @pytest.mark.parametrize("how", ["strip", "resign", "claim"])
    def test_only_later_versions_are_forged(self, pinned: Bucket, fast: Path, how: str) -> None:
        key = next(k for k in pinned.objects if k.endswith(f"{10:012d}.json") and "manif" in k)
        last = json.loads(pinned.objects[key])
        forged = {
            **last,
            "version": 11,
            "base": {"manifest": blake3_of(pinned.objects[key]), "version": 10},
        }
        objects = {
            **pinned.objects,
            key.replace(f"{10:012d}", f"{11:012d}"): forge(forged, how),
            "head.json": encode({"format": 1, "lineage": last["lineage"], "version": 11}),
        }
        self.assert_refused(pinned, objects, fast, ["none", "at-10"])

    @pytest.mark.parametrize("how", ["strip", "resign", "claim"])
    def test_a_lineage_is_forged(self, pinned: Bucket, fast: Path, how: str) -> None:
        """An end after the last version, and a lineage of the attacker's own after that."""
        key = next(k for k in pinned.objects if k.endswith(f"{10:012d}.json") and "manif" in k)
        last = json.loads(pinned.objects[key])
        end = {name: last[name] for name in ("format", "type", "stream", "created_ms", "session")}
        end |= {
            "kind": "end",
            "lineage": last["lineage"],
            "first": last["first"],
            "version": 11,
            "successor": "e" * 32,
            "base": {"manifest": blake3_of(pinned.objects[key]), "version": 10},
        }
        objects = {**pinned.objects, key.replace(f"{10:012d}", f"{11:012d}"): forge(end, how)}
        self.assert_refused(pinned, objects, fast, ["at-10", "none", "none-part"])

    @pytest.mark.parametrize("how", ["strip", "resign", "claim"])
    def test_the_stream_record_is_forged(self, pinned: Bucket, fast: Path, how: str) -> None:
        """Such as its policy, which says whether followers go along with a new lineage."""
        record = json.loads(pinned.objects["stream.json"])
        record["policy"]["accept_new_lineages"] = True
        objects = {**pinned.objects, "stream.json": forge(record, how)}
        self.assert_refused(pinned, objects, fast, ["none", "at-3", "at-10"])

    def test_a_policy_is_not_changed_by_itself(self, pinned: Bucket, fast: Path) -> None:
        record = json.loads(pinned.objects["stream.json"])
        record["policy"]["accept_new_lineages"] = True
        objects = {**pinned.objects, "stream.json": encode(record)}
        self.assert_refused(pinned, objects, fast, ["none", "at-3"])

    @pytest.mark.parametrize("how", ["strip", "resign", "claim"])
    def test_merges_and_anchors_are_forged(self, pinned: Bucket, fast: Path, how: str) -> None:
        """They are gone around: what is signed leads to the head as well."""

        def change(key: str, data: bytes) -> bytes:
            is_extra = re.search(r"/merges/|anchors/\d+\.json|/catalog\.json", key)
            return forge(json.loads(data), how) if is_extra else data

        objects = {key: change(key, data) for key, data in pinned.objects.items()}
        outcomes = attack(pinned, objects, fast, SINKS, what=how)
        for name, result in outcomes:
            assert not isinstance(result, ThinwireError), (name, result)

    def test_the_history_of_another_key(self, unsigned: Bucket, pinned: Bucket, fast: Path) -> None:
        for objects in (unsigned.objects, unsigned.times["six"]):
            sink = fast / "sink"
            with (
                pinned.follower(DictStore(objects), sink, False) as follower,
                pytest.raises(SignatureInvalid),
            ):
                follower.catch_up()
            assert read_checkpoint(sink) is None
            shutil.rmtree(sink)

    def test_set_back_and_continued_by_the_real_key(self, pinned: Bucket, fast: Path) -> None:
        """The publisher was deceived, too; who has seen the newer versions refuses."""
        store = DictStore(pinned.times["six"])
        publish(pinned, store, "deceived", range(301, 308))
        for name in ("at-7", "at-8-part", "at-10"):
            sink = pinned.sink(name, fast / name)
            before = all_bytes(sink)
            with (
                pinned.follower(store, sink, name.endswith("part")) as follower,
                pytest.raises((LineageChanged, VersionGap)),
            ):
                follower.catch_up()
            assert all_bytes(sink) == before

    def test_a_signature_written_another_way(self, pinned: Bucket, fast: Path) -> None:
        """The digest of a manifest is over its bytes: there must be one way to write it."""
        ways = (str.upper, lambda text: f" {text}", lambda text: f"{text[:64]} {text[64:]}")
        head = next(k for k in pinned.objects if k.endswith(f"manifests/{10:012d}.json"))
        for respell in ways:
            for key in (head, "stream.json"):
                record = json.loads(pinned.objects[key])
                new = encode({**record, "signature": respell(record["signature"])})
                store = DictStore({**pinned.objects, key: new})
                sink = pinned.sink("none", fast / "sink")
                with (
                    pinned.follower(store, sink, False) as follower,
                    pytest.raises((SignatureInvalid, FormatError)),
                ):
                    follower.catch_up()
                assert read_checkpoint(sink) is None
                shutil.rmtree(sink)


class TestUnsigned:
    """Nobody signs: the chain still binds what a follower holds to what comes."""

    def test_a_rewritten_history_is_refused_by_who_holds_a_part_of_it(
        self, unsigned: Bucket, fast: Path
    ) -> None:
        objects = rewrite(
            unsigned.objects, "strip", lambda record: {**record, "created_ms": 1_700_000_000_000}
        )
        for name in ("at-3", "at-3-part", "at-6", "at-7", "at-8-part", "at-10"):
            sink = unsigned.sink(name, fast / name)
            before = all_bytes(sink)
            with (
                unsigned.follower(DictStore(objects), sink, name.endswith("part")) as follower,
                pytest.raises((LineageChanged, VersionGap)),
            ):
                follower.catch_up()
            assert all_bytes(sink) == before
        # A joiner cannot know, and gets what the stream says.
        with unsigned.follower(DictStore(objects), fast / "joiner", False) as follower:
            assert follower.catch_up().version == 10
        assert read_checkpoint(fast / "joiner") == content_of(arrays_of(10))

    @pytest.mark.parametrize("claims", [False, True])
    def test_merges_and_anchors_of_other_weights(
        self, unsigned: Bucket, fast: Path, claims: bool
    ) -> None:
        """All of one piece, but what they make is not what the version is, or is claimed to be.

        Who holds a part cannot prove an anchor that claims to be right, so only deltas lie then.
        """
        six, fork = unsigned.times["six"], unsigned.times["fork"]
        records = re.compile(r"/merges/|anchors/\d+\.json")
        objects = {k: d for k, d in six.items() if not records.search(k)}
        count = 0
        for key, data in fork.items():
            if not records.search(key):
                objects.setdefault(key, data)
                continue
            record = json.loads(data)
            for name in ("base", "target"):
                if name in record:
                    version = record[name]["version"]
                    if version > 6:
                        break
                    manifest = six[f"{record['lineage']}/manifests/{version:012d}.json"]
                    record[name]["manifest"] = blake3_of(manifest)
                    if claims and name == "target":
                        right = json.loads(manifest)
                        record |= {"weights": right["weights"], "layout": right["layout"]}
            else:
                objects[key] = encode(record)
                count += 1
        assert count >= 3
        for catalog in (six, fork):
            for key, data in catalog.items():
                if key.endswith("catalog.json"):
                    objects[key] = data
            for name in ("none", "at-3", "at-3-part", "none-part"):
                if claims and name == "none-part":
                    continue
                part = name.endswith("part")
                for targets in ([4, 5, 6], [6]):
                    sink = unsigned.sink(name, fast / "sink")
                    with unsigned.follower(DictStore(objects), sink, part) as follower:
                        for version in targets:
                            assert follower.catch_up(version).version == version
                            assert check(unsigned, sink, {}, part) == version
                    shutil.rmtree(sink)

    def test_other_files_under_right_digests(self, unsigned: Bucket, fast: Path) -> None:
        """The weights are right, and config.json is not: that is another model, too."""
        six = unsigned.times["six"]
        branches = []
        for name in ("right", "wrong"):
            store = DictStore(six)
            with unsigned.follower(store, fast / name, False) as follower:
                follower.catch_up()
            files = {"config.json": name.encode()}
            checkpoint = write_checkpoint(fast / f"{name}-new", arrays_of(7), files)
            with Publisher(open_stream(store), fast / name, maintain=False) as publisher:
                publisher.publish(checkpoint, step=7)
            branches.append(dict(store.objects))
        right, wrong = branches
        key = next(k for k in right if k.endswith(f"manifests/{7:012d}.json"))
        mine, other = json.loads(right[key]), json.loads(wrong[key])
        forged = {**mine, "shards": other["shards"], "session": other["session"]}
        objects = {**right, key: encode(forged), shard_key(forged): wrong[shard_key(other)]}
        for name in ("at-6", "at-3", "at-3-part"):
            sink = unsigned.sink(name, fast / "sink")
            before = sink_bytes(sink)
            part = name.endswith("part")
            with (
                unsigned.follower(DictStore(objects), sink, part) as follower,
                pytest.raises(FormatError),
            ):
                follower.catch_up()
            assert check(unsigned, sink, before, part) <= 6
            shutil.rmtree(sink)

    def test_other_weights_under_right_digests(self, unsigned: Bucket, fast: Path) -> None:
        """A delta of another version, all records rewritten to name it: the weights differ."""
        six = unsigned.times["six"]
        lineage = next(k for k in six if "/manifests/" in k).partition("/")[0]
        manifests = {
            json.loads(data)["version"]: json.loads(data)
            for key, data in six.items()
            if "/manifests/" in key
        }
        for base in (2, 3, 4):
            # What leads from base to base + 1 is called the delta from there to base + 2.
            source, target = manifests[base + 1], manifests[base + 2]
            objects = {k: d for k, d in six.items() if "merges" not in k and "catalog" not in k}
            forged = {**target, "shards": source["shards"], "session": source["session"]}
            old = shard_key(source)
            objects[shard_key(forged)] = six[old]
            key = f"{lineage}/manifests/{base + 2:012d}.json"
            objects[key] = encode(forged)
            for later in [k for k in objects if "/manifests/" in k and k > key]:
                del objects[later]
            del objects["head.json"]
            sink = unsigned.sink("none", fast / f"sink-{base}")
            with unsigned.follower(DictStore(objects), sink, False) as follower:
                follower.catch_up(base + 1)
                before = sink_bytes(sink)
                with pytest.raises(ThinwireError):
                    follower.catch_up()
            assert sink_bytes(sink) == before


def rewrite(objects: Objects, how: str, change: Callable[[Record], Record]) -> Objects:
    """Every record changed and forged, and all links between them made right again."""
    links: dict[str, str] = {}
    new = dict(objects)

    def relinked(record: Record) -> Record:
        for name in ("base", "target"):
            if name in record:
                link = record[name]
                record = {**record, name: {**link, "manifest": links[link["manifest"]]}}
        return record

    keys = sorted(
        (k for k in objects if "/manifests/" in k), key=lambda k: (json_version(objects[k]), k)
    )
    # An end has the number of the version after it, and comes first.
    keys.sort(key=lambda k: (json_version(objects[k]), json.loads(objects[k])["kind"] != "end"))
    for key in keys:
        new[key] = forge(change(relinked(json.loads(objects[key]))), how)
        links[blake3_of(objects[key])] = blake3_of(new[key])
    for key, data in objects.items():
        if re.search(r"/merges/|anchors/\d+\.json|/catalog\.json", key):
            new[key] = forge(change(relinked(json.loads(data))), how)
        elif key == "stream.json":
            new[key] = forge(change(json.loads(data)), how)
    return new


def json_version(data: bytes) -> int:
    version = json.loads(data)["version"]
    assert isinstance(version, int)
    return version


def forge(record: Record, how: str) -> bytes:
    """A record without a signature, by another key, or with that key under the right name."""
    record = {k: value for k, value in record.items() if k not in ("signer", "signature")}
    if how == "strip":
        return encode(record)
    record["signer"] = (OTHER_KEY if how == "resign" else KEY).public
    text = b"thinwire " + record["type"].encode() + b"\n" + encode(record)
    return encode({**record, "signature": OTHER_KEY.sign(text)})


def encode(record: Record) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def shard_key(record: Record) -> str:
    base, version = record["base"]["version"], record["version"]
    digest = record["shards"][0]["blocks"][0][:32]
    folder = f"{record['lineage']}/deltas/{base:012d}-{version:012d}"
    return f"{folder}/{record['session'][:16]}-0000-{digest}.tw"


def harms(data: bytes) -> dict[str, bytes]:
    middle = len(data) // 2
    return {
        "first bit": bytes([data[0] ^ 1]) + data[1:],
        "middle bit": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        "last bit": data[:-1] + bytes([data[-1] ^ 64]),
        "cut": data[:-1],
        "empty": b"",
        "longer": data + b"\n",
    }


def place_of(key: str) -> str:
    """A key without what is random in it."""
    name = re.sub(r"[0-9a-f]{32}\.tw", "D.tw", key)
    name = re.sub(r"/[0-9a-f]{16}-", "/S-", name)
    name = re.sub(r"(\d{12})-[0-9a-f]{16}/", r"\1-S/", name)
    return re.sub(r"^[0-9a-f]{32}", "L", name)


def renames(key: str) -> list[str]:
    """Other names that the object could be found under."""
    found = versions_in(key)
    new = [f"{key}.json", f"elsewhere/{key}"]
    for number in found[:1]:
        new += [key.replace(number, f"{int(number) + by:012d}") for by in (-1, 1, 5)]
    if len(found) == 2:
        new.append(key.replace(found[1], f"{int(found[1]) + 1:012d}"))
    lineage = key.partition("/")[0]
    if re.fullmatch(r"[0-9a-f]{32}", lineage):
        new.append(key.replace(lineage, "f" * 32))
    return new


def versions_in(key: str) -> list[str]:
    """The versions that a key names, as they stand there; digits in random ids are none."""
    return re.findall(r"(?<![0-9a-f])\d{12}(?![0-9a-f])", key)


def is_replaceable(key: str) -> bool:
    """Whether it is a merge or a later anchor, or a part of one."""
    found = versions_in(key)
    if "/deltas/" in key:
        return int(found[1]) - int(found[0]) > 1
    if "/anchors/" in key:
        return int(found[0]) not in (1, 7)
    return "/merges/" in key


def assert_some_of_each(outcomes: list[tuple[str, object]]) -> None:
    """The attacks were felt, and not all of them deadly."""
    refused = sum(isinstance(result, ThinwireError) for _, result in outcomes)
    assert 0 < refused < len(outcomes)
