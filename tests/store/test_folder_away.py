"""A store's folder that goes away: not mounted, moved, or another and empty one in its place."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import AccessDenied, NotFound, Unavailable
from thinwire.store import RetryingStore, Store, open_store
from thinwire.store.clock import VirtualClock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mount" / "store"


@pytest.fixture
def store(folder: Path) -> Store:
    """A store that has held something."""
    made = open_store(str(folder), retry_s=0)
    made.put("a/b", b"data")
    return made


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def put_empty_one(folder: Path) -> None:
    move_away(folder)
    folder.mkdir()


def unmount(folder: Path) -> None:
    """The folder above is empty as well."""
    folder.parent.rename(folder.parent.with_name("elsewhere"))
    folder.parent.mkdir()


def empty(folder: Path) -> None:
    """Removed, and made again: most file systems give it the number that the old one had."""
    shutil.copytree(folder, folder.with_name("away"))
    for path in folder.iterdir():
        shutil.rmtree(path)


WAYS = pytest.mark.parametrize("go_away", [move_away, put_empty_one, unmount])


def calls(tmp_path: Path) -> dict[str, Callable[[Store], Any]]:
    file = tmp_path / "file"
    file.write_bytes(b"data")
    return {
        "get": lambda store: store.get("a/b", limit_bytes=9),
        "get of another": lambda store: store.get("c", limit_bytes=9),
        "get_range": lambda store: store.get_range("a/b", 0, 0),
        "list": lambda store: [*store.list("")],
        "list of a folder": lambda store: [*store.list("a/")],
        "put": lambda store: store.put("d", b"data"),
        "put below": lambda store: store.put("a/d", b"data"),
        "put_file": lambda store: store.put_file("d/e", file),
        "put_if_absent": lambda store: store.put_if_absent("a/d", b"data"),
        "delete": lambda store: store.delete(["a/b"]),
    }


@pytest.mark.parametrize("go_away", [move_away, put_empty_one, unmount, empty])
def test_every_call_says_so_and_makes_nothing(
    store: Store, folder: Path, tmp_path: Path, go_away: Callable[[Path], None]
) -> None:
    go_away(folder)
    there = sorted(tmp_path.rglob("*"))
    for name, call in calls(tmp_path / "..").items():
        with pytest.raises(Unavailable, match="file://") as raised:
            call(store)
        assert "mounted" in raised.value.hint, name
    assert sorted(tmp_path.rglob("*")) == there


def test_it_comes_back(store: Store, folder: Path) -> None:
    put_empty_one(folder)
    with pytest.raises(Unavailable):
        store.put("a/c", b"data")
    folder.rmdir()
    folder.with_name("away").rename(folder)
    assert store.get("a/b", limit_bytes=9) == b"data"
    store.put("a/c", b"data")
    assert [entry.key for entry in store.list("")] == ["a/b", "a/c"]


def test_it_is_waited_for(store: Store, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an object store that does not answer; that it does again is told as well."""

    class Back(VirtualClock):
        def sleep_until(self, moment: float) -> None:
            super().sleep_until(moment)
            if moment > 5 and not folder.exists():
                folder.with_name("away").rename(folder)

    patient = RetryingStore(store, clock=Back())
    assert patient.get("a/b", limit_bytes=9) == b"data"
    assert caplog.text == ""
    move_away(folder)
    assert patient.get("a/b", limit_bytes=9) == b"data"
    first, last = caplog.records[0].getMessage(), caplog.records[-1].getMessage()
    assert "/store: the folder is not there any more; it is tried again for 60 s" in first
    assert "/store answers again, " in last
    # Also where the answer is that there is no such key.
    caplog.clear()
    move_away(folder)
    with pytest.raises(NotFound):
        RetryingStore(store, clock=Back()).get("c", limit_bytes=9)
    assert "/store answers again, " in caplog.records[-1].getMessage()


def test_another_one_that_holds_something_is_taken(store: Store, folder: Path) -> None:
    """A restored copy, a moved mount, or another stream."""
    move_away(folder)
    open_store(str(folder)).put("a/c", b"other")
    with pytest.raises(NotFound):
        store.get("a/b", limit_bytes=9)
    store.put("a/b", b"data")
    assert [entry.key for entry in store.list("a/")] == ["a/b", "a/c"]
    # And that one goes away in its turn.
    folder.rename(folder.with_name("other"))
    folder.mkdir()
    with pytest.raises(Unavailable):
        store.get("a/b", limit_bytes=9)


