"""Snapshots as deltas: opened, told apart, put in order, written; and what is wrong with them."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    FormatError,
    InvalidArgument,
    NotFound,
    TensorMismatch,
    ThinwireError,
    Unsupported,
)
from thinwire.interop.change import CheckpointChange
from thinwire.interop.fireworks import FORMATS, BackendNotFoundError, folder, open_fireworks
from thinwire.interop.foreign import ChainVersion
from thinwire.interop.formats import FORMATS as ALL_FORMATS
from thinwire.interop.formats import chain_of, format_of

from .by_hand import Tensor, read_safetensors, safetensors
from .making import (
    MIXED,
    MIXED_NEW,
    applied,
    bits_of,
    brought,
    change_between,
    tensor,
    tensor_pairs,
    write_checkpoint,
    written,
)

DTYPES = ["BF16", "F16", "F32", "F64", "I64", "I32", "U8", "F8_E4M3", "F8_E5M2", "U16", "I8"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_written_and_read_again(tmp_path: Path, name: str, shards: int) -> None:
    change = change_between(tmp_path, MIXED, MIXED_NEW, shards=shards)
    path = written(folder, tmp_path, change, compression_format=name)
    assert path.name == "step-00000001"
    with open_fireworks(path) as delta:
        assert delta.compression_format == delta.facts.encoding == name
        assert (delta.facts.format, delta.facts.version) == ("fireworks", 1)
        assert delta.tensors.keys() == MIXED.keys()
        assert applied(change.base, delta) == bits_of(MIXED_NEW)
    # Each weights file has the tensors of the base's, and the checksums are decimal.
    for file_name, file in change.base.weights.items():
        tensors, metadata = read_safetensors(path / file_name)
        assert tensors.keys() == metadata.keys() == file.tensors.keys()
        for key, text in metadata.items():
            assert text == str(zlib.adler32(MIXED_NEW[key][2]))


@given(tensor_pairs(DTYPES), st.sampled_from(FORMATS))
@settings(max_examples=60, deadline=None)
def test_any_tensors(tmp_path_factory: pytest.TempPathFactory, pair: object, name: str) -> None:
    old, new = pair  # type: ignore[misc]
    root = tmp_path_factory.mktemp("any")
    change = change_between(root, old, new)
    with open_fireworks(written(folder, root, change, compression_format=name), name) as delta:
        assert applied(change.base, delta) == bits_of(new)


def test_files_and_identities(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "old", MIXED, files={"config.json": "1", "t.json": "2"})
    new = write_checkpoint(tmp_path / "new", MIXED_NEW, files={"config.json": "3", "u": "4"})
    path = written(folder, tmp_path, CheckpointChange(base, new), identity="llama-7")
    assert path.name == "llama-7"
    with open_fireworks(path) as delta:
        assert {name: p.read_text() for name, p in delta.files.items()} == {
            "config.json": "3",
            "u": "4",
        }
        assert delta.facts.version == 7
    for wrong in ("a/b", "", "..", ".x/"):
        with pytest.raises(InvalidArgument, match="identity"):
            written(folder, tmp_path, CheckpointChange(base, new), identity=wrong, version=9)
        (tmp_path / "out-9").rmdir()


def test_full_snapshots_lie_where_they_are(tmp_path: Path) -> None:
    new = write_checkpoint(tmp_path / "new", MIXED_NEW, shards=2, files={"config.json": "3"})
    files = folder.write_full(new, tmp_path, version=4)
    assert files[-1].key == "step-00000004/model.safetensors.index.json"
    assert {file.path.parent for file in files} == {new.path}
    assert folder.write_full(new, tmp_path, version=4, identity="x")[0].key == "x/config.json"


def test_the_index_comes_last_in_a_delta_too(tmp_path: Path) -> None:
    change = change_between(tmp_path, MIXED, MIXED_NEW, shards=3)
    (tmp_path / "out").mkdir()
    files = folder.write_delta(change, tmp_path / "out", version=1, base_version=0)
    assert files[-1].path.name == "model.safetensors.index.json"


def test_what_a_snapshot_cannot_say(tmp_path: Path) -> None:
    for number, (old, new, shards) in enumerate(
        [
            (MIXED, MIXED | {"more": tensor("BF16", [3])}, (1, 1)),
            ({"more": tensor("BF16", [3])} | MIXED, MIXED, (1, 1)),
            (MIXED, MIXED | {"q": tensor("F8_E5M2", [99])}, (1, 1)),
            (MIXED, MIXED | {"q": tensor("F8_E4M3", [9, 11])}, (1, 1)),
            (MIXED, MIXED_NEW, (1, 2)),
            (MIXED, MIXED_NEW, (3, 2)),
        ]
    ):
        root = tmp_path / str(number)
        base = write_checkpoint(root / "old", old, shards=shards[0])
        change = CheckpointChange(base, write_checkpoint(root / "new", new, shards=shards[1]))
        (root / "out").mkdir()
        with pytest.raises(TensorMismatch, match="Fireworks has no incremental snapshot"):
            folder.write_delta(change, root / "out", version=1, base_version=0)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A full snapshot and two deltas."""
    states = [MIXED, MIXED_NEW, {k: tensor(v[0], v[1], 50) for k, v in MIXED.items()}]
    states[2] |= {"mask": MIXED["mask"]}
    checkpoints = [write_checkpoint(tmp_path / f"c{n}", s) for n, s in enumerate(states)]
    brought(folder.write_full(checkpoints[0], tmp_path, version=0), tmp_path / "chain")
    for version in (1, 2):
        change = CheckpointChange(checkpoints[version - 1], checkpoints[version])
        written(folder, tmp_path, change, version=version)
    return tmp_path / "chain"


