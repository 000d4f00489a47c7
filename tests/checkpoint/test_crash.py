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
    names_in,
    patched_pair,
    rebuilt_pair,
    run_child,
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
    seen = set()
    for call in itertools.count(1):
        victim = copy(base, tmp_path / str(call) / "victim")

        def update(call: int = call, victim: Path = victim) -> None:
            die_at(call)
            apply_in_place(victim, delta)

        status = run_child(update)
        if status == 0:
            break
        assert status == signal.SIGKILL
        state = check_whole(victim, *contents)
        seen.add(state)
        if call % 2:
            outcome = recover(victim)
            assert outcome == "finished" if state == "unfinished" else outcome != "finished"
            assert visible(victim) == contents[state != "old"]
        apply_in_place(victim, delta)
        assert visible(victim) == contents[1]
        hidden = {name for name in names_in(victim.parent) if name != "victim"}
        hidden |= (
            {name for name in names_in(victim) if name[0] == "."} if victim.is_dir() else set()
        )
        assert not hidden
        shutil.rmtree(victim.parent)
    assert seen == {"old", "unfinished", "new"}


@pytest.mark.parametrize("make_pair", [patched_pair, rebuilt_pair])
def test_recovery_killed_at_every_point(
    make_pair: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    base, new = make_pair(tmp_path / "pair")
    delta = tmp_path / "d.tw"
    diff_checkpoint(base, new, delta)
    contents = visible(base), visible(new)

    def unfinished(target: Path) -> Path:
        for call in itertools.count(1):
            victim = copy(base, target)

            def update(call: int = call, victim: Path = victim) -> None:
                die_at(call)
                apply_in_place(victim, delta)

            assert run_child(update) == signal.SIGKILL
            if check_whole(victim, *contents) == "unfinished":
                return victim
            shutil.rmtree(victim)
        raise AssertionError

    source = unfinished(tmp_path / "unfinished")
    for call in itertools.count(1):
        victim = copy(source, tmp_path / "victim")

        def update(call: int = call, victim: Path = victim) -> None:
            die_at(call)
            recover(victim)

        status = run_child(update)
        if check_whole(victim, *contents) == "unfinished":
            assert recover(victim) == "finished"
        assert visible(victim) == contents[1]
        shutil.rmtree(victim)
        if status == 0:
            break


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
