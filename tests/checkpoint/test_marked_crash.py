"""A marked folder, killed at every call that touches the disk: bytes and mark always agree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint, MarkedFolder, diff_checkpoint
from thinwire.checkpoint.disk import write_file
from thinwire.checkpoint.file_names import MARK_NAME
from thinwire.codec.delta import Delta
from thinwire.errors import BaseUnusable

from .making import (
    FOLDER_PAIRS,
    MIXED,
    MIXED_NEW,
    Content,
    killed_at_each_call,
    names_in,
    pack,
    patched_pair,
    rebuilt_pair,
    visible,
    write_folder,
)

State = tuple[Content, bytes | None]
Act = Callable[[MarkedFolder], None]


def marked(source: Path, target: Path, mark: bytes | None) -> Path:
    """A copy of a folder with a mark; the files are not linked."""
    shutil.copytree(source, target)
    if mark is not None:
        (target / MARK_NAME).write_bytes(mark)
    return target


def state(path: Path) -> State:
    """Bytes and mark as they lie there."""
    mark = path / MARK_NAME
    return visible(path), mark.read_bytes() if mark.exists() else None


def is_unfinished(path: Path) -> bool:
    return os.path.lexists(path / ".thinwire-redo")


def kill_everywhere(start: Path, act: Act, old: State, new: State, tmp_path: Path) -> set[str]:
    """Kill ``act`` at each of its calls; returns the states in which it left the folder."""
    seen = set()
    for number, victim in enumerate(killed(start, act, tmp_path / "killed")):
        if is_unfinished(victim):
            seen.add("unfinished")
            if visible(victim):
                with pytest.raises(BaseUnusable):
                    Checkpoint.open(victim)
        else:
            assert state(victim) in (old, new)
            seen.add("old" if state(victim) == old else "new")
        was_unfinished = is_unfinished(victim)
        # Half of them recover by being read, half by the next update.
        if number % 2:
            before = state(victim)
            mark = MarkedFolder(victim).read_mark()
            assert state(victim) == (new if was_unfinished else before)
            assert mark == state(victim)[1]
        act(MarkedFolder(victim))
        assert state(victim) == new
        hidden = {name for name in names_in(victim) if name[0] == "."}
        assert hidden <= {MARK_NAME}
    assert not was_unfinished
    return seen


def killed(victim: Path, act: Act, copies: Path) -> Iterator[Path]:
    return killed_at_each_call(victim, lambda: act(MarkedFolder(victim)), copies)


def applying(delta: Path, mark: bytes, only: set[str] | None = None) -> Act:
    def act(folder: MarkedFolder) -> None:
        with Delta.open(delta, only=only) as opened:
            folder.apply(opened, mark, partial=only is not None)

    return act


def installing(content: Content, mark: bytes) -> Act:
    def act(folder: MarkedFolder) -> None:
        with folder.installing(mark) as installation:
            for name, data in content.items():
                write_file(installation.path_for(name), data)

    return act


@pytest.mark.parametrize("make_pair", FOLDER_PAIRS)
@pytest.mark.parametrize("old_mark", [b"one", None])
def test_apply(
    old_mark: bytes | None, make_pair: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    base, new = make_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    seen = kill_everywhere(
        marked(base, tmp_path / "victim", old_mark),
        applying(tmp_path / "d.tw", b"two, longer"),
        (visible(base), old_mark),
        (visible(new), b"two, longer"),
        tmp_path,
    )
    assert seen == {"old", "unfinished", "new"}


def test_only_the_mark_switches(tmp_path: Path) -> None:
    base, _ = patched_pair(tmp_path / "pair")
    diff_checkpoint(base, base, tmp_path / "same.tw")
    seen = kill_everywhere(
        marked(base, tmp_path / "victim", b"one"),
        applying(tmp_path / "same.tw", b"two"),
        (visible(base), b"one"),
        (visible(base), b"two"),
        tmp_path,
    )
    assert seen == {"old", "unfinished", "new"}


def test_the_folder_already_is_the_result(tmp_path: Path) -> None:
    base, new = patched_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    seen = kill_everywhere(
        marked(new, tmp_path / "victim", b"one"),
        applying(tmp_path / "d.tw", b"two"),
        (visible(new), b"one"),
        (visible(new), b"two"),
        tmp_path,
    )
    assert seen == {"old", "unfinished", "new"}


def test_a_partial_folder(tmp_path: Path) -> None:
    some = {"w": MIXED["w"], "empty": MIXED["empty"]}
    sides = [
        write_folder(tmp_path / side, {"m.safetensors": pack(tensors), "config.json": side})
        for side, tensors in (("a", MIXED), ("b", MIXED_NEW))
    ]
    diff_checkpoint(*sides, tmp_path / "d.tw")
    part = write_folder(tmp_path / "part", {"p.safetensors": pack(some), "config.json": "a"})
    new = {name: MIXED_NEW[name] for name in some}
    seen = kill_everywhere(
        marked(part, tmp_path / "victim", b"one"),
        applying(tmp_path / "d.tw", b"two", set(some)),
        (visible(part), b"one"),
        ({"p.safetensors": pack(new), "config.json": b"b"}, b"two"),
        tmp_path,
    )
    assert seen == {"old", "unfinished", "new"}


@pytest.mark.parametrize("old_mark", [b"one", None])
def test_install_over_another(old_mark: bytes | None, tmp_path: Path) -> None:
    base, new = rebuilt_pair(tmp_path / "pair")
    seen = kill_everywhere(
        marked(base, tmp_path / "victim", old_mark),
        installing(visible(new), b"two"),
        (visible(base), old_mark),
        (visible(new), b"two"),
        tmp_path,
    )
    assert seen == {"old", "unfinished", "new"}


def test_install_into_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    _, new = rebuilt_pair(tmp_path / "pair")
    seen = kill_everywhere(
        tmp_path / "victim",
        installing(visible(new), b"two"),
        ({}, None),
        (visible(new), b"two"),
        tmp_path,
    )
    assert seen == {"old", "unfinished", "new"}


def test_create_and_install(tmp_path: Path) -> None:
    content = {"m.safetensors": pack(MIXED)}
    install = installing(content, b"one")
    (tmp_path / "room").mkdir()
    rooms = killed_at_each_call(
        tmp_path / "room",
        lambda: install(MarkedFolder(tmp_path / "room" / "deep" / "victim")),
        tmp_path / "killed",
    )
    for room in rooms:
        victim = room / "deep" / "victim"
        folder = MarkedFolder(victim)
        mark = folder.read_mark()
        assert state(victim) in (({}, None), (content, b"one"))
        assert mark == state(victim)[1]
        install(folder)
        assert state(victim) == (content, b"one")
    assert mark == b"one"


def test_unmark(tmp_path: Path) -> None:
    base, _ = patched_pair(tmp_path / "pair")
    seen = kill_everywhere(
        marked(base, tmp_path / "victim", b"one"),
        MarkedFolder.unmark,
        (visible(base), b"one"),
        (visible(base), None),
        tmp_path,
    )
    assert seen == {"old", "new"}


def interrupted(victim: Path, act: Act, copies: Path) -> Path:
    """A folder that was left with a sealed log and with some of it done."""
    found = [folder for folder in killed(victim, act, copies) if is_unfinished(folder)]
    return found[len(found) // 2]


@pytest.mark.parametrize("how", ["apply", "install"])
@pytest.mark.parametrize("make_pair", FOLDER_PAIRS)
def test_recovery_killed_at_every_point(
    make_pair: Callable[[Path], tuple[Path, Path]], how: str, tmp_path: Path
) -> None:
    base, new = make_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    act = applying(tmp_path / "d.tw", b"two")
    if how == "install":
        act = installing(visible(new), b"two")
    source = interrupted(marked(base, tmp_path / "victim", b"one"), act, tmp_path / "interrupted")
    for victim in killed(source, MarkedFolder.recover, tmp_path / "killed"):
        assert MarkedFolder(victim).read_mark() == b"two"
        assert state(victim) == (visible(new), b"two")


def test_unmark_of_an_interrupted_update(tmp_path: Path) -> None:
    base, new = patched_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    source = interrupted(
        marked(base, tmp_path / "victim", b"one"),
        applying(tmp_path / "d.tw", b"two"),
        tmp_path / "interrupted",
    )
    for victim in killed(source, MarkedFolder.unmark, tmp_path / "killed"):
        mark = MarkedFolder(victim).read_mark()
        assert mark in (b"two", None)
        assert state(victim) == (visible(new), mark)
    assert mark is None


@pytest.mark.parametrize("log", ["none", "whole", "broken"])
def test_clear(log: str, tmp_path: Path) -> None:
    base, new = rebuilt_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    source = marked(base, tmp_path / "source", b"one")
    if log != "none":
        source = interrupted(
            marked(base, tmp_path / "victim", b"one"),
            applying(tmp_path / "d.tw", b"two"),
            tmp_path / "interrupted",
        )
    if log == "broken":
        (source / ".thinwire-redo" / "log").write_bytes(b"broken")
    for victim in killed(source, MarkedFolder.clear, tmp_path / "killed"):
        # A mark that is still there, or comes with the log, never stands for something else.
        try:
            mark = MarkedFolder(victim).read_mark()
        except BaseUnusable:
            assert is_unfinished(victim)
            mark = None
        assert mark is None or state(victim) in ((visible(base), b"one"), (visible(new), b"two"))
        MarkedFolder(victim).clear()
        assert MarkedFolder(victim).read_mark() is None
        assert not [name for name in names_in(victim) if name.endswith(".safetensors")]
        installing(visible(new), b"three")(MarkedFolder(victim))
        assert state(victim) == (visible(new), b"three")


def test_what_is_durable_before_what(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log first, bytes second, mark last; the log goes when all of it is durable."""
    base, _, delta = pair
    trace: list[str] = []

    def tell(call: str) -> None:
        real = getattr(os, call)

        def wrapper(target: int | Path, *args: object, **kwargs: object) -> object:
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
            own = (".thinwire-staging", ".thinwire-redo", ".thinwire-lock")
            # Nor what is removed with the staging folder: that goes by names relative to it.
            if call != "unlink" or (Path(path).parent == base and Path(path).name not in own):
                trace.append(f"{call} {os.path.relpath(path, base)}")
            return real(target, *args, **kwargs)

        monkeypatch.setattr(os, call, wrapper)

    for call in ("fsync", "rename", "replace", "pwrite", "unlink"):
        tell(call)
    redo = [
        "fsync .thinwire-staging/log",
        "fsync .thinwire-staging",
        "rename .thinwire-staging",
        "fsync .",
    ]
    applying(delta, b"two")(MarkedFolder(base))
    assert trace[: trace.index("rename .thinwire-redo") + 2] == [
        "fsync .thinwire-staging/new-0",
        "fsync .thinwire-staging/new-1",
        *redo,
        *["pwrite model.safetensors"] * trace.count("pwrite model.safetensors"),
        "fsync model.safetensors",
        "replace .thinwire-redo/new-0",
        "replace .thinwire-redo/new-1",
        "fsync .",
        "rename .thinwire-redo",
        "fsync .",
    ]
    trace.clear()
    with MarkedFolder(base).installing(b"three") as installation:
        # Not synced by whoever writes them.
        installation.path_for("model.safetensors").write_bytes(pack(MIXED))
        installation.path_for("a.txt").touch()
    assert list(dict.fromkeys(trace[: trace.index("rename .thinwire-redo")])) == [
        "fsync .thinwire-staging/new-0",
        "fsync .thinwire-staging/new-1",
        "fsync .thinwire-staging/new-2",
        *redo,
        "replace .thinwire-redo/new-0",
        "replace .thinwire-redo/new-1",
        "unlink config.json",
        "unlink x.txt",
        "replace .thinwire-redo/new-2",
    ]
    trace.clear()
    MarkedFolder(base).unmark()
    assert trace == ["unlink .thinwire-mark", "fsync ."]
