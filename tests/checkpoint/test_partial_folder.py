"""Folders that hold some tensors of a model follow its deltas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.checkpoint import MarkedFolder, diff_checkpoint
from thinwire.checkpoint.file_names import MARK_NAME
from thinwire.codec.delta import Delta
from thinwire.codec.write import Attachment, Pair, write_delta
from thinwire.errors import (
    BaseMismatch,
    Corrupt,
    TensorMismatch,
)

from .making import (
    MIXED,
    MIXED_NEW,
    pack,
    read_folder,
    stepped,
    tensor,
    visible,
    write_folder,
)

SOME = {"w", "empty", "scale"}


@pytest.fixture
def partial(tmp_path: Path) -> tuple[MarkedFolder, Path]:
    """A folder with three tensors of a model of two shards, and the model's delta."""
    names = list(MIXED)
    sides = []
    for side, tensors in (("a", MIXED), ("b", MIXED_NEW)):
        files: dict[str, bytes | str] = {
            "m-1.safetensors": pack({n: tensors[n] for n in names[:3]}, {"side": side}),
            "m-2.safetensors": pack({n: tensors[n] for n in names[3:]}),
            "model.safetensors.index.json": f'{{"weight_map": {{}}, "side": "{side}"}}',
            "config.json": side,
            "vocab.txt": "same",
            f"only-{side}.txt": side,
        }
        sides.append(write_folder(tmp_path / side, files))
    diff_checkpoint(*sides, tmp_path / "d.tw")
    return partial_folder(tmp_path / "part", MIXED), tmp_path / "d.tw"


def partial_folder(path: Path, tensors: dict[str, tuple], **files: str) -> MarkedFolder:  # type: ignore[type-arg]
    weights = {name: tensors[name] for name in sorted(SOME)}
    content = {"mine.safetensors": pack(weights), "config.json": "a", "only-a.txt": "a", **files}
    return MarkedFolder(write_folder(path, content))


def follow(folder: MarkedFolder, delta: Path, mark: bytes = b"2", only: set[str] = SOME) -> None:
    with Delta.open(delta, only=only) as opened:
        folder.apply(opened, mark, partial=True)


def test_a_partial_folder_follows(partial: tuple[MarkedFolder, Path]) -> None:
    folder, delta = partial
    for mark in (b"2", b"3"):
        follow(folder, delta, mark)
        assert visible(folder.path) == {
            "mine.safetensors": pack({name: MIXED_NEW[name] for name in sorted(SOME)}),
            "config.json": b"b",
            "only-b.txt": b"b",
        }
        assert folder.read_mark() == mark


def test_a_partial_folder_keeps_its_own_index(partial: tuple[MarkedFolder, Path]) -> None:
    folder, delta = partial
    own = '{"weight_map": {"w": "mine.safetensors"}}'
    (folder.path / "model.safetensors.index.json").write_text(own)
    follow(folder, delta)
    assert (folder.path / "model.safetensors.index.json").read_text() == own


def test_a_partial_folder_is_not_a_whole_one(partial: tuple[MarkedFolder, Path]) -> None:
    folder, delta = partial
    before = read_folder(folder.path)
    with Delta.open(delta, only=SOME) as opened, pytest.raises((TensorMismatch, BaseMismatch)):
        folder.apply(opened, b"2")
    with Delta.open(delta) as opened, pytest.raises(TensorMismatch, match="missing"):
        folder.apply(opened, b"2", partial=True)
    assert read_folder(folder.path) == before


@pytest.mark.parametrize(("only", "reason"), [(SOME | {"q"}, "missing"), ({"w"}, "not among")])
def test_tensors_are_exactly_those_of_the_folder(
    only: set[str], reason: str, partial: tuple[MarkedFolder, Path]
) -> None:
    folder, delta = partial
    before = read_folder(folder.path)
    with pytest.raises(TensorMismatch, match=reason):
        follow(folder, delta, only=only)
    assert read_folder(folder.path) == before


@pytest.mark.parametrize("change", ["full", "removed", "dtype", "shape"])
def test_a_layout_that_changes(change: str, tmp_path: Path) -> None:
    new = {name: MIXED_NEW[name] for name in SOME}
    old = dict(MIXED)
    if change == "full":
        new["scale"] = tensor("F32", [2], 1)
    elif change == "removed":
        del new["scale"]
    elif change == "dtype":
        old["scale"] = ("I32", [], MIXED["scale"][2])
    else:
        old["scale"] = ("F32", [1], MIXED["scale"][2])
    sides = [
        write_folder(tmp_path / "a", {"m.safetensors": pack({n: MIXED[n] for n in SOME})}),
        write_folder(tmp_path / "b", {"m.safetensors": pack(new)}),
    ]
    diff_checkpoint(*sides, tmp_path / "d.tw")
    folder = partial_folder(tmp_path / "part", old)
    with pytest.raises(TensorMismatch, match=r"layout.*Install the folder again"):
        follow(folder, tmp_path / "d.tw")


def test_files_that_are_not_carried(partial: tuple[MarkedFolder, Path]) -> None:
    folder, delta = partial
    (folder.path / "vocab.txt").write_text("other")
    with pytest.raises(BaseMismatch, match=r"vocab\.txt"):
        follow(folder, delta)
    (folder.path / "vocab.txt").write_text("same")
    follow(folder, delta)
    assert (folder.path / "vocab.txt").read_text() == "same"


def test_a_wrong_base_in_a_partial_folder(partial: tuple[MarkedFolder, Path]) -> None:
    folder, delta = partial
    wrong = MIXED | {"w": stepped(MIXED["w"], 77)}
    (folder.path / "mine.safetensors").write_bytes(pack({n: wrong[n] for n in sorted(SOME)}))
    before = read_folder(folder.path)
    with pytest.raises(BaseMismatch, match="'w'"):
        follow(folder, delta)
    assert read_folder(folder.path) == before


@pytest.mark.parametrize("name", ["../x", MARK_NAME, "x.safetensors"])
@pytest.mark.parametrize("kind", ["file", "removed"])
def test_hostile_file_names(kind: str, name: str, tmp_path: Path) -> None:
    folder = MarkedFolder(write_folder(tmp_path / "f", {"m.safetensors": pack({"w": MIXED["w"]})}))
    data = np.frombuffer(MIXED["w"][2], np.uint8)
    from thinwire.codec.digest import xxh3_64

    file = Attachment(name, kind, b"x" if kind == "file" else None, 1, xxh3_64(b"x"))
    with (tmp_path / "d.tw").open("wb") as out:
        write_delta(out, [Pair("w", "BF16", (40, 30), data, data)], [file])
    before = read_folder(folder.path)
    with pytest.raises(Corrupt):
        follow(folder, tmp_path / "d.tw", only={"w"})
    assert read_folder(folder.path) == before
    assert not (tmp_path / "x").exists()
