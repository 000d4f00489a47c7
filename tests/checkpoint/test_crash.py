"""In place, killed at every call that touches the disk."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint, apply_in_place, diff_checkpoint, recover
from thinwire.errors import BaseUnusable

from .making import (
    PAIRS,
    Content,
    copy,
    die_at,
    killed_at_each_call,
    mixed_pair,
    names_in,
    patched_pair,
    rebuilt_pair,
    run_child,
    tree,
    visible,
)


def check_whole(victim: Path, old: Content, new: Content) -> str:
    """After a crash: which side the checkpoint is on, or "unfinished" where it refuses to open."""
    try:
        Checkpoint.open(victim)
    except BaseUnusable:
        return "unfinished"
    content = visible(victim)
    assert content in (old, new)
    return "old" if content == old else "new"


@pytest.mark.parametrize("make_pair", PAIRS)
def test_killed_at_every_point(
    make_pair: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    base, new = make_pair(tmp_path / "pair")
    delta = tmp_path / "d.tw"
    diff_checkpoint(base, new, delta)
    contents = visible(base), visible(new)
    victim = copy(base, tmp_path / "room" / "victim")
    seen = set()
    rooms = killed_at_each_call(
        victim.parent, lambda: apply_in_place(victim, delta), tmp_path / "rooms"
    )
    for number, room in enumerate(rooms):
        victim = room / "victim"
        state = check_whole(victim, *contents)
        seen.add(state)
        if number % 2:
            outcome = recover(victim)
            assert outcome == "finished" if state == "unfinished" else outcome != "finished"
            assert visible(victim) == contents[state != "old"]
        apply_in_place(victim, delta)
        assert visible(victim) == contents[1]
        hidden = {name for name in names_in(room) if name != "victim"}
        hidden |= (
            {name for name in names_in(victim) if name[0] == "."} if victim.is_dir() else set()
        )
        assert not hidden
    assert seen == {"old", "unfinished", "new"}


@pytest.mark.parametrize("make_pair", [patched_pair, rebuilt_pair])
def test_recovery_killed_at_every_point(
    make_pair: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    base, new = make_pair(tmp_path / "pair")
    delta = tmp_path / "d.tw"
    diff_checkpoint(base, new, delta)
    contents = visible(base), visible(new)
    victim = copy(base, tmp_path / "room" / "victim")
    rooms = killed_at_each_call(
        victim.parent, lambda: apply_in_place(victim, delta), tmp_path / "rooms"
    )
    unfinished = next(
        room for room in rooms if check_whole(room / "victim", *contents) == "unfinished"
    )
    rooms = killed_at_each_call(
        unfinished, lambda: recover(unfinished / "victim"), tmp_path / "recovered"
    )
    for room in rooms:
        if check_whole(room / "victim", *contents) == "unfinished":
            assert recover(room / "victim") == "finished"
        assert visible(room / "victim") == contents[1]


def test_a_killed_process_leaves_what_is_copied(tmp_path: Path) -> None:
    """The other tests run once and copy the folder at each call: as if killed there, it says."""
    base, new = mixed_pair(tmp_path / "pair")
    diff_checkpoint(base, new, tmp_path / "d.tw")
    victim = copy(base, tmp_path / "room" / "victim")
    rooms = killed_at_each_call(
        victim.parent, lambda: apply_in_place(victim, tmp_path / "d.tw"), tmp_path / "rooms"
    )
    copied = [tree(room) for room in rooms]
    killed = []
    for call in itertools.count(1):
        victim = copy(base, tmp_path / "victims" / "victim")

        def update(call: int = call, victim: Path = victim) -> None:
            die_at(call)
            apply_in_place(victim, tmp_path / "d.tw")

        status = run_child(update)
        killed.append(tree(victim.parent))
        shutil.rmtree(victim.parent)
        if status == 0:
            break
        assert status == signal.SIGKILL
    assert [state for state, _ in itertools.groupby(killed)] == [
        state for state, _ in itertools.groupby(copied)
    ]
    assert len(copied) > 20


def test_what_is_durable_before_what(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must find the log whole before it counts, and the words before the log goes."""
    base, _, delta = pair
    trace: list[str] = []

    def tell(call: str) -> None:
        real = getattr(os, call)

        def wrapper(target: int | Path, *args: object) -> object:
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
            trace.append(f"{call} {os.path.relpath(path, base)}")
            return real(target, *args)

        monkeypatch.setattr(os, call, wrapper)

    for call in ("fsync", "rename", "replace", "pwrite"):
        tell(call)
    apply_in_place(base, delta)
    assert list(dict.fromkeys(trace[:-1])) + trace[-1:] == [
        "fsync .thinwire-staging/new-0",
        "fsync .thinwire-staging/log",
        "fsync .thinwire-staging",
        "rename .thinwire-staging",
        "fsync .",
        "pwrite model.safetensors",
        "fsync model.safetensors",
        "replace .thinwire-redo/new-0",
        "rename .thinwire-redo",
        "fsync .",
    ]
    assert trace.count("fsync .") == 3
