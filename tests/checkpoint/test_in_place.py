"""In place: what is refused, what is kept, and who may do it. See test_crash.py for the rest."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.checkpoint import (
    Checkpoint,
    apply_checkpoint,
    apply_in_place,
    diff_checkpoint,
    recover,
    verify_base,
)
from thinwire.checkpoint.lock import locked
from thinwire.codec.delta import Delta
from thinwire.errors import (
    AccessDenied,
    BaseMismatch,
    BaseUnusable,
    InvalidArgument,
    NotFound,
    Unavailable,
)

from .making import (
    MIXED,
    PAIRS,
    mixed_pair,
    names_in,
    pack,
    patched_pair,
    read_folder,
    run_child,
    single_pair,
    visible,
    write_folder,
)


def test_recover_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    base, _ = patched_pair(tmp_path / "pair")
    before = read_folder(base)
    assert recover(base) == "clean"
    assert read_folder(base) == before
    with pytest.raises(NotFound):
        recover(tmp_path / "none")


def test_twice_is_once(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    apply_in_place(base, delta)
    apply_in_place(base, delta)
    assert read_folder(base) == read_folder(new)
    (base / "x.txt").write_text("changed since")
    with pytest.raises(BaseMismatch):
        apply_in_place(base, delta)


def interrupt(base: Path, delta: Path) -> Path:
    """Leave ``base`` with a sealed log and no byte of it changed; returns the log's folder."""

    def update() -> None:
        os.pread = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        apply_in_place(base, delta)

    assert run_child(update) == signal.SIGKILL
    return base / ".thinwire-redo"


def test_any_delta_finishes_an_interrupted_one(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    diff_checkpoint(new, base, delta.with_name("back.tw"))
    before = read_folder(base)
    interrupt(base, delta)
    apply_in_place(base, delta.with_name("back.tw"))
    assert read_folder(base) == before


def test_a_damaged_log_is_refused(pair: tuple[Path, Path, Path]) -> None:
    base, _, delta = pair
    redo = interrupt(base, delta)
    whole, before = (redo / "log").read_bytes(), visible(base)
    damaged = [whole[:size] for size in (0, 8, 30, len(whole) - 1)] + [whole + b"x"]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, 300, 9)]
    for log in damaged:
        (redo / "log").write_bytes(log)
        for act in (lambda: recover(base), lambda: apply_in_place(base, delta)):
            with pytest.raises(BaseUnusable, match="cannot be finished"):
                act()
        assert visible(base) == before
    (redo / "log").write_bytes(whole)
    assert recover(base) == "finished"


def test_a_file_changed_since_the_log(pair: tuple[Path, Path, Path]) -> None:
    base, _, delta = pair
    redo = interrupt(base, delta)
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(BaseUnusable, match="cannot be finished"):
        recover(base)
    (base / "model.safetensors").unlink()
    with pytest.raises(BaseUnusable, match="not finished"):
        recover(base)
    assert (redo / "log").exists()
    (base / "model.safetensors").write_bytes(weights)
    (redo / "new-0").write_bytes(b"")
    with pytest.raises(BaseUnusable, match="new-0"):
        recover(base)
    (redo / "new-0").unlink()
    (base / "config.json").write_text("not the new one")
    with pytest.raises(BaseUnusable, match=r"config\.json"):
        recover(base)


