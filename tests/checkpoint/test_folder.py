from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.file_names import SINGLE_FILE, first_clash, name_fault
from thinwire.errors import Corrupt, InvalidArgument, NotFound

from .making import index, pack, tensor, write_folder

ONE = {"a": tensor("BF16", [4], 1)}
TWO = {"b": tensor("F32", [2], 2), "c": tensor("U8", [3], 3)}
SHARDS = {"model-00001-of-00002.safetensors": ONE, "model-00002-of-00002.safetensors": TWO}
SHARDED = {
    **{name: pack(tensors) for name, tensors in SHARDS.items()},
    "model.safetensors.index.json": index(SHARDS),
    "config.json": "{}",
}


def test_single_file(tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    path.write_bytes(pack(ONE))
    checkpoint = Checkpoint.open(path)
    assert not checkpoint.is_folder
    assert list(checkpoint.weights) == [SINGLE_FILE]
    assert list(checkpoint.tensors) == ["a"]


def test_sharded_folder(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_folder(tmp_path / "m", SHARDED))
    assert list(checkpoint.weights) == list(SHARDS)
    assert list(checkpoint.tensors) == ["a", "b", "c"]
    assert list(checkpoint.files) == ["config.json", "model.safetensors.index.json"]


def test_shards_without_an_index(tmp_path: Path) -> None:
    files = {name: pack(tensors) for name, tensors in SHARDS.items()}
    assert list(Checkpoint.open(write_folder(tmp_path / "m", files)).tensors) == ["a", "b", "c"]


def test_links_are_followed_and_hidden_folders_skipped(tmp_path: Path) -> None:
    blobs = write_folder(tmp_path / "blobs", {"x": pack(ONE), "y": "{}"})
    folder = write_folder(tmp_path / "snapshot", {".hidden": "", ".gitattributes": ""})
    (folder / ".git").mkdir()
    (folder / "model.safetensors").symlink_to(blobs / "x")
    (folder / "config.json").symlink_to(blobs / "y")
    (tmp_path / "current").symlink_to(folder)
    checkpoint = Checkpoint.open(tmp_path / "current")
    assert list(checkpoint.tensors) == ["a"]
    assert list(checkpoint.files) == [".gitattributes", ".hidden", "config.json"]


def test_refuses_what_it_cannot_carry(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"model.safetensors": pack(ONE)})
    (folder / "sub").mkdir()
    with pytest.raises(InvalidArgument, match=r"'sub' is a subfolder.*[Mm]ove"):
        Checkpoint.open(folder)
    (folder / "sub").rmdir()
    (folder / "lost").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="broken link"):
        Checkpoint.open(folder)
    (folder / "lost").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidArgument, match="not a regular file"):
        Checkpoint.open(folder)
    (folder / "pipe").unlink()
    (folder / "a:b").touch()
    with pytest.raises(InvalidArgument, match="colon"):
        Checkpoint.open(folder)
    (folder / "a:b").unlink()
    (folder / "Model.safetensors").write_bytes(pack(TWO))
    with pytest.raises(InvalidArgument, match="only in case"):
        Checkpoint.open(folder)


def test_nothing_there_and_no_weights(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(InvalidArgument, match=r"no \.safetensors"):
        Checkpoint.open(write_folder(tmp_path / "m", {"config.json": "{}"}))


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument):
        Checkpoint.open(tmp_path / "pipe")


def test_tensor_in_two_files(tmp_path: Path) -> None:
    files = {"x.safetensors": pack(ONE), "y.safetensors": pack(ONE)}
    with pytest.raises(Corrupt, match=r"'a' is in both x\.safetensors and y\.safetensors"):
        Checkpoint.open(write_folder(tmp_path / "m", files))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"weight_map":{"a":"gone.safetensors"}}', "gone"),
        ('{"weight_map":{"a":"../x.safetensors"}}', "not there"),
        ('{"weight_map":{"b":"model-00001-of-00002.safetensors"}}', "'b' is not in"),
        ('{"weight_map":{"a":"config.json"}}', "not there"),
        ('{"weight_map":{"a":"x","a":"y"}}', "twice"),
        ('{"weight_map":{"a":1}}', "no file name"),
        ('{"weight_map":[]}', "weight_map"),
        ("{}", "weight_map"),
        ("[]", "index"),
        ("{", "index"),
        ("\udcff", "index"),
    ],
)
def test_bad_index(text: str, word: str, tmp_path: Path) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    files = {**SHARDED, "model.safetensors.index.json": raw}
    with pytest.raises(Corrupt, match=word):
        Checkpoint.open(write_folder(tmp_path / "m", files))


@pytest.mark.parametrize(
    "name",
    [
        *[
            "",
            ".",
            "..",
            "...",
            "..x",
            ".thinwire",
            ".THINWIRE-redo",
            ".a.thinwire-lock",
            "a/b",
            "/etc/passwd",
            "../x",
            "a/../b",
        ],
        *["a\\b", "..\\x", "C:x", "a\0b", "a\nb", "\x7f", "a\ud800", "x" * 256, "é" * 128],
    ],
)
def test_hostile_names(name: str) -> None:
    assert name_fault(name)


@pytest.mark.parametrize(
    "name",
    ["config.json", ".gitattributes", ".a", "x" * 255, "模型.json", "a b", "a..b", "~x", "-rf"],
)
def test_plain_names(name: str) -> None:
    assert name_fault(name) is None


def test_names_that_clash() -> None:
    assert first_clash(["a", "b"]) is None
    assert first_clash(["a", "b", "A"]) == ("a", "A")
    assert first_clash(["a", "a"]) == ("a", "a")
    assert first_clash(["\u00e9", "e\u0301"]) == ("\u00e9", "e\u0301")
    assert first_clash(["STRASSE", "straße"]) == ("STRASSE", "straße")
