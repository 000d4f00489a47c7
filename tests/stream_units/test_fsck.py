"""fsck is silent on a whole stream and finds every kind of damage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from thinwire.errors import NotFound, ThinwireError, Unavailable
from thinwire.follow import open_stream
from thinwire.maintain import fsck
from thinwire.stream import keys
from thinwire.stream.encoding import encode, link_of, parse, sign
from thinwire.stream.records import Anchor, Catalog, Manifest, Merge
from thinwire.stream.signing import SigningKey

from .making import DictStore, HookStore, history, joined, published, publisher, tiny

KEY = SigningKey.generate()


def test_a_whole_stream(whole: DictStore, tmp_path: Path) -> None:
    seen: list[str] = []
    before = dict(whole.objects)
    report = fsck(open_stream(whole), on_object=lambda name, size: seen.append(name))
    assert report.is_whole
    assert (report.lineage_count, report.version_count, report.rebuilt_count) == (1, 10, 0)
    data = whole.find(".tw") + whole.find(".safetensors")
    assert sorted(seen) == sorted(f"{whole.url}/{key}" for key in data)
    assert report.object_count == len(data)
    assert report.object_bytes == sum(len(whole.objects[key][0]) for key in data)
    deep = fsck(open_stream(whole), deep=True, work_dir=tmp_path / "work")
    assert deep.is_whole
    assert deep.rebuilt_count == 10
    assert whole.objects == before, "it only reads"
    assert list((tmp_path / "work").iterdir()) == []


def test_lineages_and_an_unfinished_restart(tmp_path: Path) -> None:
    store = DictStore()
    published(store, tmp_path / "baseline", history(3, tiny()))
    with publisher(store, tmp_path / "baseline", new_lineage=True) as trainer:
        for arrays in history(2, tiny(5)):
            trainer.publish(arrays)
    report = fsck(open_stream(store), deep=True)
    assert report.is_whole
    assert (report.lineage_count, report.version_count, report.rebuilt_count) == (2, 5, 5)


def test_an_empty_stream(tmp_path: Path) -> None:
    store = DictStore()
    with pytest.raises(NotFound):
        fsck(open_stream(store))
    with publisher(store, tmp_path / "baseline"):
        assert fsck(open_stream(store), deep=True).is_whole


Damage = Callable[[DictStore], None]


def flip(part: str, at: int = -1) -> Damage:
    """One bit of every object with ``part`` in its key."""

    def damage(store: DictStore) -> None:
        assert store.find(part)
        for key in store.find(part):
            data = bytearray(store.objects[key][0])
            data[at] ^= 1
            store.put(key, bytes(data))

    return damage


def cut(part: str) -> Damage:
    def damage(store: DictStore) -> None:
        for key in store.find(part):
            store.put(key, store.objects[key][0][:-1])

    return damage


def lengthen(part: str) -> Damage:
    def damage(store: DictStore) -> None:
        for key in store.find(part):
            store.put(key, store.objects[key][0] + b"x")

    return damage


def remove(*parts: str) -> Damage:
    def damage(store: DictStore) -> None:
        for part in parts:
            assert store.find(part)
            store.delete(store.find(part))

    return damage


def swap(one: str, two: str) -> Damage:
    """Each has the bytes of the other."""

    def damage(store: DictStore) -> None:
        first, second = store.find(one)[0], store.find(two)[0]
        data = store.objects[first][0]
        store.put(first, store.objects[second][0])
        store.put(second, data)

    return damage


def edit(part: str, cls: type[Any], **changes: Any) -> Damage:
    """A record that is well-formed, and says something else."""

    def damage(store: DictStore) -> None:
        key = store.find(part)[0]
        record = parse(store.objects[key][0], cls, "it")
        store.put(key, encode(msgspec.structs.replace(record, **changes)))

    return damage


STEP = "deltas/000000000004-000000000005/"
MERGED = "deltas/000000000001-000000000005/"
FOUND: dict[str, Damage] = {
    "step flipped": flip(STEP),
    "step cut": cut(STEP),
    "step longer": lengthen(STEP),
    "step gone": remove(STEP),
    "steps swapped": swap(STEP, "deltas/000000000005-000000000006/"),
    "merged flipped": flip(MERGED),
    "merged gone": remove(MERGED),
    "first anchor flipped": flip("anchors/000000000001-"),
    "first anchor gone": remove("anchors/000000000001-"),
    "later anchor flipped": flip("anchors/000000000010-"),
    "later anchor gone": remove("anchors/000000000010-"),
    "anchor's manifest flipped": flip("anchors/000000000010.json", 30),
    "anchor names another version": edit("anchors/000000000010.json", Anchor, weights="0" * 64),
    "manifest flipped": flip("manifests/000000000005"),
    "manifest cut": cut("manifests/000000000005"),
    "manifest empty": lambda store: store.put(store.find("manifests/000000000005")[0], b""),
    "manifest gone": remove("manifests/000000000005"),
    "manifest and hint gone": remove("manifests/000000000005", "head.json"),
    "manifests of the middle gone": remove("manifests/000000000004", "manifests/000000000005"),
    "first manifest gone": remove("manifests/000000000001"),
    "all manifests gone but the hint": remove("/manifests/"),
    "manifests swapped": swap("manifests/000000000005", "manifests/000000000006"),
    "other step": edit("manifests/000000000005", Manifest, step=99),
    "other metadata": edit("manifests/000000000005", Manifest, metadata={"a": 1}),
    "other weights": edit("manifests/000000000005", Manifest, weights="0" * 64),
    "other session": edit("manifests/000000000005", Manifest, session="0" * 32),
    "other stream": edit("manifests/000000000005", Manifest, stream="0" * 32),
    "other lineage": edit("manifests/000000000005", Manifest, lineage="0" * 32),
    "wrong signature": edit("manifests/000000000005", Manifest, signer="0" * 64),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("deep", [False, True])
def test_damage_is_found(name: str, deep: bool, whole: DictStore) -> None:
    """In a stream with merged deltas and anchors beyond; never by a crash."""
    FOUND[name](whole)
    report = fsck(open_stream(whole), deep=deep)
    assert not report.is_whole
    for problem in report.problems:
        assert problem.where
        assert problem.code
        assert len(problem.message) > 10


@pytest.mark.parametrize(
    "name", [name for name in FOUND if name.startswith(("manifest", "step", "other"))]
)
def test_damage_is_found_without_merged_deltas(name: str, plain: DictStore) -> None:
    FOUND[name](plain)
    assert not fsck(open_stream(plain)).is_whole


@pytest.fixture(scope="module")
def _plain(tmp_path_factory: pytest.TempPathFactory) -> DictStore:
    store = DictStore()
    folder = tmp_path_factory.mktemp("plain")
    published(store, folder, history(10, tiny()))
    return store


@pytest.fixture
def plain(_plain: DictStore) -> DictStore:
    """Ten versions and nothing else."""
    return _plain.copy()


@pytest.mark.parametrize("part", ["catalog.json", "head.json"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_hints_are_not_missed(part: str, is_gone: bool, whole: DictStore) -> None:
    """They are no part of the truth, and everything is found without them."""
    (remove(part) if is_gone else flip(part))(whole)
    report = fsck(open_stream(whole), deep=True)
    assert report.problems == []
    assert report.object_count == 17


def rewrite(store: DictStore, part: str, cls: type[Any], **changes: Any) -> None:
    """As someone would who has the key."""
    key = store.find(part)[0]
    record = msgspec.structs.replace(parse(store.objects[key][0], cls, "it"), **changes)
    store.put(key, encode(sign(record, KEY)))


def test_lies_of_whoever_has_the_key(tmp_path: Path) -> None:
    """Consistent records about other weights: found when the versions are rebuilt."""
    store = DictStore()
    with publisher(open_stream(store, signing_key=KEY), tmp_path / "baseline") as trainer:
        for arrays in history(3, tiny()):
            trainer.publish(arrays)
    rewrite(store, "manifests/000000000003", Manifest, weights="0" * 64)
    pinned = open_stream(store, trusted_keys=[KEY.public])
    assert fsck(pinned).is_whole
    report = fsck(pinned, deep=True)
    assert [problem.where for problem in report.problems] == ["version 3"]
    assert report.rebuilt_count == 2


def test_signatures(whole: DictStore, tmp_path: Path) -> None:
    """Pinned, nothing unsigned counts; a stream that is signed passes."""
    with pytest.raises(ThinwireError):
        fsck(open_stream(whole, trusted_keys=[KEY.public]))
    store = DictStore()
    with publisher(open_stream(store, signing_key=KEY), tmp_path / "baseline") as trainer:
        for arrays in history(3, tiny()):
            trainer.publish(arrays)
    pinned = [KEY.public]
    assert fsck(open_stream(store, trusted_keys=pinned), deep=True).is_whole
    edit("manifests/000000000002", Manifest, signer="", signature="")(store)
    report = fsck(open_stream(store, trusted_keys=pinned))
    assert report.problems[0].code == "signature-invalid"
    other = SigningKey.generate()
    with pytest.raises(ThinwireError):
        fsck(open_stream(store, trusted_keys=[other.public]))


def test_merged_deltas_between_other_versions(whole: DictStore) -> None:
    key = whole.find("merges/000000000001-000000000005")[0]
    merge = parse(whole.objects[key][0], Merge, "it")
    forged = msgspec.structs.replace(merge, weights="0" * 64)
    whole.put(key, encode(forged))
    catalog = whole.find("catalog.json")[0]
    record = msgspec.json.decode(whole.objects[catalog][0], type=Catalog)
    rest = [m for m in record.merges if m != merge]
    whole.put(catalog, encode(msgspec.structs.replace(record, merges=[*rest, forged])))
    report = fsck(open_stream(whole))
    assert [problem.where for problem in report.problems] == ["merged delta 1 to 5"]


def test_ends_that_go_round(tmp_path: Path) -> None:
    """Chains of lineages that lead nowhere are an error for everybody, not a task for ever."""
    for is_pair in (False, True):
        store = DictStore()
        published(store, tmp_path / f"baseline-{is_pair}", history(2, tiny()))
        head = open_stream(store).tip().head
        assert head is not None
        other = "b" * 32 if is_pair else head.lineage
        end = Manifest(
            format=1,
            type="version",
            stream=head.stream,
            created_ms=0,
            kind="end",
            lineage=head.lineage,
            first=1,
            version=3,
            session="0" * 32,
            base=link_of(head),
            successor=other,
        )
        store.put(keys.manifest(head.lineage, 3), encode(end))
        if is_pair:
            back = msgspec.structs.replace(end, lineage=other, first=2, successor=head.lineage)
            store.put(keys.manifest(other, 3), encode(back))
        looks: list[str] = []

        def count(operation: str, key: str, looks: list[str] = looks) -> None:
            looks.append(key)
            if len(looks) > 1000:
                raise InterruptedError("this goes on for ever")

        watched = HookStore(store, count)
        assert not fsck(open_stream(watched)).is_whole
        with pytest.raises(ThinwireError):
            joined(watched, tmp_path / f"sink-{is_pair}")
        with pytest.raises(ThinwireError):
            publisher(watched, tmp_path / f"other-{is_pair}")


def test_a_store_that_does_not_answer_says_nothing_about_the_stream(whole: DictStore) -> None:
    def fail(operation: str, key: str) -> None:
        if STEP in key:
            raise Unavailable("no answer")

    with pytest.raises(Unavailable):
        fsck(open_stream(HookStore(whole, fail)))


def test_a_pruned_stream_is_whole(tmp_path: Path) -> None:
    from .making import maintained

    store = DictStore()
    published(
        store,
        tmp_path / "baseline",
        history(11, tiny()),
        keep_versions=2,
        keep_age_s=0,
        grace_s=1,
        merge_levels=[2],
        anchor_every=3,
    )
    for _ in range(3):
        maintained(store, tmp_path / "work")
        store.now_s += 10
    with publisher(store, tmp_path / "baseline") as trainer:
        for arrays in history(14, tiny())[11:]:
            trainer.publish(arrays)
    for _ in range(3):
        maintained(store, tmp_path / "work")
        store.now_s += 10
    assert store.find("deltas/000000000001-000000000002/") == []
    report = fsck(open_stream(store), deep=True)
    assert report.problems == []
    assert report.version_count == 14
    assert 2 <= report.rebuilt_count < 14


def test_beside_a_publisher(tmp_path: Path) -> None:
    """What is published meanwhile is no damage."""
    store = DictStore()
    versions = history(20, tiny())
    with publisher(store, tmp_path / "baseline") as trainer:
        trainer.publish(versions[0])

        def publish() -> None:
            for arrays in versions[1:]:
                trainer.publish(arrays)

        thread = threading.Thread(target=publish)
        thread.start()
        reports = [fsck(open_stream(store)) for _ in range(5)]
        thread.join()
    assert [report.problems for report in reports] == [[]] * 5
    assert json.loads(store.objects["head.json"][0])["version"] == 20
