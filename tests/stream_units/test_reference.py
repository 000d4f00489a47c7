"""Streams that begin with a model that both sides hold already."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import BaseMismatch, InvalidArgument, NotFound, ThinwireError
from thinwire.follow import Follower, open_stream
from thinwire.follow.reference import local_copy, source_of
from thinwire.maintain import fsck
from thinwire.stream.events import Published
from thinwire.stream.records import Policy, Source

from .making import (
    Arrays,
    DictStore,
    Recorder,
    bits,
    held,
    history,
    joined,
    maintained,
    model,
    publisher,
    small_files,
    stepped,
    write_folder,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = f"hf://some-org/some.model@{COMMIT}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The model that both sides hold."""
    return write_folder(tmp_path / "base", model=model(), config_json=b"{}", vocab_txt=b"words")


def in_cache(base: Path, home: Path, revision: str = COMMIT) -> Path:
    """The same model as the Hugging Face tools keep it: links to files named by digest."""
    root = home / "hub" / "models--some-org--some.model"
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(base.iterdir())):
        (root / "blobs" / str(number)).write_bytes(path.read_bytes())
        (root / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{number}")
    return root


def begun(store: DictStore, folder: Path, reference: str, base: Path | None) -> list[Arrays]:
    """A stream by reference, with two deltas after it."""
    versions = history(3)
    with publisher(store, folder) as trainer:
        first = trainer.publish_reference(reference, copy=base, step=1, metadata={"a": 1})
        assert first.kind == "reference"
        for arrays in versions[1:]:
            trainer.publish(arrays)
    return versions


def test_from_a_folder(base: Path, tmp_path: Path) -> None:
    store = DictStore()
    versions = begun(store, tmp_path / "baseline", str(base), None)
    assert sum(len(data) for data, _ in store.objects.values()) < 60_000
    with Follower(open_stream(store), tmp_path / "sink", base=base) as follower:
        for number, arrays in enumerate(versions, 1):
            version = follower.catch_up(number)
            assert held(tmp_path / "sink") == bits(arrays)
        assert version.step is None
    assert small_files(tmp_path / "sink") == small_files(base)
    assert fsck(open_stream(store), deep=True, base=base).problems == []


@pytest.mark.parametrize("revision", [COMMIT, "main"])
def test_from_the_hugging_face_cache(revision: str, base: Path, tmp_path: Path) -> None:
    in_cache(base, tmp_path / "huggingface")
    store = DictStore()
    reference = f"hf://some-org/some.model@{revision}"
    versions = begun(store, tmp_path / "baseline", reference, None)
    assert joined(store, tmp_path / "sink") == bits(versions[2])
    assert not any(path.is_symlink() for path in (tmp_path / "sink").rglob("*"))
    assert small_files(tmp_path / "sink") == small_files(base)


def test_no_copy_says_what_to_do(base: Path, tmp_path: Path) -> None:
    store = DictStore()
    begun(store, tmp_path / "baseline", NAME, base)
    with Follower(open_stream(store), tmp_path / "sink") as follower:
        with pytest.raises(NotFound, match="base=") as caught:
            follower.catch_up()
        assert "some-org/some.model" in str(caught.value)
        in_cache(base, tmp_path / "huggingface")
        assert follower.catch_up().version == 3


def test_a_folder_of_the_publisher_is_never_opened_by_its_name(base: Path, tmp_path: Path) -> None:
    """The manifest names a path; only the follower's own word counts."""
    store = DictStore()
    begun(store, tmp_path / "baseline", str(base), None)
    with (
        Follower(open_stream(store), tmp_path / "sink") as follower,
        pytest.raises(NotFound, match="base="),
    ):
        follower.catch_up()


def changed_word(copy: Path, arrays: Arrays) -> None:
    arrays["layers.1.weight"].view(np.uint16)[5] ^= 1
    write_folder(copy, model=arrays, config_json=b"{}", vocab_txt=b"words")


def missing_tensor(copy: Path, arrays: Arrays) -> None:
    del arrays["norm"]
    write_folder(copy, model=arrays, config_json=b"{}", vocab_txt=b"words")


def more_tensors(copy: Path, arrays: Arrays) -> None:
    write_folder(copy, model=arrays | {"more": arrays["norm"]}, config_json=b"{}")


def other_shape(copy: Path, arrays: Arrays) -> None:
    arrays["norm"] = arrays["norm"].reshape(7, 11)
    write_folder(copy, model=arrays, config_json=b"{}")


def other_dtype(copy: Path, arrays: Arrays) -> None:
    arrays["scale"] = arrays["scale"].view(np.uint8).reshape(-1)
    write_folder(copy, model=arrays, config_json=b"{}")


def swapped_names(copy: Path, arrays: Arrays) -> None:
    arrays["norm"], arrays["other"] = arrays["norm"], arrays.pop("ids")
    write_folder(copy, model=arrays, config_json=b"{}")


@pytest.mark.parametrize(
    "make",
    [changed_word, missing_tensor, more_tensors, other_shape, other_dtype, swapped_names],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("tensors", [None, ["layers.0.*"]])
def test_another_copy_is_refused(
    make: object, tensors: list[str] | None, base: Path, tmp_path: Path
) -> None:
    assert callable(make)
    store = DictStore()
    begun(store, tmp_path / "baseline", str(base), None)
    make(tmp_path / "copy", model())
    with Follower(
        open_stream(store), tmp_path / "sink", base=tmp_path / "copy", tensors=tensors
    ) as follower:
        with pytest.raises(ThinwireError) as caught:
            follower.catch_up()
        assert caught.value.code in ("base-mismatch", "tensor-mismatch")
        assert follower.version() is None
    assert held(tmp_path / "sink") == {}


def test_the_same_tensors_in_other_files(base: Path, tmp_path: Path) -> None:
    """A re-sharded copy is as good; the follower's files are those of the publisher."""
    store = DictStore()
    versions = begun(store, tmp_path / "baseline", str(base), None)
    arrays = model()
    half = {"layers.1.weight": arrays.pop("layers.1.weight"), "ids": arrays.pop("ids")}
    write_folder(tmp_path / "copy", a=half, b=arrays)
    with Follower(open_stream(store), tmp_path / "sink", base=tmp_path / "copy") as follower:
        follower.catch_up(1)
        assert held(tmp_path / "sink") == bits(versions[0])
        follower.catch_up()
    assert held(tmp_path / "sink") == bits(versions[2])
    files = [path.name for path in (tmp_path / "sink").glob("*.safetensors")]
    assert files == ["model.safetensors"]
    assert small_files(tmp_path / "sink") == small_files(base)


def test_some_tensors_of_a_copy(base: Path, tmp_path: Path) -> None:
    store = DictStore()
    versions = begun(store, tmp_path / "baseline", str(base), None)
    names = ("layers.0.weight", "norm", "scale", "ids")
    for number in (1, 3):
        found = joined(
            store, tmp_path / f"sink-{number}", number, base=base, tensors=["layers.0.*"]
        )
        assert found == bits({name: versions[number - 1][name] for name in names})


def test_only_a_first_version(base: Path, tmp_path: Path) -> None:
    store = DictStore()
    with publisher(store, tmp_path / "baseline") as trainer:
        trainer.publish(base)
        with pytest.raises(InvalidArgument, match="only the first"):
            trainer.publish_reference(str(base))
        assert trainer.publish(base).version == 2


def test_a_new_lineage_by_reference(base: Path, tmp_path: Path) -> None:
    store, recorder = DictStore(), Recorder()
    begun(store, tmp_path / "baseline", str(base), None)
    with publisher(store, tmp_path / "baseline", new_lineage=True, observer=recorder) as trainer:
        first = trainer.publish_reference(str(base))
        second = stepped(model(), 99)
        trainer.publish(second)
    assert first.version == 4
    assert recorder.of(Published)[0].payload_bytes == first.payload_bytes
    with Follower(
        open_stream(store), tmp_path / "sink", base=base, accept_new_lineages=True
    ) as follower:
        follower.catch_up()
    assert held(tmp_path / "sink") == bits(second)


def test_a_publisher_goes_on_from_its_copy(base: Path, tmp_path: Path) -> None:
    """With its folder lost, it needs the model again, and says so."""
    store = DictStore()
    versions = begun(store, tmp_path / "baseline", str(base), None)
    with pytest.raises(NotFound, match="base="):
        publisher(store, tmp_path / "other")
    with publisher(store, tmp_path / "other", base=base) as trainer:
        trainer.publish(stepped(versions[2], 7))
    assert joined(store, tmp_path / "sink", base=base) == bits(stepped(versions[2], 7))


def test_an_anchor_frees_from_the_copy(base: Path, tmp_path: Path) -> None:
    store = DictStore()
    stream = open_stream(store, policy=Policy(anchor_every=2))
    versions = history(3)
    with publisher(stream, tmp_path / "baseline") as trainer:
        trainer.publish_reference(str(base))
        for arrays in versions[1:]:
            trainer.publish(arrays)
    assert maintained(store, tmp_path / "work", base=base).anchor_count == 1
    assert joined(store, tmp_path / "sink") == bits(versions[2])


def test_without_the_copy_nothing_is_maintained(base: Path, tmp_path: Path) -> None:
    """Said, not raised: the other work goes on."""
    store, recorder = DictStore(), Recorder()
    stream = open_stream(store, policy=Policy(anchor_every=2, merge_levels=[2]))
    with publisher(stream, tmp_path / "baseline") as trainer:
        trainer.publish_reference(str(base))
        for arrays in history(3)[1:]:
            trainer.publish(arrays)
    work = maintained(store, tmp_path / "work", observer=recorder)
    assert (work.merge_count, work.anchor_count) == (0, 0)
    assert {event.code for event in recorder.events} == {"not-found"}  # type: ignore[attr-defined]


# Names


@pytest.mark.parametrize(
    "reference",
    [
        "hf://",
        "hf://model",
        "hf://org/model",
        "hf://org/model@",
        "hf://org/model/more@main",
        "hf://../model@main",
        "hf://org/..@main",
        "hf://org/mo..del@main",
        "hf://org/model@../main",
        "hf://org/model@a/b",
        "hf://org/model@" + "a" * 97,
        "hf://o rg/model@main",
        "hf://org/model@main\n",
    ],
)
def test_references_that_are_refused(reference: str) -> None:
    with pytest.raises(InvalidArgument, match="hf://ORG/NAME@REVISION"):
        source_of(reference)


def test_references() -> None:
    assert source_of(NAME) == Source("huggingface", "some-org/some.model", COMMIT)
    assert source_of("hf://gpt2@main") == Source("huggingface", "gpt2", "main")
    assert source_of("folder") == Source("folder", os.path.abspath("folder"))  # noqa: PTH100


@pytest.mark.parametrize(
    "source",
    [
        Source("folder", "/etc"),
        Source("folder", "../.."),
        Source("huggingface", "../../etc", "main"),
        Source("huggingface", "/etc", "main"),
        Source("huggingface", "some-org/some.model", "../../../../etc"),
        Source("huggingface", "some-org/some.model", "/etc"),
        Source("huggingface", "some-org/some.model", ""),
        Source("huggingface", "some-org/some.model/../..", "main"),
        Source("huggingface", "some-org\\x", "main"),
        Source("huggingface", "", ""),
        Source("huggingface", "a\0b", "main"),
    ],
)
def test_hostile_names_open_no_path(
    source: Source, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cache(base, tmp_path / "huggingface")
    opened: list[object] = []

    def note(self: Path, *arguments: object, **options: object) -> None:
        opened.append(self)
        raise AssertionError(self)

    for name in ("open", "read_text", "read_bytes", "is_dir", "exists", "iterdir"):
        monkeypatch.setattr(Path, name, note)
    with pytest.raises(NotFound):
        local_copy(source, None)
    assert opened == []


@pytest.mark.parametrize("text", ["../../../..", "/etc", "a/b", "", "x" * 200, "\0"])
def test_a_hostile_ref_in_the_cache(text: str, base: Path, tmp_path: Path) -> None:
    """What the cache says of a branch is no path either."""
    root = in_cache(base, tmp_path / "huggingface")
    (root / "refs" / "main").write_text(text)
    with pytest.raises(NotFound):
        local_copy(Source("huggingface", "some-org/some.model", "main"), None)


def test_where_the_cache_is(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = in_cache(base, tmp_path / "elsewhere")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere" / "hub"))
    found = local_copy(source_of(NAME), None)
    assert found == root / "snapshots" / COMMIT
    assert local_copy(source_of(NAME), tmp_path) == tmp_path


def test_the_publishers_own_copy_is_proved_when_it_changes(base: Path, tmp_path: Path) -> None:
    """The baseline is made from the copy: one that changed since is refused."""
    store = DictStore()
    with publisher(store, tmp_path / "baseline") as trainer:
        trainer.publish_reference(str(base))
    changed_word(tmp_path / "copy", model())
    with pytest.raises(BaseMismatch):
        publisher(store, tmp_path / "other", base=tmp_path / "copy")
