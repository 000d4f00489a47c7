"""slime's weight_v: what breaks a rule is an error that says which, and takes no base with it."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    FormatError,
    LimitExceeded,
    NotFound,
    TensorMismatch,
    ThinwireError,
    Truncated,
    Unsupported,
)
from thinwire.interop import slime, slime_index
from thinwire.interop.change import ForeignChange

from . import by_hand
from .making import (
    MIXED,
    MIXED_NEW,
    applied,
    bits_of,
    tensor,
    write_checkpoint,
)

FIRST = "model-00000-of-00002.safetensors"
SECOND = "model-00001-of-00002.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "base", MIXED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound delta in two files."""
    payloads = by_hand.slime_payloads(MIXED, MIXED_NEW, "xor", "xxh3-128")
    return by_hand.write_slime(tmp_path / "chain" / "weight_v000001", payloads, files=2)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def edit_file(
    folder: Path, name: str, edit: Callable[[dict[str, by_hand.Tensor], dict[str, str]], Any]
) -> None:
    tensors, metadata = by_hand.read_safetensors(folder / name)
    edit(tensors, metadata)
    (folder / name).write_bytes(by_hand.safetensors(tensors, metadata))


def test_the_sound_one_is_read(base: Checkpoint, folder: Path) -> None:
    assert slime.is_delta(folder)
    assert applied(base, slime.open_delta(folder)) == bits_of(MIXED_NEW)


METADATA: list[tuple[dict[str, Any], type[ThinwireError], str]] = [
    ({"version": None}, Corrupt, "its version is None"),
    ({"version": "one"}, Corrupt, "its version is 'one'"),
    ({"version": "-1"}, Corrupt, "its version is '-1'"),
    ({"version": -1}, Corrupt, "its version is -1"),
    ({"version": True}, Corrupt, "its version is True"),
    ({"version": 1.0}, Corrupt, "its version is 1.0"),
    ({"version": "\u0661"}, Corrupt, "its version is '\u0661'"),
    ({"version": "9" * 5000}, Corrupt, "its version is '999"),
    ({"version": "2"}, Corrupt, "its version is 2, and its folder is weight_v000001"),
    ({"base_version": "000001"}, Corrupt, "not an older one"),
    ({"base_version": "000002"}, Corrupt, "not an older one"),
    ({"base_version": [0]}, Corrupt, r"its base_version is \[0\]"),
    ({"delta_encoding": "sparse"}, Unsupported, "'sparse'.*Known are xor, overwrite"),
    ({"delta_encoding": None}, Corrupt, "its delta_encoding is None"),
    ({"compression_format": "lz4"}, Unsupported, "'lz4'"),
    ({"compression_format": ["zstd"]}, Corrupt, "its compression_format is"),
    ({"checksum_format": "md5"}, Unsupported, "'md5'.*xxh3-128, blake3, adler32"),
    ({"checksum_format": "sha256"}, Unsupported, "'sha256'"),
    ({"checksum_format": {}}, Corrupt, "its checksum_format is a table"),
    ({"checksum_format": [[1]]}, Corrupt, "its checksum_format is a list of lists or tables"),
]


@pytest.mark.parametrize(("change", "error", "what"), METADATA, ids=lambda value: str(value)[:40])
def test_metadata(
    change: dict[str, Any], error: type[ThinwireError], what: str, folder: Path
) -> None:
    edit_index(folder, lambda index: index["metadata"].update(change))
    with pytest.raises(error, match=what) as caught:
        slime.open_delta(folder)
    assert "slime's weight_v" in str(caught.value)
    edit_index(folder, lambda index: [index["metadata"].pop(key) for key in change])
    if "delta_encoding" not in change:
        with pytest.raises(Corrupt, match="is None"):
            slime.open_delta(folder)


def test_versions_as_numbers_and_unpadded(base: Checkpoint, folder: Path) -> None:
    for version, base_version in ((1, 0), ("1", "0"), ("0000001", 0)):
        change = {"version": version, "base_version": base_version}
        edit_index(folder, lambda index, change=change: index["metadata"].update(change))  # type: ignore[misc]
        with slime.open_delta(folder) as delta:
            assert (delta.facts.version, delta.facts.base_version) == (1, 0)


def test_a_base_version_is_not_a_check_of_the_base(base: Checkpoint, folder: Path) -> None:
    """Whoever applies deltas in the wrong order meets the checksums."""
    wrong = write_checkpoint(base.path.parent / "wrong", MIXED_NEW)
    delta = slime.open_delta(folder)
    with pytest.raises(ChecksumMismatch, match="checkpoint that the delta was made from"):
        applied(wrong, delta)


FILE_NAMES = [
    "../model.safetensors",
    "/etc/passwd.safetensors",
    "a/b.safetensors",
    "a\\b.safetensors",
    "..",
    ".",
    "",
    "C:model.safetensors",
    "a\0.safetensors",
    ".hidden.safetensors",
    "model.bin",
    "x" * 300 + ".safetensors",
    "\ud800.safetensors",
]


