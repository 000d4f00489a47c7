"""A folder with a mark: what it says, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint, MarkedFolder, diff_checkpoint, recover
from thinwire.checkpoint.file_names import MARK_NAME, MAX_MARK_BYTES
from thinwire.checkpoint.redo_log import FileSize
from thinwire.codec.delta import Delta
from thinwire.codec.delta_set import DeltaSet
from thinwire.errors import (
    BaseMismatch,
    BaseUnusable,
    InvalidArgument,
    StoreError,
)

from .making import (
    FOLDER_PAIRS,
    MIXED,
    MIXED_NEW,
    names_in,
    pack,
    read_folder,
    visible,
    write_folder,
)
from .test_foreign_log import seal


def install(folder: MarkedFolder, source: Path, mark: bytes) -> None:
    with folder.installing(mark) as installation:
        for path in sorted(source.iterdir()):
            installation.path_for(path.name).write_bytes(path.read_bytes())


def apply(folder: MarkedFolder, delta: Path, mark: bytes) -> None:
    with Delta.open(delta) as opened:
        folder.apply(opened, mark)


def test_a_new_folder_has_no_mark(tmp_path: Path) -> None:
    folder = MarkedFolder(tmp_path / "deep" / "folder")
    assert folder.read_mark() is None
    assert folder.recover() == "clean"
    folder.unmark()
    assert not names_in(tmp_path / "deep" / "folder")


def test_a_file_or_a_dangling_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(InvalidArgument, match="not a folder"):
            MarkedFolder(tmp_path / name)


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with MarkedFolder(tmp_path / "link").installing(b"1") as installation:
        installation.path_for("x").write_text("x")
    assert visible(tmp_path / "real") == {"x": b"x"}


@pytest.mark.parametrize("make_pair", FOLDER_PAIRS)
@pytest.mark.parametrize("workers", [1, 3])
def test_installed_updated_and_installed_again(
    workers: int, make_pair: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    base, new = make_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    folder = MarkedFolder(tmp_path / "folder")
    install(folder, base, b"1")
    assert (visible(folder.path), folder.read_mark()) == (visible(base), b"1")
    Checkpoint.open(folder.path)
    with Delta.open(tmp_path / "d.tw") as delta:
        folder.apply(delta, b"2", workers=workers)
    assert (visible(folder.path), folder.read_mark()) == (visible(new), b"2")
    # Now that it is the result already, only the mark switches.
    apply(folder, tmp_path / "d.tw", b"3")
    assert (visible(folder.path), folder.read_mark()) == (visible(new), b"3")
    install(folder, base, b"4")
    assert (visible(folder.path), folder.read_mark()) == (visible(base), b"4")
    assert [name for name in names_in(folder.path) if name[0] == "."] == [MARK_NAME]


def test_a_set_of_deltas(tmp_path: Path) -> None:
    shards = []
    for shard, names in enumerate(
        [["w", "empty", "q"], [n for n in MIXED if n not in "w empty q"]]
    ):
        sides = [
            write_folder(
                tmp_path / f"{side}{shard}",
                {f"m-{shard}.safetensors": pack({n: tensors[n] for n in names})},
            )
            for side, tensors in (("a", MIXED), ("b", MIXED_NEW))
        ]
        diff_checkpoint(*sides, tmp_path / f"{shard}.tw")
        shards.append(sides)
    whole = {path.name: path.read_bytes() for sides in shards for path in sides[0].iterdir()}
    folder = MarkedFolder(write_folder(tmp_path / "folder", whole))
    with DeltaSet([Delta.open(tmp_path / f"{shard}.tw") for shard in (0, 1)]) as deltas:
        folder.apply(deltas, b"2")
    new = {path.name: path.read_bytes() for sides in shards for path in sides[1].iterdir()}
    assert visible(folder.path) == new


def test_a_delta_that_changes_nothing(pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    same = base.with_name("same.tw")
    diff_checkpoint(base, base, same)
    folder = MarkedFolder(base)
    before = visible(base)
    for mark in (b"1", b"", bytes(MAX_MARK_BYTES)):
        apply(folder, same, mark)
        assert (visible(base), folder.read_mark()) == (before, mark)


def test_a_delta_that_does_not_fit(pair: tuple[Path, Path, Path]) -> None:
    base, _, delta = pair
    folder = MarkedFolder(base)
    (base / MARK_NAME).write_bytes(b"1")
    (base / "x.txt").write_text("changed since")
    before = read_folder(base)
    with pytest.raises(BaseMismatch):
        apply(folder, delta, b"2")
    assert read_folder(base) == before
    assert folder.read_mark() == b"1"


def test_marks_that_are_too_large(tmp_path: Path, pair: tuple[Path, Path, Path]) -> None:
    base, _, delta = pair
    folder, mark = MarkedFolder(base), bytes(MAX_MARK_BYTES + 1)
    with pytest.raises(InvalidArgument, match="mark"):
        apply(folder, delta, mark)
    with pytest.raises(InvalidArgument, match="mark"), folder.installing(mark):
        pass
    (base / MARK_NAME).write_bytes(mark)
    with pytest.raises(BaseUnusable, match="not a mark"):
        folder.read_mark()


@pytest.mark.parametrize("kind", ["symbolic", "hard", "folder", "pipe"])
def test_marks_that_are_no_files_of_their_own(
    kind: str, pair: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, _, delta = pair
    victim = tmp_path / "victim"
    victim.write_text("victim")
    path = base / MARK_NAME
    {
        "symbolic": lambda: path.symlink_to(victim),
        "hard": lambda: os.link(victim, path),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    folder, before = MarkedFolder(base), visible(base)

    def begin() -> None:
        with folder.installing(b"2"):
            raise AssertionError

    for act in (folder.read_mark, lambda: apply(folder, delta, b"2"), begin):
        with pytest.raises(BaseUnusable):
            act()
    if kind == "folder":
        with pytest.raises(StoreError):
            folder.unmark()
    else:
        folder.unmark()
        assert folder.read_mark() is None
    assert victim.read_text() == "victim"
    assert visible(base) == before


def test_unmark(pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    folder, before = MarkedFolder(base), visible(base)
    (base / MARK_NAME).write_bytes(b"1")
    folder.unmark()
    assert folder.read_mark() is None
    assert visible(base) == before


def test_one_writer_at_a_time(pair: tuple[Path, Path, Path]) -> None:
    base, _, delta = pair
    folder = MarkedFolder(base)

    def begin() -> None:
        with folder.installing(b"2"):
            pass

    acts: list[Callable[[], object]] = [
        folder.read_mark,
        folder.recover,
        folder.unmark,
        folder.clear,
        begin,
        lambda: apply(folder, delta, b"2"),
    ]
    with folder.installing(b"1") as installation:
        for act in acts:
            with pytest.raises(BaseUnusable, match="another process"):
                act()
        installation.path_for("m.safetensors").write_bytes(pack(MIXED))
    assert visible(base) == {"m.safetensors": pack(MIXED)}


# Logs that came with a folder from elsewhere


def test_a_log_may_replace_the_mark_and_do_nothing_else_to_it(
    pair: tuple[Path, Path, Path],
) -> None:
    base, _, _ = pair
    (base / MARK_NAME).write_bytes(b"old")
    mark = FileSize(MARK_NAME, 3)
    for wrong in (
        {"patched": [FileSize(MARK_NAME, 10)]},
        {"removed": [MARK_NAME]},
        {"replaced": [FileSize(MARK_NAME, MAX_MARK_BYTES + 1)]},
        {"replaced": [mark, FileSize(".thinwire-lock", 3)]},
        {"replaced": [FileSize(".Thinwire-mark", 3)]},
        {"replaced": [mark], "removed": [MARK_NAME]},
    ):
        redo = seal(base, **wrong)  # type: ignore[arg-type]
        with pytest.raises(BaseUnusable, match=r"file name|mark has more"):
            recover(base)
        assert (base / MARK_NAME).read_bytes() == b"old"
        (redo / "log").unlink()
        redo.rmdir()
    redo = seal(base, replaced=[mark])
    (redo / "new-0").write_bytes(b"new")
    assert MarkedFolder(base).read_mark() == b"new"


def test_a_log_of_a_single_file_cannot_reach_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(pack(MIXED))
    (tmp_path / MARK_NAME).write_bytes(b"old")
    redo = seal(tmp_path, replaced=[FileSize(MARK_NAME, 3)])
    (redo / "new-0").write_bytes(b"new")
    redo.rename(tmp_path / ".m.safetensors.thinwire-redo")
    with pytest.raises(BaseUnusable):
        recover(path)
    assert (tmp_path / MARK_NAME).read_bytes() == b"old"


def test_a_log_that_cannot_be_finished(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    folder = MarkedFolder(base)
    (base / MARK_NAME).write_bytes(b"old")
    seal(base, removed=[".."])
    for act in (folder.recover, folder.read_mark, lambda: apply(folder, delta, b"2")):
        with pytest.raises(BaseUnusable, match="cannot be finished"):
            act()
    folder.unmark()
    assert not (base / MARK_NAME).exists()
    with pytest.raises(BaseUnusable, match="cannot be finished"):
        folder.read_mark()
    folder.clear()
    assert folder.read_mark() is None
    assert names_in(base) == ["config.json", "x.txt"]
    install(folder, new, b"3")
    assert (visible(base), folder.read_mark()) == (visible(new), b"3")
