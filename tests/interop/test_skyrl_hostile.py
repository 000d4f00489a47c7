"""SkyRL's delta sync: what breaks a rule is an error that says which."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    LimitExceeded,
    NotFound,
    TensorMismatch,
    ThinwireError,
    Truncated,
    Unsupported,
)
from thinwire.interop import skyrl, skyrl_manifest
from thinwire.interop.change import ForeignChange

from . import by_hand
from .making import MIXED, MIXED_NEW, applied, bits_of, write_checkpoint

MANIFEST = "manifest.json"
FIRST = "delta-rank00000-file000000.safetensors"
SECOND = "delta-rank00000-file000001.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "base", MIXED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound delta in two files."""
    return by_hand.write_skyrl(tmp_path / "chain" / "delta-00000001", MIXED, MIXED_NEW, files=2)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def edit_record(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the record of "w", the first one."""

    def on_first(manifest: dict[str, Any]) -> None:
        assert manifest["tensors"][0]["name"] == "w"
        change(manifest["tensors"][0])

    edit(folder, on_first)


def test_the_sound_one_is_read(base: Checkpoint, folder: Path) -> None:
    assert skyrl.is_delta(folder)
    assert applied(base, skyrl.open_delta(folder)) == bits_of(MIXED_NEW)


FIELDS: list[tuple[dict[str, Any], type[ThinwireError], str]] = [
    ({"version": None}, Corrupt, "its version is None"),
    ({"version": "1"}, Corrupt, "its version is '1'"),
    ({"version": True}, Corrupt, "its version is True"),
    ({"version": -1}, Corrupt, "its version is -1"),
    ({"version": 1 << 64}, Corrupt, "its version is 18446744073709551616"),
    ({"version": 2}, Corrupt, "its version is 2, and its folder is delta-00000001"),
    ({"base_version": 1}, Corrupt, "not an older one"),
    ({"base_version": 0.0}, Corrupt, "its base_version is 0.0"),
    ({"tensors": {}}, Corrupt, "are no list"),
    ({"tensors": [3]}, Corrupt, "one of its tensors has no name"),
    ({"tensors": [{}]}, Corrupt, "one of its tensors has no name"),
    ({"tensors": [{"name": 3}]}, Corrupt, "one of its tensors has no name"),
    ({"payload_files": "a"}, Corrupt, "are no list"),
    ({"payload_files": [3]}, Corrupt, "which is no name"),
    ({"payload_files": [[]]}, Corrupt, "which is no name"),
    ({"payload_files": [FIRST, FIRST, SECOND]}, Corrupt, "lists a payload file twice"),
    ({"payload_files": [FIRST]}, Corrupt, f"its payload is in '{SECOND}', which is not listed"),
    ({"payload_files": []}, Corrupt, "which is not listed"),
    ({"payload_files": [FIRST, SECOND, "x.safetensors"]}, Corrupt, "which is not there"),
    ({"total_uncompressed_num_bytes": 0}, Corrupt, "total_uncompressed_num_bytes is 0, not"),
    ({"total_compressed_num_bytes": 1}, Corrupt, "total_compressed_num_bytes is 1, not"),
    ({"total_compressed_num_bytes": "1"}, Corrupt, "total_compressed_num_bytes is '1'"),
]


@pytest.mark.parametrize(("change", "error", "what"), FIELDS, ids=lambda value: str(value)[:40])
def test_fields(
    change: dict[str, Any], error: type[ThinwireError], what: str, folder: Path
) -> None:
    edit(folder, lambda manifest: manifest.update(change))
    with pytest.raises(error, match=what) as caught:
        skyrl.open_delta(folder)
    assert "SkyRL's delta sync" in str(caught.value)


def test_fields_that_may_be_missing(base: Checkpoint, folder: Path) -> None:
    """SkyRL takes a default for these."""
    totals = ("total_uncompressed_num_bytes", "total_compressed_num_bytes")
    edit(folder, lambda manifest: [manifest.pop(key) for key in totals])
    edit(folder, lambda manifest: manifest.update(more="of a later release"))
    edit_record(folder, lambda record: record.pop("checksum_algorithm"))
    edit_record(folder, lambda record: record.update(sha256="not looked at"))
    assert applied(base, skyrl.open_delta(folder)) == bits_of(MIXED_NEW)


RECORDS: list[tuple[dict[str, Any], type[ThinwireError], str]] = [
    ({"dtype": 3}, Corrupt, "its dtype is 3"),
    ({"dtype": "BF16"}, Unsupported, "its dtype is 'BF16'.*Known are bfloat16, float16"),
    ({"dtype": "complex64"}, Unsupported, "its dtype is 'complex64'"),
    ({"dtype": "float32"}, Corrupt, "its uncompressed_num_bytes is 2400, where float32"),
    ({"shape": None}, Corrupt, "its shape is None"),
    ({"shape": [40, -30]}, Corrupt, r"its shape is \[40, -30\]"),
    ({"shape": [40, True]}, Corrupt, r"its shape is \[40, True\]"),
    ({"shape": [40, 30.0]}, Corrupt, r"its shape is \[40, 30.0\]"),
    ({"shape": [1 << 70]}, Corrupt, "its shape is"),
    ({"shape": [1 << 40, 1 << 40]}, LimitExceeded, "its shape is impossible"),
    ({"shape": [1] * 40}, LimitExceeded, "its shape is impossible"),
    ({"shape": [40, 31]}, Corrupt, r"where bfloat16 \[40, 31\] needs 2480"),
    ({"uncompressed_num_bytes": 2401}, Corrupt, "is 2401, where"),
    ({"uncompressed_num_bytes": -1}, Corrupt, "its uncompressed_num_bytes is -1"),
    ({"compressed_num_bytes": None}, Corrupt, "its compressed_num_bytes is None"),
    ({"payload_file": None}, Corrupt, "its payload_file is None"),
    ({"payload_file": "../" + FIRST}, Corrupt, "the name is a folder's"),
    ({"payload_file": "/etc/" + FIRST}, Corrupt, "the name has path parts"),
    ({"payload_file": "a\\" + FIRST}, Corrupt, "the name has path parts"),
    ({"payload_file": ".hidden.safetensors"}, Corrupt, "is not one of weights"),
    ({"payload_file": "payload.bin"}, Corrupt, "is not one of weights"),
    ({"payload_file": SECOND}, Corrupt, "is missing, or is another tensor's too"),
    ({"payload_key": "x"}, Corrupt, "is missing, or is another tensor's too"),
    ({"payload_key": None}, Corrupt, "its payload_key is None"),
    ({"name": "x"}, TensorMismatch, "no tensor 'x'"),
    ({"name": "q"}, Corrupt, "it is listed twice"),
    ({"checksum": None}, Corrupt, "its checksum is None"),
    ({"checksum_algorithm": "md5"}, Unsupported, "its checksum_algorithm is 'md5'"),
    ({"checksum_algorithm": None}, Corrupt, "its checksum_algorithm is None"),
    ({"more": 1}, Unsupported, "it has 'more', which SkyRL does not know"),
]


@pytest.mark.parametrize(("change", "error", "what"), RECORDS, ids=lambda value: str(value)[:40])
def test_records(
    change: dict[str, Any],
    error: type[ThinwireError],
    what: str,
    base: Checkpoint,
    folder: Path,
) -> None:
    edit_record(folder, lambda record: record.update(change))
    with pytest.raises(error, match=what) as caught:
        applied(base, skyrl.open_delta(folder))
    assert "SkyRL's delta sync" in str(caught.value) or error is TensorMismatch


@pytest.mark.parametrize("key", ["dtype", "shape", "payload_key", "payload_file", "checksum"])
def test_records_without(key: str, folder: Path) -> None:
    edit_record(folder, lambda record: record.pop(key))
    with pytest.raises(Corrupt, match=f"its {key} is None"):
        skyrl.open_delta(folder)


def test_sizes_of_payloads(folder: Path) -> None:
    def longer(manifest: dict[str, Any]) -> None:
        manifest["tensors"][0]["compressed_num_bytes"] += 1
        manifest["total_compressed_num_bytes"] += 1

    edit(folder, longer)
    with pytest.raises(Corrupt, match=r"its payload has \d+ bytes, not \d+"):
        skyrl.open_delta(folder)


def test_one_payload_for_two_tensors(folder: Path) -> None:
    def doubled(manifest: dict[str, Any]) -> None:
        again = manifest["tensors"][0] | {"name": "again"}
        manifest["tensors"].append(again)
        for what in ("uncompressed_num_bytes", "compressed_num_bytes"):
            manifest[f"total_{what}"] += again[what]

    edit(folder, doubled)
    with pytest.raises(Corrupt, match=r"'again': its payload .* is another tensor's too"):
        skyrl.open_delta(folder)


class TestFiles:
    def test_a_payload_without_a_record(self, folder: Path) -> None:
        tensors, _ = by_hand.read_safetensors(folder / FIRST)
        more = by_hand.safetensors(tensors | {"x": ("U8", [1], b"x")})
        (folder / FIRST).write_bytes(more)
        with pytest.raises(Corrupt, match="'x': no record is for it"):
            skyrl.open_delta(folder)

    def test_a_file_that_is_not_listed(self, base: Checkpoint, folder: Path) -> None:
        """SkyRL's receiver does not even fetch it."""
        (folder / "more.safetensors").write_bytes(b"anything")
        assert applied(base, skyrl.open_delta(folder)) == bits_of(MIXED_NEW)

    def test_a_file_that_is_missing(self, folder: Path, tmp_path: Path) -> None:
        (folder / SECOND).unlink()
        with pytest.raises(Corrupt, match=f"names '{SECOND}', which is not there"):
            skyrl.open_delta(folder)
        (folder / MANIFEST).unlink()
        for path in (folder, tmp_path / "nowhere", tmp_path / "base"):
            assert not skyrl.is_delta(path)
            with pytest.raises(NotFound):
                skyrl.open_delta(path)

    def test_payloads_that_are_no_bytes(self, folder: Path) -> None:
        (folder / FIRST).write_bytes(by_hand.safetensors({"w": ("I8", [1], b"x")}))
        with pytest.raises(Corrupt, match="not a list of bytes"):
            skyrl.open_delta(folder)

    def test_a_file_that_is_cut(self, folder: Path) -> None:
        (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1])
        with pytest.raises(Truncated, match="SkyRL's delta sync"):
            skyrl.open_delta(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", '{"version": 1, "version": 1}', "[" * 100_000, "{}"]
)
def test_a_manifest_that_is_none(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_text(text)
    assert not skyrl.is_delta(folder)
    with pytest.raises(Corrupt, match="SkyRL's delta sync"):
        skyrl.open_delta(folder)
    with pytest.raises(Corrupt, match="SkyRL's delta sync"):
        skyrl.list_versions(folder.parent)


def test_limits_come_before_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skyrl_manifest, "MAX_FILES", 1)
    with pytest.raises(LimitExceeded, match="2 files; the limit is 1"):
        skyrl.open_delta(folder)
    monkeypatch.setattr(skyrl_manifest, "MAX_TENSORS", 1)
    with pytest.raises(LimitExceeded, match="tensors; the limit is 1"):
        skyrl.open_delta(folder)
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate((64 << 20) + 1)
    assert not skyrl.is_delta(folder)
    with pytest.raises(LimitExceeded, match="bytes of manifest; the limit is"):
        skyrl.open_delta(folder)


@pytest.mark.parametrize("depth", [200, 600, 900, 950, 980, 990])
@pytest.mark.parametrize("key", ["version", "tensors", "more", "payload_files", "name", "shape"])
def test_what_is_nested_deeply(key: str, depth: int, folder: Path) -> None:
    """Reading it goes deeper than showing it may."""
    if key in ("name", "shape"):
        edit_record(folder, lambda record: record.update({key: "@"}))
    else:
        edit(folder, lambda manifest: manifest.update({key: "@"}))
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"@"', "[" * depth + "]" * depth))
    skyrl.is_delta(folder)
    with contextlib.suppress(ThinwireError):
        skyrl.open_delta(folder)
    with contextlib.suppress(ThinwireError):
        skyrl.list_versions(folder.parent)


@pytest.mark.parametrize("text", ["", "no hex", "f" * 100_000, "\u0661", "\ud800\n"])
def test_another_checksum(text: str, base: Checkpoint, folder: Path) -> None:
    edit_record(folder, lambda record: record.update(checksum=text))
    with pytest.raises(ChecksumMismatch, match="xxh3-128") as caught:
        applied(base, skyrl.open_delta(folder))
    assert len(str(caught.value).encode()) < 1000
    assert str(caught.value).isprintable()


class TestBases:
    def test_other_weights(self, folder: Path, tmp_path: Path) -> None:
        wrong = write_checkpoint(tmp_path / "wrong", MIXED_NEW)
        with pytest.raises(ChecksumMismatch, match="checkpoint that the delta was made from"):
            applied(wrong, skyrl.open_delta(folder))

    @pytest.mark.parametrize("kind", [("F16", (40, 30)), ("BF16", (30, 40)), ("BF16", (1200,))])
    def test_another_dtype_or_shape(
        self, kind: tuple[str, tuple[int, ...]], base: Checkpoint, folder: Path
    ) -> None:
        dtype, shape = kind
        other = base.tensors["w"]._replace(dtype=dtype, shape=shape)
        with pytest.raises(TensorMismatch, match="nothing is converted here"):
            skyrl.open_delta(folder).new_tensor("w", other)

    def test_a_tensor_that_it_lacks(self, folder: Path, tmp_path: Path) -> None:
        """SkyRL's receiver leaves it out, with a warning."""
        delta = skyrl.open_delta(folder)
        with pytest.raises(TensorMismatch, match="the base has no tensor 'w'"):
            delta.new_tensor("w", None)
        with pytest.raises(TensorMismatch, match="no tensor"):
            ForeignChange(write_checkpoint(tmp_path / "less", {"w": MIXED["w"]}), delta)


@pytest.mark.claim("skyrl", "refuse", "damaged bytes, a bad manifest for each rule")
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_an_error_or_does_no_harm(
    data: st.DataObject, base: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes of one file changed, cut or added: never other weights, never another exception."""
    folder = by_hand.write_skyrl(
        tmp_path_factory.mktemp("damaged") / "delta-00000001", MIXED, MIXED_NEW, files=2
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
    skyrl.is_delta(folder)
    try:
        skyrl.list_versions(folder.parent)
        with skyrl.open_delta(folder) as delta:
            found = applied(base, delta)
    except ThinwireError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert len(message) < 2000
        return
    changed = {name: bits for name, bits in bits_of(MIXED_NEW).items() if name in delta.tensors}
    assert found == bits_of(MIXED) | changed
