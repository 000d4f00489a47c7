"""The files of a folder that are not weights: hidden ones, large ones, unknown ones, subfolders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.checkpoint import (
    Checkpoint,
    apply_checkpoint,
    apply_in_place,
    diff_checkpoint,
    verify_base,
)
from thinwire.checkpoint.plan import MAX_CARRIED_BYTES
from thinwire.errors import BaseUnusable, InvalidArgument, LimitExceeded

from .making import MIXED, MIXED_NEW, names_in, pack, read_folder, write_folder

GIB = 1 << 30


def sparse(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(size_bytes)


def test_hidden_files_travel(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    (base / ".gitattributes").write_text("old")
    (base / ".old").write_text("goes")
    (new / ".gitattributes").write_text("new")
    (new / ".new.safetensors").write_text("hidden: not weights")
    diff_checkpoint(base, new, delta, overwrite=True)
    apply_checkpoint(base, delta, base.with_name("out"))
    assert read_folder(base.with_name("out")) == read_folder(new)
    apply_in_place(base, delta)
    assert read_folder(base) == read_folder(new)


def test_hidden_folders_and_our_own_names_do_not(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    for name in (".git", ".cache"):
        (new / name).mkdir()
        (new / name / "inner").touch()
    for name in (".thinwire-lock", ".model.safetensors.thinwire-00ff", ".nfs000000001"):
        (new / name).write_bytes(b"none of the checkpoint's")
    os.mkfifo(new / ".pipe")
    (new / ".#lock").symlink_to("someone@somewhere.1234")
    checkpoint = Checkpoint.open(new)
    assert sorted(checkpoint.files) == ["config.json", "x.txt"]
    diff_checkpoint(base, new, delta, overwrite=True)
    apply_checkpoint(base, delta, base.with_name("out"))
    assert names_in(base.with_name("out")) == ["config.json", "model.safetensors", "x.txt"]


def test_unknown_files_are_left_alone_in_place(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    unknown = {"train.log": b"log", ".note": b"note"}
    for name, data in unknown.items():
        (base / name).write_bytes(data)
    apply_in_place(base, delta)
    apply_in_place(base, delta)
    assert read_folder(base) == read_folder(new) | unknown


def test_an_unknown_file_whose_name_clashes(tmp_path: Path) -> None:
    base = write_folder(tmp_path / "a", {"w.safetensors": pack(MIXED)})
    new = write_folder(tmp_path / "b", {"w.safetensors": pack(MIXED_NEW), "README.md": "new"})
    diff_checkpoint(base, new, tmp_path / "d.tw")
    (base / "readme.md").write_text("mine")
    before = read_folder(base)
    with pytest.raises(InvalidArgument, match="only in case"):
        apply_in_place(base, tmp_path / "d.tw")
    assert read_folder(base) == before


def test_a_new_file_where_a_folder_is(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    (new / "extra").touch()
    diff_checkpoint(base, new, delta, overwrite=True)
    (base / "extra").mkdir()
    with pytest.raises(BaseUnusable, match="not a regular file"):
        apply_in_place(base, delta)
    assert names_in(base) == ["config.json", "extra", "model.safetensors", "x.txt"]


def test_subfolders_are_left_out_knowingly(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    for side in (base, new):
        (side / "1_Pooling").mkdir()
        (side / "1_Pooling" / "config.json").write_text(side.name)
    with pytest.raises(InvalidArgument, match="ignore_subfolders"):
        diff_checkpoint(base, new, delta, overwrite=True)
    with pytest.raises(InvalidArgument, match="'1_Pooling' is a subfolder"):
        Checkpoint.open(base)
    assert "1_Pooling" not in Checkpoint.open(base, ignore_subfolders=True).files
    diff_checkpoint(base, new, delta, overwrite=True, ignore_subfolders=True)
    verify_base(base, delta)
    apply_checkpoint(base, delta, base.with_name("out"))
    assert names_in(base.with_name("out")) == ["config.json", "model.safetensors", "x.txt"]
    apply_in_place(base, delta)
    assert (base / "1_Pooling" / "config.json").read_text() == "a"
    assert (base / "config.json").read_text() == "[]"


def test_a_large_file_that_does_not_change(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    sparse(base / "pytorch_model.bin", GIB + 1)
    os.link(base / "pytorch_model.bin", new / "pytorch_model.bin")
    diff_checkpoint(base, new, delta, overwrite=True)
    verify_base(base, delta)
    apply_in_place(base, delta)
    assert (base / "pytorch_model.bin").stat().st_size == GIB + 1
    assert names_in(base) == names_in(new)


def test_a_large_file_that_changes(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    sparse(new / "pytorch_model.bin", MAX_CARRIED_BYTES + 1)
    with pytest.raises(LimitExceeded, match=r"pytorch_model\.bin"):
        diff_checkpoint(base, new, delta.with_name("e.tw"))
    assert not delta.with_name("e.tw").exists()


def test_what_a_delta_carries_may_be_as_large_as_the_limit(
    pair: tuple[Path, Path, Path],
) -> None:
    base, new, delta = pair
    sparse(new / "pytorch_model.bin", MAX_CARRIED_BYTES - len("[]"))
    diff_checkpoint(base, new, delta, overwrite=True)
    apply_in_place(base, delta)
    assert read_folder(base) == read_folder(new)