def test_a_failing_device_leaves_the_log(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new, delta = pair

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(BaseUnusable, match="Input/output error"):
            apply_in_place(base, delta)
    with pytest.raises(BaseUnusable):
        Checkpoint.open(base)
    assert recover(base) == "finished"
    assert read_folder(base) == read_folder(new)


@pytest.mark.parametrize("make_pair", PAIRS)
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "posix_fallocate"])
def test_disk_full_while_staging(
    call: str,
    make_pair: Callable[[Path], tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, new = make_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    before = names_in(base.parent), visible(base)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        if call == "posix_fallocate" and make_pair in (patched_pair, single_pair):
            return
        with pytest.raises(Unavailable, match="No space left"):
            apply_in_place(base, tmp_path / "d.tw")
    assert (names_in(base.parent), visible(base)) == before
    assert recover(base) == "clean"


def test_only_one_at_a_time(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    with (base / ".thinwire-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for act in (lambda: apply_in_place(base, delta), lambda: recover(base)):
            with pytest.raises(BaseUnusable, match="another process"):
                act()
    apply_in_place(base, delta)
    assert read_folder(base) == read_folder(new)


def test_a_lock_file_that_was_just_removed(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, _ = pair
    path, locks = base / ".thinwire-lock", []

    def flock(descriptor: int, operation: int) -> None:
        if not locks:
            path.unlink()
        locks.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(path):
        assert path.stat().st_ino == locks[-1]
        assert len(locks) == 2


def test_many_at_once(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    unexpected: list[BaseException] = []

    def update() -> None:
        for _ in range(10):
            try:
                apply_in_place(base, delta)
            except BaseUnusable:
                continue
            except BaseException as error:
                unexpected.append(error)

    threads = [threading.Thread(target=update) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected
    assert read_folder(base) == read_folder(new)


def test_only_files_with_another_header_are_rebuilt(tmp_path: Path) -> None:
    base, new = mixed_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    inodes = {path.name: path.stat().st_ino for path in base.iterdir()}
    reported: list[int] = []
    apply_in_place(base, tmp_path / "d.tw", on_bytes=reported.append)
    assert read_folder(base) == read_folder(new)
    replaced = {path.name for path in base.iterdir() if path.stat().st_ino != inodes[path.name]}
    assert replaced == {"m-1.safetensors", "config.json"}
    assert sum(reported) == sum(2 * (50 + seed) for seed in range(3))


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_files_that_are_not_rebuilt_are_verified_too(shard: int, tmp_path: Path) -> None:
    base, new = mixed_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    path = base / f"m-{shard}.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = read_folder(base)
    with pytest.raises(BaseMismatch, match=f"tensor '{'abc'[shard - 1]}'"):
        apply_in_place(base, tmp_path / "d.tw")
    assert read_folder(base) == before


def test_an_opened_delta_stays_open(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    with Delta.open(delta) as opened:
        verify_base(base, opened)
        apply_checkpoint(base, opened, base.with_name("out"))
        apply_in_place(base, opened)
        apply_in_place(base, opened)
    assert read_folder(base) == read_folder(new) == read_folder(base.with_name("out"))


def test_links_are_refused(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, delta = pair
    weights = base / "model.safetensors"
    os.link(weights, tmp_path / "other-name")
    with pytest.raises(BaseUnusable, match="2 names"):
        apply_in_place(base, delta)
    weights.unlink()
    weights.symlink_to(tmp_path / "other-name")
    with pytest.raises(BaseUnusable, match="is a link"):
        apply_in_place(base, delta)
    (tmp_path / "single").symlink_to(tmp_path / "other-name")
    with pytest.raises(BaseUnusable, match="is a link"):
        apply_in_place(tmp_path / "single", delta)
    assert (tmp_path / "other-name").read_bytes() == pack(MIXED)


def test_a_linked_folder_is_fine(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, new, delta = pair
    (tmp_path / "current").symlink_to(base)
    apply_in_place(tmp_path / "current", delta)
    assert read_folder(base) == read_folder(new)


def test_modes_are_kept(pair: tuple[Path, Path, Path]) -> None:
    base, _, delta = pair
    (base / "config.json").chmod(0o640)
    apply_in_place(base, delta)
    assert (base / "config.json").read_text() == "[]"
    assert (base / "config.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["M.safetensors", "README.md"])
def test_names_that_differ_only_in_case(name: str, tmp_path: Path) -> None:
    base = write_folder(tmp_path / "a", {"w.safetensors": pack({}), name: pack(MIXED)})
    new = write_folder(tmp_path / "b", {"w.safetensors": pack({}), name.swapcase(): pack(MIXED)})
    if name == "M.safetensors":
        (new / "m.SAFETENSORS").rename(new / "m.safetensors")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    apply_checkpoint(base, tmp_path / "d.tw", tmp_path / "out")
    assert read_folder(tmp_path / "out") == read_folder(new)
    with pytest.raises(InvalidArgument, match="only in case"):
        apply_in_place(base, tmp_path / "d.tw")


@pytest.mark.parametrize("closed", ["folder", "file"])
def test_read_only(closed: str, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, delta = pair
    target = base if closed == "folder" else base / "model.safetensors"
    for path in (base, *base.iterdir()):
        path.chmod(0o777)
    target.chmod(0o555)
    before = read_folder(base)
    folders = [path for path in (base, *base.parents) if str(path).startswith("/tmp/")]
    modes = [(path, path.stat().st_mode) for path in folders[1:]]
    for path, _ in modes:
        path.chmod(0o755)

    def update() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(AccessDenied, match="Permission denied"):
            apply_in_place(base, delta)

    try:
        assert run_child(update) == 0
        assert read_folder(base) == before
    finally:
        target.chmod(0o777)
        for path, mode in modes:
            path.chmod(mode)
