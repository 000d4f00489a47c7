"""A folder's whole checkpoint replaced by new files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from thinwire.checkpoint import MarkedFolder
from thinwire.checkpoint.file_names import MARK_NAME
from thinwire.errors import (
    BaseUnusable,
    InvalidArgument,
    StoreError,
)

from .making import (
    MIXED,
    names_in,
    pack,
    read_folder,
    visible,
    write_folder,
)


def test_what_stays_and_what_goes(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "folder",
        {"old.safetensors": pack(MIXED), "gone.txt": "x", ".gitattributes": "x"},
    )
    (path / "runs").mkdir()
    (path / "runs" / "log").touch()
    (path / ".git").mkdir()
    (path / ".thinwire-other").touch()
    (path / "link.txt").symlink_to(tmp_path / "target")
    (tmp_path / "target").touch()
    with MarkedFolder(path).installing(b"1") as installation:
        installation.path_for("new.safetensors").write_bytes(pack(MIXED))
        installation.path_for(".hidden").touch()
    assert names_in(path) == sorted(
        [".git", ".hidden", MARK_NAME, ".thinwire-other", "new.safetensors", "runs"]
    )
    assert (path / "runs" / "log").exists()
    assert (tmp_path / "target").exists()


def test_an_error_inside_leaves_the_folder(pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    before = read_folder(base)

    def begin() -> None:
        with MarkedFolder(base).installing(b"2") as installation:
            installation.path_for("config.json").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        begin()
    assert read_folder(base) == before


def test_a_file_that_was_not_written(pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    before = read_folder(base)
    with (
        pytest.raises(InvalidArgument, match=r"config\.json.*not written"),
        MarkedFolder(base).installing(b"2") as installation,
    ):
        installation.path_for("config.json")
    assert read_folder(base) == before


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/a", "a\\b", "a:b", "a\nb", MARK_NAME, ".thinwire-redo", "x" * 256],
)
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    folder = MarkedFolder(tmp_path / "folder")
    with (
        pytest.raises(InvalidArgument, match="file name"),
        folder.installing(b"1") as installation,
    ):
        installation.path_for(name)
    assert not names_in(folder.path)


def test_names_that_clash(tmp_path: Path) -> None:
    folder = MarkedFolder(write_folder(tmp_path / "folder", {"README.md": "x"}))
    with folder.installing(b"1") as installation:
        with pytest.raises(InvalidArgument, match="only in case"):
            installation.path_for("readme.md")
        installation.path_for("a.txt").touch()
        with pytest.raises(InvalidArgument, match="only in case"):
            installation.path_for("A.txt")
        with pytest.raises(InvalidArgument, match="before"):
            installation.path_for("a.txt")
    assert visible(folder.path) == {"a.txt": b""}


@pytest.mark.parametrize("kind", ["symbolic", "hard", "folder"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_targets_that_are_not_the_folders_own(when: str, kind: str, tmp_path: Path) -> None:
    folder = MarkedFolder(write_folder(tmp_path / "folder", {"m.safetensors": pack(MIXED)}))
    target, victim = folder.path / "x", tmp_path / "victim"
    victim.write_text("victim")

    def disturb() -> None:
        if kind == "symbolic":
            target.symlink_to(victim)
        elif kind == "hard":
            os.link(victim, target)
        else:
            target.mkdir()

    if when == "before":
        disturb()

    def begin() -> None:
        with folder.installing(b"1") as installation:
            installation.path_for("x").write_text("x")
            disturb()

    with pytest.raises(BaseUnusable):
        begin()
    assert victim.read_text() == "victim"
    assert names_in(folder.path) == ["m.safetensors", "x"]


@pytest.mark.parametrize("kind", ["symbolic", "hard", "folder"])
def test_staged_files_that_are_not_files_of_their_own(kind: str, tmp_path: Path) -> None:
    folder, cached = MarkedFolder(tmp_path / "folder"), tmp_path / "cached"
    cached.touch()

    def begin() -> None:
        with folder.installing(b"1") as installation:
            path = installation.path_for("x")
            if kind == "symbolic":
                path.symlink_to(cached)
            elif kind == "hard":
                os.link(cached, path)
            else:
                path.mkdir()

    with pytest.raises(BaseUnusable):
        begin()
    assert not names_in(folder.path)
    assert cached.exists()


@pytest.mark.parametrize("entry", ["pipe", "broken link", "a:b"])
def test_a_folder_that_no_checkpoint_may_be(entry: str, tmp_path: Path) -> None:
    folder = MarkedFolder(tmp_path / "folder")
    path = folder.path / entry
    if entry == "pipe":
        os.mkfifo(path)
    elif entry == "broken link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.touch()
    with pytest.raises(InvalidArgument), folder.installing(b"1"):
        raise AssertionError
    assert names_in(folder.path) == [entry]


def test_a_file_of_the_folder_is_half_updated(pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    (base / ".model.safetensors.thinwire-redo").mkdir()
    with pytest.raises(BaseUnusable, match="interrupted"), MarkedFolder(base).installing(b"1"):
        raise AssertionError


def test_modes_are_kept(tmp_path: Path) -> None:
    folder = MarkedFolder(write_folder(tmp_path / "folder", {"x": "x"}))
    (folder.path / "x").chmod(0o640)
    with folder.installing(b"1") as installation:
        installation.path_for("x").write_text("y")
    assert stat.S_IMODE((folder.path / "x").stat().st_mode) == 0o640


def test_a_full_disk_while_installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MarkedFolder(write_folder(tmp_path / "folder", {"x": "x"}))

    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def begin(call: str) -> None:
        with folder.installing(b"1") as installation:
            installation.path_for("x").write_text("y")
            monkeypatch.setattr(os, call, fill)

    for call in ("fsync", "write"):
        with pytest.raises(StoreError, match="No space left"):
            begin(call)
        monkeypatch.undo()
        assert read_folder(folder.path) == {"x": b"x"}
