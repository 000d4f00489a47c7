"""Folder to folder: paired by name, nothing left out in silence, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint
from thinwire.errors import AlreadyExists, InvalidArgument
from thinwire.interop import fireworks as fw
from thinwire.interop.fireworks import OneSided, dirs

from .making import MIXED, MIXED_NEW, applied, bits_of, tensor, write_checkpoint

FILES = {"config.json": '{"step": 1}', "tokenizer.json": "{}"}


class Dirs:
    """An old and a new checkpoint of two weights files each."""

    def __init__(self, root: Path) -> None:
        self.old = write_checkpoint(root / "old", MIXED, shards=2, files=FILES)
        new_files = FILES | {"config.json": '{"step": 2}'}
        self.new = write_checkpoint(root / "new", MIXED_NEW, shards=2, files=new_files)
        self.out = root / "deep" / "out"

    def compress(
        self, name: str = "arc_v3", executor: Executor | None = None, allow: bool = False
    ) -> OneSided:
        sides = str(self.old.path), str(self.new.path), str(self.out)
        return fw.delta_compress_dirs(*sides, name, executor, allow_one_sided=allow)

    def left_over(self) -> list[str]:
        folder = self.out.parent
        return [path.name for path in folder.iterdir()] if folder.exists() else []


@pytest.fixture
def two(tmp_path: Path) -> Dirs:
    return Dirs(tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", fw.FORMATS)
def test_the_folder_makes_the_new_checkpoint(two: Dirs, name: str) -> None:
    assert two.compress(name) == OneSided([], [])
    made = content(two.out)
    assert made.keys() == content(two.new.path).keys()
    # Config, tokenizer and index are the new checkpoint's, where the package takes the old one's.
    for file_name in two.new.files:
        assert made[file_name] == (two.new.path / file_name).read_bytes()
    with fw.open_fireworks(two.out, name) as delta:
        assert applied(two.old, delta) == bits_of(MIXED_NEW)
    assert two.left_over() == ["out"]


def test_the_package_reads_each_file(two: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    from .arc_pairs import Package

    Package(monkeypatch)
    real = __import__("fireworks_delta_compression")
    load = __import__("safetensors.torch").torch.load_file
    two.compress("arc_v3")
    for name in two.old.weights:
        base = load(two.old.path / name)
        got = real.delta_decompress_dict_from_file(
            src=base, diff_file=str(two.out / name), compression_format="arc_v3"
        )
        wanted = load(two.new.path / name)
        assert got.keys() == wanted.keys()
        for key in got:
            uint8 = __import__("torch").uint8
            sides = [t[key].contiguous().flatten().view(uint8) for t in (got, wanted)]
            assert sides[0].equal(sides[1])


@pytest.mark.parametrize(
    "make_pool",
    [
        lambda: ThreadPoolExecutor(2),
        lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn")),
        lambda: ProcessPoolExecutor(2, mp_context=get_context("fork")),
    ],
)
def test_executors_change_nothing(two: Dirs, make_pool: Callable[[], Executor]) -> None:
    two.compress("arc_v3")
    alone = content(two.out)
    two.out = two.out.with_name("pooled")
    with make_pool() as pool:
        two.compress("arc_v3", pool)
    assert content(two.out) == alone


def test_files_on_one_side_only(two: Dirs) -> None:
    (two.old.path / "merges.txt").write_text("old")
    (two.new.path / "chat_template.jinja").write_text("new")
    extra = write_checkpoint(two.new.path.parent / "more", {"x": tensor("BF16", [3])})
    weights = extra.path / "model.safetensors"
    weights.rename(two.new.path / "extra.safetensors")
    with pytest.raises(fw.DeltaKeyMismatchError, match=r"merges\.txt.*chat_template.*extra") as e:
        two.compress()
    assert e.value.context["src"] == ["merges.txt"]
    assert not two.left_over()
    found = two.compress(allow=True)
    assert found == OneSided(["merges.txt"], ["chat_template.jinja", "extra.safetensors"])
    made = content(two.out)
    assert made["chat_template.jinja"] == b"new"
    assert not {"merges.txt", "extra.safetensors"} & made.keys()


def test_a_tensor_on_one_side_only_leaves_no_folder(two: Dirs) -> None:
    name = next(iter(two.new.weights))
    write_checkpoint(two.new.path.parent / "more", {"x": tensor("BF16", [3])})
    (two.new.path.parent / "more" / "model.safetensors").rename(two.new.path / name)
    for pool in (None, ThreadPoolExecutor(2)):
        with pytest.raises(fw.DeltaKeyMismatchError, match="tensor"):
            two.compress(executor=pool)
        assert not two.left_over()


def test_a_folder_in_use_is_left_alone(two: Dirs) -> None:
    two.out.mkdir(parents=True)
    two.compress()  # an empty one is no obstacle
    before = content(two.out)
    with pytest.raises(AlreadyExists):
        two.compress()
    assert content(two.out) == before
    two.out = two.out / "config.json"
    with pytest.raises(AlreadyExists):
        two.compress()


def test_subfolders_and_unknown_formats(two: Dirs) -> None:
    with pytest.raises(fw.BackendNotFoundError):
        two.compress("arc_v0")
    (two.new.path / "original").mkdir()
    with pytest.raises(InvalidArgument, match="subfolder"):
        two.compress()


def test_an_error_on_the_way_leaves_nothing(two: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = dirs.write_file

    def full_disk(path: Path, data: memoryview) -> None:
        if path.name == "tokenizer.json":
            raise OSError(28, "No space left on device")
        real_write(path, data)

    monkeypatch.setattr(dirs, "write_file", full_disk)
    with pytest.raises(OSError, match="space"):
        two.compress()
    assert not two.left_over()


def test_the_index_is_the_new_ones(two: Dirs) -> None:
    two.compress("arc_v2")
    index = json.loads((two.out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == MIXED.keys()
    assert Checkpoint.open(two.out).tensors.keys() == MIXED.keys()
