"""A redo log that came with a checkpoint from elsewhere: it may change that checkpoint only."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from thinwire.checkpoint import Checkpoint, apply_in_place, recover
from thinwire.checkpoint.redo_log import Block, FileSize, RedoHead, RedoLog, RedoWriter
from thinwire.errors import BaseUnusable, FormatError, StoreError, ThinwireError

from .making import read_folder

WEIGHTS = "model.safetensors"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of somebody else, as large as the weights file is said to be."""
    path = tmp_path / "victim"
    path.write_bytes(b"A" * 100)
    return path


def seal(
    checkpoint: Path,
    patched: list[FileSize] | None = None,
    replaced: list[FileSize] | None = None,
    removed: list[str] | None = None,
) -> Path:
    """Give ``checkpoint`` a sealed log that writes ten bytes into every patched file."""
    redo = checkpoint / ".thinwire-redo"
    redo.mkdir()
    with RedoWriter(redo, RedoHead("0", patched or [], replaced or [], removed or [])) as log:
        for number in range(len(patched or [])):
            log.add(Block(number, 0, 1, np.arange(10, dtype=np.uint32), np.full(10, 66, np.uint8)))
        log.finish()
    return redo


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_patching_through_a_link(link: str, pair: tuple[Path, Path, Path], victim: Path) -> None:
    base, _, delta = pair
    (base / WEIGHTS).unlink()
    if link == "symbolic":
        (base / WEIGHTS).symlink_to(victim)
    else:
        os.link(victim, base / WEIGHTS)
    seal(base, [FileSize(WEIGHTS, 100)])
    for act in (lambda: recover(base), lambda: apply_in_place(base, delta)):
        with pytest.raises(BaseUnusable, match=r"is a link|2 names"):
            act()
    assert victim.read_bytes() == b"A" * 100


def test_a_link_is_found_before_anything_changes(
    pair: tuple[Path, Path, Path], victim: Path
) -> None:
    base, _, _ = pair
    (base / "config.json").unlink()
    (base / "config.json").symlink_to(victim)
    redo = seal(
        base, [FileSize(WEIGHTS, (base / WEIGHTS).stat().st_size)], [FileSize("config.json", 3)]
    )
    (redo / "new-0").write_bytes(b"new")
    before = (base / WEIGHTS).read_bytes()
    with pytest.raises(BaseUnusable, match=r"config\.json is a link"):
        recover(base)
    assert (base / WEIGHTS).read_bytes() == before
    assert victim.read_bytes() == b"A" * 100


def test_a_staged_file_that_is_a_link(pair: tuple[Path, Path, Path], victim: Path) -> None:
    base, _, _ = pair
    redo = seal(base, [], [FileSize("config.json", 100)])
    (redo / "new-0").symlink_to(victim)
    with pytest.raises(BaseUnusable, match="is a link"):
        recover(base)
    (redo / "new-0").unlink()
    os.link(victim, redo / "new-0")
    with pytest.raises(BaseUnusable, match="2 names"):
        recover(base)
    assert (base / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["precious", ".git"])