@pytest.mark.parametrize("name", FILE_NAMES, ids=lambda name: repr(name)[:24])
def test_names_of_files(name: str, folder: Path) -> None:
    edit_index(folder, lambda index: index["weight_map"].update(w=name))
    with pytest.raises(Corrupt, match=r"it names the file .*: the name "):
        slime.open_delta(folder)


@pytest.mark.parametrize("name", [None, 3, [], {}, ["model.safetensors"]])
def test_names_that_are_no_text(name: object, folder: Path) -> None:
    edit_index(folder, lambda index: index["weight_map"].update(w=name))
    with pytest.raises(Corrupt, match="which is no file name"):
        slime.open_delta(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        '{"weight_map": {}, "weight_map": {}}',
        '{"metadata": {"delta_encoding": "xor"}}',
        '{"metadata": [], "weight_map": {}}',
        '{"metadata": {"delta_encoding": "xor"}, "weight_map": []}',
        "[" * 100_000,
        '{"metadata": {"version": ' + "9" * 10_000 + '}, "weight_map": {}}',
    ],
    ids=lambda text: text[:24],
)
def test_an_index_that_is_none(text: str, folder: Path) -> None:
    (folder / INDEX_NAME).write_text(text)
    assert not slime.is_delta(folder)
    with pytest.raises(Corrupt, match="slime's weight_v"):
        slime.open_delta(folder)
    with pytest.raises(Corrupt, match="slime's weight_v"):
        slime.list_versions(folder.parent)


@pytest.mark.parametrize("depth", [200, 600, 900, 950, 980, 990])
@pytest.mark.parametrize("key", ["version", "delta_encoding", "more", "weight_map"])
def test_what_is_nested_deeply(key: str, depth: int, folder: Path, base: Checkpoint) -> None:
    """Reading it goes deeper than showing it may."""
    place = "weight_map" if key == "weight_map" else "metadata"
    edit_index(folder, lambda index: index[place].update({key: "@"}))
    text = (folder / INDEX_NAME).read_text()
    (folder / INDEX_NAME).write_text(text.replace('"@"', "[" * depth + "]" * depth))
    slime.is_delta(folder)
    if key == "more" and depth == 200:
        assert "more" not in slime.open_delta(folder).facts.metadata
        opened = Checkpoint.open(folder)
        with pytest.raises(ThinwireError):
            slime.write_full(opened, folder.parent, version=1)
        return
    with contextlib.suppress(ThinwireError):
        slime.open_delta(folder)
    with contextlib.suppress(ThinwireError):
        slime.list_versions(folder.parent)


def test_an_index_that_is_not_utf8(folder: Path) -> None:
    (folder / INDEX_NAME).write_bytes(b'{"metadata": {"delta_encoding": "\xff"}}')
    assert not slime.is_delta(folder)
    with pytest.raises(Corrupt, match="no index"):
        slime.open_delta(folder)


def test_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(Corrupt, match=rf"names '{SECOND}', which is not there"):
        slime.open_delta(folder)
    (folder / INDEX_NAME).unlink()
    assert not slime.is_delta(folder)
    for path in (folder, tmp_path / "nowhere", tmp_path / "base"):
        with pytest.raises(NotFound):
            slime.open_delta(path)
        assert not slime.is_delta(path)


def test_a_file_that_is_not_in_the_index_is_not_read(base: Checkpoint, folder: Path) -> None:
    """A trainer that wrote the version before, with another number of files, left it."""
    content = (folder / FIRST).read_bytes()
    with slime.open_delta(folder) as delta:
        file_bytes = delta.facts.file_bytes
    for name, left in (("model-00000-of-00003.safetensors", content), ("x.safetensors", b"junk")):
        (folder / name).write_bytes(left)
        with slime.open_delta(folder) as delta:
            assert applied(base, delta) == bits_of(MIXED_NEW)
            assert delta.facts.file_bytes == file_bytes
    [version] = slime.list_versions(folder.parent)
    assert version[:2] == (1, 0)


