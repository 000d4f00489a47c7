"""In place: the old file or the new one, whatever happens, and never anything between."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoint.making import die_at, run_child

from thinwire.checkpoint import Checkpoint
from thinwire.errors import BaseUnusable, InvalidArgument
from thinwire.interop import fireworks as fw
from thinwire.interop.fireworks.dropin import compress_files

from .by_hand import safetensors
from .making import MIXED, MIXED_NEW, Tensors, tensor

NAMES = ("arc_v1", "arc_v2", "arc_v3", "thinwire")


def write(path: Path, tensors: Tensors) -> bytes:
    path.write_bytes(safetensors(tensors, {"format": "pt"}))
    return path.read_bytes()


class Setting:
    """An old file, a new one, and the delta between them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.base = folder / "model.safetensors"
        self.diff = folder / "diff.safetensors"
        self.name = name
        self.old = write(self.base, MIXED)
        new = folder / "new.safetensors"
        self.new = write(new, MIXED_NEW)
        compress_files(str(self.base), str(new), str(self.diff), name)
        new.unlink()

    def apply(self) -> None:
        fw.delta_decompress_inplace(
            base_path=str(self.base), diff_path=str(self.diff), compression_format=self.name
        )

    def left_over(self) -> set[str]:
        return {p.name for p in self.folder.iterdir()} - {self.base.name, self.diff.name}


@pytest.fixture(params=NAMES)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return Setting(tmp_path, request.param)


def test_the_whole_file_is_the_new_one(setting: Setting) -> None:
    setting.apply()
    assert setting.base.read_bytes() == setting.new
    inode = setting.base.stat().st_ino
    setting.apply()  # and again, where nothing is left to do
    assert setting.base.read_bytes() == setting.new
    assert setting.base.stat().st_ino == inode
    assert not setting.left_over()


@pytest.mark.parametrize("name", NAMES)
def test_again_with_weights_whose_mantissas_are_full(tmp_path: Path, name: str) -> None:
    """A step up on what is new already can lead out of the mantissa: no fault of the payload."""
    base = np.arange(0x3C00, 0x3C00 + 4000, dtype=np.uint16)
    new = base.copy()
    new[126::128] += 1
    paths = [tmp_path / f"{side}.safetensors" for side in ("old", "new", "diff")]
    write(paths[0], {"w": ("BF16", [40, 100], base.tobytes())})
    wanted = write(paths[1], {"w": ("BF16", [40, 100], new.tobytes())})
    compress_files(*map(str, paths), name)
    for _ in range(3):
        fw.delta_decompress_inplace(
            base_path=str(paths[0]), diff_path=str(paths[2]), compression_format=name
        )
        assert paths[0].read_bytes() == wanted
    other = write(paths[0], {"w": ("BF16", [40, 100], (new + 1).tobytes())})
    with pytest.raises(fw.DeltaChecksumError, match="w"):
        fw.delta_decompress_inplace(
            base_path=str(paths[0]), diff_path=str(paths[2]), compression_format=name
        )
    assert paths[0].read_bytes() == other


def test_a_damaged_delta_leaves_the_file(setting: Setting) -> None:
    data = bytearray(setting.diff.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    # The last tensors too: those before must not have been written by then.
    for place in [start, (start + len(data)) // 2, len(data) - 1]:
        data[place] ^= 0x55
        setting.diff.write_bytes(data)
        with pytest.raises(ValueError):
            setting.apply()
        assert setting.base.read_bytes() == setting.old
        data[place] ^= 0x55
    setting.diff.write_bytes(data[:-3])
    with pytest.raises(ValueError):
        setting.apply()
    assert setting.base.read_bytes() == setting.old
    assert not setting.left_over()


def test_another_base_is_left_alone(setting: Setting) -> None:
    other = dict(MIXED) | {"half": tensor("F16", [1], 99)}
    before = write(setting.base, other)
    with pytest.raises(fw.DeltaChecksumError, match="half"):
        setting.apply()
    assert setting.base.read_bytes() == before
    before = write(setting.base, {k: v for k, v in MIXED.items() if k != "q"})
    with pytest.raises(fw.DeltaKeyMismatchError, match="'q'"):
        setting.apply()
    assert setting.base.read_bytes() == before


def test_a_base_of_another_shape_is_left_alone(setting: Setting) -> None:
    before = write(setting.base, dict(MIXED) | {"w": tensor("BF16", [40, 31])})
    with pytest.raises(ValueError):
        setting.apply()
    assert setting.base.read_bytes() == before


def test_shared_files_are_left_alone(setting: Setting) -> None:
    twin = setting.folder / "twin.safetensors"
    os.link(setting.base, twin)
    with pytest.raises(BaseUnusable):
        setting.apply()
    assert twin.read_bytes() == setting.old


def test_no_file(tmp_path: Path) -> None:
    for path, error in ((tmp_path, InvalidArgument), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            fw.delta_decompress_inplace(
                base_path=str(path), diff_path=str(path), compression_format="arc_v3"
            )


@pytest.mark.claim("arc_v3", "read", "in place, killed at every call that touches the disk")
def test_killed_at_every_point(tmp_path: Path) -> None:
    seen = set()
    setting = Setting(tmp_path, "arc_v3")
    for call in itertools.count(1):
        setting.base.write_bytes(setting.old)

        def update(call: int = call) -> None:
            die_at(call)
            setting.apply()

        status = run_child(update)
        if status == 0:
            break
        assert status == signal.SIGKILL
        try:
            Checkpoint.open(setting.base)
        except BaseUnusable:
            seen.add("unfinished")
        else:
            content = setting.base.read_bytes()
            assert content in (setting.old, setting.new)
            seen.add("old" if content == setting.old else "new")
        setting.apply()
        assert setting.base.read_bytes() == setting.new
        assert not setting.left_over()
    assert seen == {"old", "unfinished", "new"}


def test_it_holds_no_model_in_memory(tmp_path: Path) -> None:
    """Tensors come one at a time: 20 of 2 MB take the memory of a few."""
    import tracemalloc

    tensors = {f"w{n}": tensor("BF16", [1000, 1000], n) for n in range(20)}
    write(tmp_path / "old.safetensors", tensors)
    changed = {}
    for name, (dtype, shape, data) in tensors.items():
        words = np.frombuffer(data, np.uint8).copy()
        words[::20_000] ^= 1
        changed[name] = dtype, shape, words.tobytes()
    new = write(tmp_path / "new.safetensors", changed)
    paths = [str(tmp_path / f"{side}.safetensors") for side in ("old", "new", "diff")]
    compress_files(*paths, "arc_v3")
    del tensors, changed
    tracemalloc.start()
    try:
        fw.delta_decompress_inplace(
            base_path=paths[0], diff_path=paths[2], compression_format="arc_v3"
        )
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
    assert Path(paths[0]).read_bytes() == new