def test_a_chain_in_its_order(chain: Path) -> None:
    names = [f"step-{n:08d}" for n in range(3)]
    wanted = [
        ChainVersion(n, n - 1 if n else None, chain / name, name) for n, name in enumerate(names)
    ]
    assert folder.list_versions(chain) == wanted
    found = chain_of(chain)
    assert found is not None
    assert (found[0].name, found[1]) == ("fireworks", wanted)
    assert format_of(chain / names[1]) is ALL_FORMATS["fireworks"]
    assert format_of(chain / names[1] / "model.safetensors") is ALL_FORMATS["fireworks"]
    assert not folder.is_delta(chain / names[0])
    assert not folder.is_delta(chain)
    assert not folder.is_delta(chain / names[1] / "none")


def test_chains_of_other_names(chain: Path) -> None:
    # A full snapshot that was sent because the delta of the same version had failed.
    full = write_checkpoint(chain.parent / "again", MIXED_NEW)
    brought(folder.write_full(full, chain, version=1, identity="step-00000001-full-1"), chain)
    rows = folder.list_versions(chain)
    assert [(row.version, row.base_version, row.name) for row in rows] == [
        (0, None, "step-00000000"),
        (1, None, "step-00000001-full-1"),
        (2, 1, "step-00000002"),
    ]
    for number, name in enumerate(("a", "b", "c")):
        (chain / f"step-{number:08d}").rename(chain / name)
    (chain / "step-00000001-full-1").rename(chain / "aa")
    rows = folder.list_versions(chain)
    assert [(row.version, row.base_version, row.name) for row in rows] == [
        (0, None, "a"),
        (1, None, "aa"),
        (2, 1, "b"),
        (3, 2, "c"),
    ]
    assert folder.list_versions(chain / "a") == []
    assert folder.list_versions(chain / "a" / "none") == []


def renamed(chain: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (chain / f"step-{number:08d}").rename(chain / name)
    return chain


@pytest.mark.parametrize(
    "names",
    [
        ("qwen3-8b-step-0", "qwen3-8b-step-1", "qwen3-8b-step-2"),
        ("step-9-of-10", "step-10-of-10", "step-11-of-10"),
        ("base-0", "step-1", "step-2"),
        ("v00000000-0a1b2c3d", "v00000001-99999999", "v00000002-00000000"),
        ("step-00000000", "v00000001-1e9d0c1b", "v00000010-1e9d0c1b-full-1"),
        ("a", "b", "c"),
    ],
)
def test_every_snapshot_is_in_its_order(chain: Path, names: tuple[str, ...]) -> None:
    if names[-1].endswith("-full-1"):
        full = write_checkpoint(chain.parent / "full", MIXED_NEW)
        brought(folder.write_full(full, chain, version=10, identity=names[-1]), chain)
        names = (*names[:-1], "v00000010-1e9d0c1b", names[-1])
    renamed(chain, *names[:3])
    rows = folder.list_versions(chain)
    wanted = [name for name in names if f"{name}-full-1" not in names]
    assert [row.name for row in rows] == wanted
    assert [row.base_version is None for row in rows][:2] == [True, False]
    for row, before in zip(rows[1:], rows, strict=False):
        assert row.base_version in (before.version, None)
        assert row.version > before.version


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("v1", "v2-retry1", "v3"), "unlike numbers"),
        (("v0", "v1", "w1"), "'v1' and 'w1' both have the number 1"),
        (("run1-step-0", "run1-step-1", "run2-step-1"), "more than one number"),
        (("first", "step-1", "step-2"), "unlike numbers"),
        (("v00000000-0a1b2c3d", "v00000001-0a1b2c3d", "v00000001-0a1b2c3e"), "both have"),
        (("step-0", "step-1", "step-1-full-1"), "is incremental, but its name says"),
    ],
)
def test_names_without_an_order_lose_nothing(
    chain: Path, names: tuple[str, ...], reason: str
) -> None:
    renamed(chain, *names)
    if reason == "more than one number":
        (chain / names[2]).rename(chain / "run2-step-2")
    with pytest.raises(InvalidArgument, match=reason):
        folder.list_versions(chain)


