"""A checkpoint that is written to while it is converted: nothing is made of two states."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint
from thinwire.errors import InvalidArgument
from thinwire.interop.chain_state import write_thinwire
from thinwire.interop.change import Change, CheckpointChange
from thinwire.interop.destination import Destination
from thinwire.interop.formats import FORMATS, format_named
from thinwire.store import open_store

WRITTEN = [row.name for row in FORMATS.values() if row.writes_deltas]


@pytest.fixture
def sides(tmp_path: Path, mirrored_versions: list[Path]) -> tuple[Path, Path]:
    """Two checkpoints that may be written to."""
    for name, path in zip(("old", "new"), mirrored_versions, strict=False):
        shutil.copytree(path, tmp_path / name)
    return tmp_path / "old", tmp_path / "new"


def save_again(folder: Path) -> None:
    """As a trainer does that writes into its files: no file is replaced."""
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        with path.open("r+b") as file:
            file.write(data)


def destination(tmp_path: Path, format: str) -> Destination:
    store = open_store(str(tmp_path / "chain"))
    return Destination(store, format_named(format), "s", work_dir=tmp_path / "work")


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("changed", [0, 1])
def test_no_delta_of_two_states(
    sides: tuple[Path, Path], tmp_path: Path, format: str, changed: int
) -> None:
    change = CheckpointChange(*map(Checkpoint.open, sides))
    save_again(sides[changed])
    with pytest.raises(InvalidArgument, match="changed while it was read"):
        destination(tmp_path, format).write_delta(change, version=1, base_version=0, source="x")
    assert not (tmp_path / "chain").exists()


def test_no_delta_of_thinwires_of_two_states(sides: tuple[Path, Path], tmp_path: Path) -> None:
    change: Change = CheckpointChange(*map(Checkpoint.open, sides))
    save_again(sides[0])
    with pytest.raises(InvalidArgument, match="changed while it was read"):
        write_thinwire(change, tmp_path / "step.tw", 1, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.parametrize("format", [name for name in FORMATS if FORMATS[name].writes_full])
def test_no_full_weights_of_two_states(
    sides: tuple[Path, Path], tmp_path: Path, format: str
) -> None:
    opened = Checkpoint.open(sides[0])
    save_again(sides[0])
    for _ in range(2):
        chain = destination(tmp_path, format)
        with pytest.raises(InvalidArgument, match="changed while it was read"):
            chain.write_full(opened, version=1, source="x")
        assert chain.newest is None
        assert not (tmp_path / "chain" / "latest").exists()
    # What is left of it is removed, and written again.
    written = destination(tmp_path, format).write_full(
        Checkpoint.open(sides[0]), version=1, source="x"
    )
    assert all((tmp_path / "chain" / key).exists() for key in written.keys)