def test_all_objects_may_be_deleted(store: Store) -> None:
    store.delete(["a/b"])
    assert [*store.list("")] == []
    with pytest.raises(NotFound):
        store.get("a/b", limit_bytes=9)
    store.put("a/b", b"data")


def test_one_that_was_never_there_is_made(folder: Path) -> None:
    made = open_store(str(folder), retry_s=0)
    assert [*made.list("")] == []
    with pytest.raises(NotFound):
        made.get("a", limit_bytes=9)
    made.delete(["a"])
    assert not folder.exists()
    made.put_if_absent("a", b"data")
    assert folder.is_dir()


@WAYS
@pytest.mark.parametrize(
    ("call", "number"),
    [
        *(("stat", number) for number in range(1, 9)),
        *(("mkdir", number) for number in range(1, 3)),
        *(("fsync", number) for number in range(1, 4)),
        ("replace", 1),
    ],
)
def test_it_goes_away_within_a_write(
    store: Store,
    folder: Path,
    tmp_path: Path,
    call: str,
    number: int,
    go_away: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At one of the calls to the system: it is written there, or nothing is made here."""
    real, count, there = getattr(os, call), 0, []

    def away_before(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            monkeypatch.setattr(os, call, real)
            go_away(folder)
            there.extend(sorted(tmp_path.rglob("*")))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, away_before)
    try:
        store.put("new/c", b"data")
    except Unavailable:
        assert there
    else:
        assert [path.read_bytes() for path in tmp_path.rglob("new/c")] == [b"data"]
    monkeypatch.undo()
    assert not there or not [*folder.parent.glob("store/*")]


def test_one_that_held_nothing_may_become_another(folder: Path) -> None:
    """A mount point that was looked at, and what is then mounted there, still empty."""
    folder.mkdir(parents=True)
    made = open_store(str(folder), retry_s=0)
    assert [*made.list("")] == []
    with pytest.raises(NotFound):
        made.get("a", limit_bytes=9)
    put_empty_one(folder)
    made.put("a", b"data")
    assert made.get("a", limit_bytes=9) == b"data"
    # It does hold something from the first write on.
    other = open_store(str(folder.with_name("other")), retry_s=0)
    other.put_if_absent("a", b"data")
    folder.with_name("other").rename(folder.with_name("gone"))
    with pytest.raises(Unavailable, match="opened anew"):
        other.put("b", b"data")


def test_it_goes_away_within_a_listing(store: Store, folder: Path) -> None:
    store.put("c/d", b"data")
    walk = store.list("")
    assert next(walk).key == "a/b"
    move_away(folder)
    with pytest.raises(Unavailable):
        next(walk)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT])
def test_a_file_system_that_does_not_answer(
    store: Store, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NFS and FUSE say of a server that went away."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, fail)
    for call in (lambda: store.get("a/b", limit_bytes=9), lambda: [*store.list("")]):
        with pytest.raises(Unavailable) as raised:
            call()
        assert "mounted" in raised.value.hint


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_mount_point_that_is_closed(
    store: Store, folder: Path, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a guard against writing into it: mode 000, or immutable."""

    def close() -> None:
        for name in ("open", "scandir", "mkdir", "unlink"):
            real = getattr(os, name)

            def refuse(path: Any, *arguments: Any, real: Any = real, **options: Any) -> Any:
                if str(path).startswith(str(folder)):
                    raise PermissionError(code, os.strerror(code))
                return real(path, *arguments, **options)

            monkeypatch.setattr(os, name, refuse)

    put_empty_one(folder)
    close()
    for name, call in calls(tmp_path).items():
        with pytest.raises(Unavailable) as raised:
            call(store)
        assert "mounted" in raised.value.hint, name
    # The folder itself, closed, is another fault: no waiting mends it.
    monkeypatch.undo()
    folder.rmdir()
    folder.with_name("away").rename(folder)
    assert store.get("a/b", limit_bytes=9) == b"data"
    close()
    for name in ("get", "get_range", "list", "delete"):
        with pytest.raises(AccessDenied):
            calls(tmp_path)[name](store)
