from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    StoreError,
    Unavailable,
    UnsafeStore,
)
from thinwire.store import Store, open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Store:
    return open_store(str(folder), retry_s=0)


WRITES: dict[str, Callable[[Store, Path], Any]] = {
    "put": lambda store, path: store.put("x/y/new", b"data"),
    "put_file": lambda store, path: store.put_file("x/y/new", path),
    "put_if_absent": lambda store, path: store.put_if_absent("x/y/new", b"data"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"data")
    return path


class Recorder:
    """What is synced and named, in order: "sync FILE" only counts what had been written by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.steps: list[str] = []
        self.folder = folder
        for name in ("fsync", "replace", "link"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "fsync":
                path = Path(f"/proc/self/fd/{arguments[0]}").readlink()
                self.steps.append(f"sync {self._shown(path)}")
            else:
                self.steps.append(f"name {self._shown(Path(arguments[1]))}")
            return real(*arguments, **options)

        return call

    def _shown(self, path: Path) -> str:
        if path.parent.name == ".thinwire-writing":
            return f"data of {path.stat().st_size} bytes"
        return str(path.relative_to(self.folder.parent))


@pytest.mark.parametrize("operation", WRITES)
def test_the_data_is_on_disk_before_the_name_and_the_name_before_the_answer(
    monkeypatch: pytest.MonkeyPatch, folder: Path, store: Store, source: Path, operation: str
) -> None:
    recorder = Recorder(monkeypatch, folder)
    WRITES[operation](store, source)
    assert recorder.steps == [
        "sync .",  # the store's folder is new
        "sync store",  # so is the folder for what is being written
        "sync data of 4 bytes",
        "sync store",  # x is new
        "sync store/x",
        "name store/x/y/new",
        "sync store/x/y",
    ]


@pytest.mark.parametrize(
    ("operation", "broken"),
    [
        ("put", "fsync"),
        ("put", "replace"),
        ("put_file", "fsync"),
        ("put_file", "replace"),
        ("put_if_absent", "fsync"),
        ("put_if_absent", "link"),
    ],
)
def test_a_failed_write_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    store: Store,
    source: Path,
    operation: str,
    broken: str,
) -> None:
    store.put("other", b"x")

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(Unavailable, match="x/y/new"):
        WRITES[operation](store, source)
    monkeypatch.undo()
    assert [entry.key for entry in store.list("")] == ["other"]
    assert not list((folder / ".thinwire-writing").iterdir())


def test_a_file_system_without_links_is_unsafe(
    monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(UnsafeStore, match="single_writer"):
        store.put_if_absent("a", b"x")
    single = open_store(str(folder), single_writer=True)
    single.put_if_absent("a", b"x")
    with pytest.raises(AlreadyExists):
        single.put_if_absent("a", b"y")


def test_a_link_whose_answer_was_lost_is_a_win(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    real = os.link

    def link_twice(made: Path, target: Path) -> None:
        real(made, target)
        real(made, target)

    monkeypatch.setattr(os, "link", link_twice)
    store.put_if_absent("a", b"x")
    monkeypatch.undo()
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a", b"x")


def test_what_a_killed_writer_left_is_never_an_object_and_goes_after_a_day(
    folder: Path, store: Store
) -> None:
    store.put("a/b", b"x")
    staging = folder / ".thinwire-writing"
    (staging / "old").write_bytes(b"half")
    (staging / "new").write_bytes(b"half")
    os.utime(staging / "old", (time.time() - 90_000,) * 2)
    assert [entry.key for entry in store.list("")] == ["a/b"]
    open_store(str(folder)).put("a/c", b"x")
    assert [path.name for path in staging.iterdir()] == ["new"]


def test_deleting_removes_empty_folders_but_never_the_store(folder: Path, store: Store) -> None:
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete(["a/b/c"])
    assert sorted(path.name for path in (folder / "a").iterdir()) == ["d"]
    store.delete(["a/d"])
    assert folder.is_dir()
    assert not (folder / "a").exists()


def test_writing_beside_deleting(store: Store) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def write_and_delete(number: int) -> None:
        for _ in range(40):
            store.put(f"a/b/{number}", b"x")
            assert store.get(f"a/b/{number}", limit_bytes=1) == b"x"
            store.delete([f"a/b/{number}"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_and_delete, range(8)))
    assert list(store.list("")) == []


def test_an_object_and_a_folder_of_one_name(store: Store) -> None:
    store.put("a/b", b"x")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match="folder"):
            write("a", b"y")
        with pytest.raises(StoreError, match=r"a/b/c.*not a folder"):
            write("a/b/c", b"y")
    assert [entry.key for entry in store.list("")] == ["a/b"]


def test_links_and_devices(folder: Path, store: Store, tmp_path: Path) -> None:
    store.put("a/b", b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"s")
    (folder / "a" / "link").symlink_to(tmp_path / "outside")
    (folder / "a" / "round").symlink_to(folder)
    (folder / "a" / "broken").symlink_to("none")
    os.mkfifo(folder / "a" / "pipe")
    assert [entry.key for entry in store.list("")] == ["a/b"]
    with pytest.raises(NotFound):
        store.get("a/pipe", limit_bytes=9)


def test_names_that_are_no_keys_are_not_listed(folder: Path, store: Store) -> None:
    store.put("a", b"x")
    (folder / "new\nline").write_bytes(b"x")
    (folder / "back\\slash").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(folder) + b"/not-utf8-\xff")).write_bytes(b"x")
    assert [entry.key for entry in store.list("")] == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_no_permission(folder: Path, store: Store) -> None:
    store.put("a/b", b"x")
    (folder / "a").chmod(0)
    try:
        with pytest.raises(AccessDenied):
            store.get("a/b", limit_bytes=1)
        with pytest.raises(AccessDenied):
            list(store.list(""))
    finally:
        (folder / "a").chmod(0o755)


def test_the_root_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    store = open_store(str(tmp_path / "f"), retry_s=0)
    with pytest.raises(StoreError, match="not a folder"):
        store.put("a", b"x")
    with pytest.raises(NotFound):
        store.get("a", limit_bytes=1)