def test_folders_are_never_removed(name: str, pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    (base / name).mkdir()
    (base / name / "file").touch()
    seal(base, removed=["x.txt", name])
    with pytest.raises(BaseUnusable, match="folder"):
        recover(base)
    assert (base / name / "file").exists()
    assert (base / "x.txt").exists()


def test_removing_a_link_leaves_what_it_points_at(
    pair: tuple[Path, Path, Path], victim: Path, tmp_path: Path
) -> None:
    base, _, _ = pair
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    (base / "to-file").symlink_to(victim)
    (base / "to-folder").symlink_to(folder)
    seal(base, removed=["to-file", "to-folder", "already-gone"])
    assert recover(base) == "finished"
    assert victim.exists()
    assert (folder / "file").exists()
    assert not (base / "to-file").is_symlink()


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_only_regular_files_are_patched_and_replaced(
    name: str, pair: tuple[Path, Path, Path]
) -> None:
    base, _, _ = pair
    (base / "folder").mkdir()
    os.mkfifo(base / "pipe")
    redo = seal(base, [FileSize(name, 0)])
    with pytest.raises(BaseUnusable):
        recover(base)
    (redo / "log").unlink()
    redo.rmdir()
    redo = seal(base, [], [FileSize(name, 1)])
    (redo / "new-0").write_bytes(b"1")
    with pytest.raises(BaseUnusable, match="not a regular file"):
        recover(base)


@pytest.mark.parametrize("linked", ["the log", "its folder"])
def test_a_log_that_lies_elsewhere(
    linked: str, pair: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, _, _ = pair
    redo = seal(base, removed=["x.txt"])
    inner = redo / "log" if linked == "the log" else redo
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BaseUnusable):
        recover(base)
    assert (base / "x.txt").exists()


def test_marks_that_are_dangling_links(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, _ = pair
    (base / ".thinwire-staging").symlink_to(tmp_path / "nowhere")
    assert recover(base) == "discarded"
    (base / ".thinwire-redo").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BaseUnusable):
        Checkpoint.open(base)
    with pytest.raises(BaseUnusable):
        recover(base)


def test_staging_that_is_a_link_to_a_folder(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, _ = pair
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (base / ".thinwire-staging").symlink_to(tmp_path / "mine")
    assert recover(base) == "discarded"
    assert (tmp_path / "mine" / "file").exists()


def test_a_lock_that_is_a_link(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, delta = pair
    before = read_folder(base)
    (base / ".thinwire-lock").symlink_to(tmp_path / "made")
    with pytest.raises(StoreError, match=r"thinwire-lock.*symbolic link"):
        apply_in_place(base, delta)
    assert not (tmp_path / "made").exists()
    (base / ".thinwire-lock").unlink()
    assert read_folder(base) == before


@pytest.mark.parametrize("name", [".thinwire-lock", ".Thinwire-x", ".a.thinwire-redo", "..", "..x"])
def test_names_of_our_own(name: str, pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    seal(base, removed=[name])
    with pytest.raises(BaseUnusable, match="the file name"):
        recover(base)


def test_a_block_spans_no_more_than_a_chunk(tmp_path: Path) -> None:
    for last in (2**20 - 1, 2**20):
        folder = tmp_path / str(last)
        folder.mkdir()
        with RedoWriter(folder, RedoHead("0", [FileSize("x", 1 << 40)], [], [])) as log:
            positions = np.array([0, last], np.uint32)
            log.add(Block(0, 0, 8, positions, np.zeros(16, np.uint8)))
            log.finish()
    RedoLog(tmp_path / str(2**20 - 1))
    with pytest.raises(FormatError, match="further apart"):
        RedoLog(tmp_path / str(2**20))


def test_a_log_does_not_vouch_for_a_delta(pair: tuple[Path, Path, Path]) -> None:
    """Whatever delta a log says it is of: the result is compared with the delta at hand."""
    from thinwire.codec.delta import Delta

    base, new, delta = pair
    redo = base / ".thinwire-redo"
    redo.mkdir()
    with (
        Delta.open(delta) as opened,
        RedoWriter(redo, RedoHead(opened.identity, [], [], [])) as log,
    ):
        log.finish()
    apply_in_place(base, delta)
    assert read_folder(base) == read_folder(new)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_in_place_refuses_links_of_replaced_files_too(
    link: str, name: str, pair: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, _, delta = pair
    (base / name).rename(tmp_path / "other-name")
    if link == "symbolic":
        (base / name).symlink_to(tmp_path / "other-name")
    else:
        os.link(tmp_path / "other-name", base / name)
    before = read_folder(base)
    with pytest.raises(BaseUnusable, match=r"is a link|2 names"):
        apply_in_place(base, delta)
    assert read_folder(base) == before
    with pytest.raises(ThinwireError):
        apply_in_place(base, b"")
