"""Full disks, systems that cannot preallocate, and how much memory is taken."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from thinwire.checkpoint import apply_checkpoint, apply_in_place, diff_checkpoint
from thinwire.errors import Unavailable

from .making import names_in, pack, read_folder, run_child


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["posix_fallocate", "write", "fsync"])
def test_disk_full_by_call(
    call: str, pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new, delta = pair
    siblings = names_in(base.parent)
    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(Unavailable, match="No space left"):
        apply_checkpoint(base, delta, base.with_name("out"))
    if call == "fsync":
        with pytest.raises(Unavailable, match="No space left"):
            diff_checkpoint(base, new, base.with_name("e.tw"))
    assert names_in(base.parent) == siblings


def test_disk_full_for_real(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    before, siblings = read_folder(base), names_in(base.parent)
    smallest = min(delta.stat().st_size, (base / "model.safetensors").stat().st_size)

    def fail_everywhere() -> None:
        # Python ignores SIGXFSZ, so the calls fail as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (smallest // 2, smallest // 2))
        for act in (
            lambda: diff_checkpoint(base, new, base.with_name("e.tw")),
            lambda: apply_checkpoint(base, delta, base.with_name("out")),
            lambda: apply_in_place(base, delta),
        ):
            with pytest.raises(Unavailable, match="File too large"):
                act()

    assert run_child(fail_everywhere) == 0
    assert read_folder(base) == before
    assert names_in(base.parent) == siblings


@pytest.fixture
def no_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's folder for temporary files is of no use."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")


@pytest.mark.usefixtures("no_tmp")
def test_the_spool_lies_beside_the_result(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    diff_checkpoint(base, new, base.with_name("e.tw"))
    assert base.with_name("e.tw").read_bytes() == delta.read_bytes()
    assert names_in(base.parent) == ["a", "b", "d.tw", "e.tw"]


@pytest.mark.usefixtures("no_tmp")
def test_no_space_for_the_spool(pair: tuple[Path, Path, Path]) -> None:
    base, new, _ = pair
    out = base.with_name("e.tw")

    def fail() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
        with pytest.raises(Unavailable, match=r"e\.tw.*File too large"):
            diff_checkpoint(base, new, out)

    assert run_child(fail) == 0
    assert names_in(base.parent) == ["a", "b", "d.tw"]


@pytest.fixture
def unsynced_names(pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that holds the results cannot be made durable."""
    root, real = pair[0].parent.stat(), os.fsync

    def fail(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), root):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.usefixtures("unsynced_names")
def test_a_name_that_cannot_be_made_durable(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    siblings = names_in(base.parent)
    with pytest.raises(Unavailable, match="Input/output"):
        apply_checkpoint(base, delta, base.with_name("out"))
    with pytest.raises(Unavailable, match="Input/output"):
        diff_checkpoint(base, new, base.with_name("e.tw"))
    assert names_in(base.parent) == siblings
    with pytest.raises(Unavailable, match="Input/output"):
        diff_checkpoint(new, base, delta, overwrite=True)
    apply_in_place(new, delta)
    assert read_folder(new) == read_folder(base)


def test_without_preallocation(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new, delta = pair

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    apply_checkpoint(base, delta, base.with_name("out"))
    monkeypatch.delattr(os, "posix_fallocate")
    apply_checkpoint(base, delta, base.with_name("out2"))
    for name in ("out", "out2"):
        assert read_folder(base.with_name(name)) == read_folder(new)


@pytest.fixture
def anonymous_growth() -> Iterator[Callable[[], int]]:
    """Calls give the most anonymous memory, in bytes, taken since the test began."""

    def read() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    start, most, ended = read(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.003):
            most = max(most, read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield lambda: most - start
    ended.set()
    watcher.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_stays_bounded(tmp_path: Path, anonymous_growth: Callable[[], int]) -> None:
    rows = 1 << 14
    base, new = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    header = pack({"w": ("BF16", [rows, 8192], b"")}).replace(b"[0, 0]", b"[0, %d]" % (rows << 14))
    header = (len(header) - 8).to_bytes(8, "little") + header[8:]
    rng = np.random.default_rng(0)
    with base.open("wb") as old_file, new.open("wb") as new_file:
        old_file.write(header)
        new_file.write(header)
        for _ in range(rows // 1024):
            words = rng.integers(0x3C00, 0x3D00, 1024 * 8192, np.uint16)
            old_file.write(words)
            words[:: rng.integers(90, 110)] += 1
            new_file.write(words)
        del words
    diff_checkpoint(base, new, tmp_path / "d.tw", workers=2)
    apply_checkpoint(base, tmp_path / "d.tw", tmp_path / "out", workers=2)
    apply_in_place(base, tmp_path / "d.tw")
    assert anonymous_growth() < 128 << 20
    for path in (tmp_path / "out", base):
        read, expected = (np.memmap(p, np.uint8, "r") for p in (path, new))
        step = 1 << 24
        for start in range(0, expected.size, step):
            assert np.array_equal(read[start : start + step], expected[start : start + step])