def test_the_number_of_one_snapshot(chain: Path) -> None:
    for name, number in (
        ("qwen3-8b-step-7", 7),
        ("v00000012-00c0ffee-full-3", 12),
        ("step-00000004", 4),
        ("final", None),
    ):
        (chain / "step-00000001").rename(chain / name)
        with open_fireworks(chain / name) as delta:
            assert delta.facts.version == number
        (chain / name).rename(chain / "step-00000001")


def test_a_chain_that_begins_with_a_delta(chain: Path) -> None:
    (chain / "step-00000000").rename(chain.parent / "elsewhere")
    assert [row.base_version for row in folder.list_versions(chain)] == [0, 1]


def payload_file(
    path: Path, name: str = "arc_v3"
) -> tuple[Path, dict[str, Tensor], dict[str, str]]:
    change = change_between(path, MIXED, MIXED_NEW)
    out = written(folder, path, change, compression_format=name) / "model.safetensors"
    return out, *read_safetensors(out)


def test_files_that_lie(tmp_path: Path) -> None:
    path, tensors, metadata = payload_file(tmp_path)
    rest = {k: v for k, v in metadata.items() if k != "w"}
    sound = tensors["w"]
    cases: list[tuple[dict[str, Tensor], dict[str, str], type[FormatError]]] = [
        (tensors, rest, ChecksumMismatch),
        (tensors, rest | {"w": "0badcafe"}, ChecksumMismatch),
        (tensors, rest | {"w": "-1"}, ChecksumMismatch),
        (tensors | {"w": ("I8", sound[1], sound[2])}, metadata, Corrupt),
        (tensors | {"w": ("U8", [1, len(sound[2])], sound[2])}, metadata, Corrupt),
        (tensors | {"w": ("U8", [4], b"\0\0\0\0")}, metadata, Unsupported),
        (tensors | {"w": ("U8", [4], b"\x28\xb5\x2f\xfd")}, metadata, Unsupported),
    ]
    for held, texts, error in cases:
        path.write_bytes(safetensors(held, texts))
        with pytest.raises(error, match=r"'(w|q|scale)'"):
            open_fireworks(path)
        assert not folder.is_delta(path) or error is Unsupported
    path.write_bytes(safetensors(tensors, metadata)[:-1])
    with pytest.raises(FormatError, match="Fireworks"):
        open_fireworks(path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    path, _, _ = payload_file(tmp_path)
    (path.parent / "more.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(Corrupt, match=r"is also in model\.safetensors"):
        open_fireworks(path.parent)


def test_a_wrong_name_for_the_format(tmp_path: Path) -> None:
    path, _, _ = payload_file(tmp_path, "arc_v1")
    base = change_between(tmp_path / "again", MIXED, MIXED_NEW).base
    with pytest.raises(BackendNotFoundError):
        open_fireworks(path, "arc_v7")
    for name in ("arc_v2", "arc_v3", "thinwire"):
        with open_fireworks(path, name) as delta, pytest.raises(ThinwireError, match="'w'"):
            delta.new_tensor("w", base.tensors["w"])
    with open_fireworks(path) as delta, pytest.raises(TensorMismatch, match="'w'"):
        delta.new_tensor("w", None)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_fireworks(tmp_path / "none.safetensors")
    with pytest.raises(InvalidArgument, match="0 weights files"):
        open_fireworks(tmp_path)
    assert not folder.is_delta(tmp_path)
    (tmp_path / "empty.safetensors").write_bytes(safetensors({}))
    with open_fireworks(tmp_path / "empty.safetensors") as delta:
        assert not delta.tensors
    assert not folder.is_delta(tmp_path / "empty.safetensors")
