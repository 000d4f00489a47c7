"""Files that others replace or change while thinwire works with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint, apply_in_place, diff_checkpoint
from thinwire.codec.delta import Delta
from thinwire.errors import BaseUnusable, InvalidArgument

from .making import MIXED, MIXED_NEW, names_in, pack, read_folder, run_child, stepped, write_folder


def test_a_delta_replaced_while_it_is_applied(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new, latest = pair
    tensors = {name: stepped(old, 7) for name, old in MIXED_NEW.items()}
    last = write_folder(
        base.with_name("c"),
        {"model.safetensors": pack(tensors), "config.json": "[]", "x.txt": "x"},
    )
    following = latest.with_name("next.tw")
    diff_checkpoint(new, last, following)
    real = Delta.open

    def update() -> None:
        def open_then_replace(source: Path) -> Delta:
            opened = real(source)
            os.replace(following, latest)  # noqa: PTH105 - as another process does
            return opened

        monkeypatch.setattr(Delta, "open", open_then_replace)
        os.pread = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        apply_in_place(base, latest)

    assert run_child(update) == signal.SIGKILL
    apply_in_place(base, latest)
    assert read_folder(base) == read_folder(last)


def in_place(side: Path, delta: Path) -> None:
    apply_in_place(side, delta)


def interrupted(side: Path, _: Path) -> None:
    (side / ".thinwire-redo").mkdir()


def beginning(side: Path, _: Path) -> None:
    (side / ".thinwire-staging").mkdir()


def saved_again(side: Path, _: Path) -> None:
    data = (side / "model.safetensors").read_bytes()
    (side / "temporary").write_bytes(data)
    (side / "temporary").replace(side / "model.safetensors")


def one_word(side: Path, _: Path) -> None:
    with (side / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")


def weights_gone(side: Path, _: Path) -> None:
    (side / "model.safetensors").unlink()


def config_rewritten(side: Path, _: Path) -> None:
    (side / "config.json").write_text("{ }")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "change",
    [in_place, interrupted, beginning, saved_again, one_word, weights_gone, config_rewritten],
)
def test_a_side_that_changes_while_it_is_read(
    change: Callable[[Path, Path], None],
    which: int,
    pair: tuple[Path, Path, Path],
) -> None:
    sides = pair[:2]
    update = pair[2].with_name("update.tw")
    diff_checkpoint(sides[which], sides[1 - which], update)
    out = pair[2].with_name("out.tw")
    changed: list[str] = []

    def on_bytes(_: int) -> None:
        if not changed:
            change(sides[which], update)
            changed.append(change.__name__)

    siblings = names_in(out.parent)
    with pytest.raises(InvalidArgument, match="changed while it was read"):
        diff_checkpoint(sides[0], sides[1], out, on_bytes=on_bytes)
    assert changed
    assert names_in(out.parent) == siblings


def test_a_single_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    base, new = tmp_path / "a", tmp_path / "b"
    base.write_bytes(pack(MIXED))
    new.write_bytes(pack(MIXED_NEW))

    def on_bytes(_: int) -> None:
        os.utime(new, ns=(0, new.stat().st_mtime_ns + 1))

    with pytest.raises(InvalidArgument, match="changed while it was read"):
        diff_checkpoint(base, new, tmp_path / "d.tw", on_bytes=on_bytes)
    assert names_in(tmp_path) == ["a", "b"]


def test_a_folder_whose_file_is_half_updated(pair: tuple[Path, Path, Path]) -> None:
    base, _, _ = pair
    (base / ".model.safetensors.thinwire-redo").mkdir()
    with pytest.raises(BaseUnusable, match=r"model\.safetensors.*interrupted"):
        Checkpoint.open(base)
    (base / ".model.safetensors.thinwire-redo").rename(base / ".thinwire-redo")
    with pytest.raises(BaseUnusable, match="interrupted"):
        Checkpoint.open(base / "model.safetensors")