class TestFiles:
    def test_a_tensor_that_is_not_in_the_index(self, folder: Path) -> None:
        edit_file(folder, FIRST, lambda tensors, _: tensors.update(x=("U8", [1], b"x")))
        with pytest.raises(Corrupt, match="tensor 'x': it is not in the index"):
            slime.open_delta(folder)

    def test_a_tensor_that_only_the_index_has(self, folder: Path) -> None:
        edit_index(folder, lambda index: index["weight_map"].update(x=FIRST))
        with pytest.raises(Corrupt, match=rf"tensor 'x': it is not in '{FIRST}'"):
            slime.open_delta(folder)

    def test_a_tensor_in_two_files(self, folder: Path) -> None:
        row, _ = by_hand.read_safetensors(folder / FIRST)
        name = next(iter(row))
        edit_file(folder, SECOND, lambda tensors, _: tensors.update({name: row[name]}))
        with pytest.raises(Corrupt, match=rf"'{name}': it is in '{FIRST}' by it"):
            slime.open_delta(folder)

    def test_no_checksum(self, folder: Path) -> None:
        edit_file(folder, FIRST, lambda tensors, texts: texts.pop(next(iter(tensors))))
        with pytest.raises(Corrupt, match="has no checksum for it"):
            slime.open_delta(folder)

    @pytest.mark.parametrize("text", ["", "0" * 32, "no hex", "f" * 100_000, "\u0661", "\ud800\n"])
    def test_another_checksum(self, text: str, base: Checkpoint, folder: Path) -> None:
        edit_file(folder, FIRST, lambda tensors, texts: texts.update(dict.fromkeys(tensors, text)))
        with pytest.raises(ChecksumMismatch, match="xxh3-128") as caught:
            applied(base, slime.open_delta(folder))
        assert len(str(caught.value).encode()) < 1000
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("kind", [("I8", [4]), ("U8", [2, 2]), ("U8", [4, 1]), ("F32", [1])])
    def test_payloads_that_are_no_bytes(self, kind: tuple[str, list[int]], folder: Path) -> None:
        edit_file(folder, FIRST, lambda tensors, _: tensors.update(w=(*kind, b"abcd")))
        with pytest.raises(Corrupt, match="not a list of bytes"):
            slime.open_delta(folder)

    def test_a_damaged_header(self, folder: Path) -> None:
        raw = (folder / FIRST).read_bytes()
        for content, error in (
            (raw[:-1], Truncated),
            (raw[:5], Truncated),
            (b"", Truncated),
            (raw + b"x", Corrupt),
            (struct.pack("<Q", 1 << 60) + raw[8:], LimitExceeded),
            (struct.pack("<Q", (64 << 20) + 1) + raw[8:], LimitExceeded),
            (raw[:8] + b"[" + raw[9:], Corrupt),
        ):
            (folder / FIRST).write_bytes(content)
            with pytest.raises(error, match="slime's weight_v"):
                slime.open_delta(folder)


def test_counts_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_index, "MAX_FILES", 1)
    with pytest.raises(LimitExceeded, match="2 files; the limit is 1"):
        slime.open_delta(folder)
    monkeypatch.setattr(slime_index, "MAX_TENSORS", 1)
    with pytest.raises(LimitExceeded, match="tensors; the limit is 1"):
        slime.open_delta(folder)


def test_another_base(base: Checkpoint, folder: Path, tmp_path: Path) -> None:
    delta = slime.open_delta(folder)
    with pytest.raises(TensorMismatch, match="the base has no tensor 'w'"):
        delta.new_tensor("w", None)
    with pytest.raises(TensorMismatch, match="no tensor"):
        ForeignChange(write_checkpoint(tmp_path / "less", {"w": MIXED["w"]}), delta)
    other = write_checkpoint(tmp_path / "other", {"w": tensor("BF16", [40, 31])})
    with pytest.raises(TensorMismatch, match=r"is for 2400 bytes, .* tensor has 2480"):
        delta.new_tensor("w", other.tensors["w"])
    # No dtype and no shape: all that is known of those is the base's.
    same_bytes = base.tensors["w"]._replace(dtype="F16", shape=(1200,))
    assert delta.new_tensor("w", same_bytes)[:2] == ("F16", (1200,))


@pytest.mark.claim("slime", "refuse", "damaged bytes, a bad file for each rule")
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_an_error_or_does_no_harm(
    encoding: str, data: st.DataObject, base: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes of one file changed, cut or added: never other weights, never another exception."""
    payloads = by_hand.slime_payloads(MIXED, MIXED_NEW, encoding, "blake3")
    folder = by_hand.write_slime(
        tmp_path_factory.mktemp("damaged") / "weight_v000001",
        payloads,
        encoding=encoding,
        checksum="blake3",
    )
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "add", "swap"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 40))]
                content = content or bytearray(b"x")
            case "add":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                content[at] = data.draw(st.sampled_from(b'0123456789{}[]",: \xff'))
    path.write_bytes(content)
    slime.is_delta(folder)
    try:
        versions = slime.list_versions(folder.parent)
        with slime.open_delta(folder) as delta:
            found = applied(base, delta)
    except ThinwireError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert len(message) < 2000
        return
    assert [row.version for row in versions] == [1]
    changed = {name: bits for name, bits in bits_of(MIXED_NEW).items() if name in delta.tensors}
    assert found == bits_of(MIXED) | changed


def test_errors_are_of_the_format(folder: Path) -> None:
    """What a bad file raises can be told from a bad call."""
    edit_index(folder, lambda index: index["metadata"].pop("version"))
    with pytest.raises(FormatError) as caught:
        slime.open_delta(folder)
    assert caught.value.hint
    assert caught.value.context["system"] == "slime's weight_v"
    assert caught.value.context["file"] == str(folder / INDEX_NAME)
