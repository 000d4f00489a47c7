"""Deltas and chains from one format to another; the weights stay the same, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.interop.chains import publish, read_tensors, replayed, write_versions

from thinwire.checkpoint import Checkpoint, apply_checkpoint, diff_checkpoint
from thinwire.errors import (
    AlreadyExists,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
    VersionGap,
)
from thinwire.follow import Follower, open_stream
from thinwire.interop.convert import Converted, convert_chain, convert_delta, convert_stream
from thinwire.interop.formats import FORMATS, format_named, format_of

WRITTEN = [row.name for row in FORMATS.values() if row.writes_deltas]
# What the table in docs/interop.md calls what is written by default.
CLAIMED = {"fireworks": "arc_v2", "trl": "trl-v2"}
WITH_FULL = [name for name in WRITTEN if FORMATS[name].writes_full]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_versions(tmp_path_factory.mktemp("versions"), 4)


@pytest.mark.parametrize("name", WRITTEN)
def test_delta_there_and_back(name: str, versions: list[Path], tmp_path: Path) -> None:
    delta = tmp_path / "step.tw"
    diff_checkpoint(versions[0], versions[1], delta)
    there = convert_delta(delta, tmp_path / "chain", name, base=versions[0], version=7)
    assert (there.version, there.base_version, there.is_full) == (7, 6, False)
    written = tmp_path / "chain" / there.name
    if written.is_dir() and format_of(written) is None:
        # One level down, as TRL has it.
        (written,) = written.iterdir()
    found = format_of(written)
    assert found is not None
    assert found.name == name
    back = convert_delta(written, tmp_path / "back.tw", "thinwire", base=versions[0])
    assert 0 < back.source_bytes <= there.written_bytes
    apply_checkpoint(versions[0], tmp_path / "back.tw", tmp_path / "made")
    assert read_tensors(tmp_path / "made") == read_tensors(versions[1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.claim(
                CLAIMED.get(name, name), "write", "a stream of 4 versions, replayed"
            ),
        )
        for name in WRITTEN
    ],
)
def test_stream_to_chain(name: str, versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions)
    stream = open_stream(tmp_path / "stream")
    done = list(convert_stream(stream, tmp_path / "chain", name))
    assert [row.version for row in done] == [1, 2, 3, 4]
    assert [row.is_full for row in done] == [True, False, False, False]
    states = replayed(tmp_path / "chain", versions[0], tmp_path / "work")
    first = 1 if FORMATS[name].writes_full else 2
    assert states == {n: read_tensors(versions[n - 1]) for n in range(first, 5)}
    assert all(row.written_bytes > 0 for row in done if row.name)


@pytest.mark.claim("hf", "write", "a stream of 4 versions, file by file")
def test_stream_to_plain_checkpoints(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions)
    stream = open_stream(tmp_path / "stream")
    done = list(convert_stream(stream, tmp_path / "hf", "hf"))
    assert all(row.is_full for row in done)
    for number, folder in enumerate(versions, 1):
        made = tmp_path / "hf" / f"version_{number:06d}"
        assert read_tensors(made) == read_tensors(folder)
        assert (made / "config.json").read_bytes() == (folder / "config.json").read_bytes()
        Checkpoint.open(made)
    assert (tmp_path / "hf" / "latest").read_text() == "version_000004\n"


@pytest.mark.parametrize("name", WITH_FULL)
def test_chain_to_stream(name: str, versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions)
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", name))
    done = list(convert_chain(tmp_path / "chain", tmp_path / "again", "thinwire"))
    assert [row.is_full for row in done] == [True, False, False, False]
    with Follower(tmp_path / "again", tmp_path / "copy") as follower:
        for number, folder in enumerate(versions, 1):
            assert follower.catch_up(number, reset=True).step == done[number - 1].version
            assert read_tensors(tmp_path / "copy") == read_tensors(folder)


@pytest.mark.parametrize("source", WITH_FULL)
@pytest.mark.parametrize("target", WITH_FULL)
def test_every_chain_to_every_other(
    source: str, target: str, versions: list[Path], tmp_path: Path
) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions[:3])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", source))
    done = list(convert_chain(tmp_path / "chain", tmp_path / "other", target))
    assert [row.is_full for row in done] == [True, False, False]
    states = replayed(tmp_path / "other", None, tmp_path / "work")
    assert list(states.values()) == [read_tensors(folder) for folder in versions[:3]]


def test_chain_that_begins_with_a_delta(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions)
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    shutil.rmtree(tmp_path / "chain" / "weight_v000001")
    with pytest.raises(InvalidArgument, match="begins with a delta") as raised:
        list(convert_chain(tmp_path / "chain", tmp_path / "out", "trl"))
    assert "version 1 " in raised.value.hint
    done = list(convert_chain(tmp_path / "chain", tmp_path / "out", "trl", base=versions[0]))
    # The base becomes a version: the new chain stands alone.
    assert [(row.version, row.is_full) for row in done] == [
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    ]
    states = replayed(tmp_path / "out", None, tmp_path / "work")
    assert states[4] == read_tensors(versions[3])


def test_base_that_is_not_needed(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions[:2])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    with pytest.raises(InvalidArgument, match="begins with full weights"):
        list(convert_chain(tmp_path / "chain", tmp_path / "out", "trl", base=versions[0]))


def test_missing_version(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions)
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    shutil.rmtree(tmp_path / "chain" / "weight_v000003")
    done: list[Converted] = []
    with pytest.raises(VersionGap, match="from version 3, and"):
        done.extend(convert_chain(tmp_path / "chain", tmp_path / "out", "fireworks"))


def test_wrong_base_is_noticed(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions[:2])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    delta = tmp_path / "chain" / "weight_v000002"
    with pytest.raises(ThinwireError, match="embed_tokens"):
        convert_delta(delta, tmp_path / "x.tw", "thinwire", base=versions[2])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "x"))] == []


def test_base_of_another_model(versions: list[Path], tmp_path: Path) -> None:
    other = write_versions(tmp_path / "other", 1, {"a.safetensors": {"w": ("BF16", [4])}})
    publish(tmp_path / "stream", tmp_path / "state", versions[:2])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    with pytest.raises(TensorMismatch, match="has no tensor"):
        convert_delta(
            tmp_path / "chain" / "weight_v000002", tmp_path / "x.tw", "thinwire", base=other[0]
        )


def test_version_must_be_known(versions: list[Path], tmp_path: Path) -> None:
    delta = tmp_path / "step.tw"
    diff_checkpoint(versions[0], versions[1], delta)
    with pytest.raises(InvalidArgument, match="does not say which version"):
        convert_delta(delta, tmp_path / "chain", "slime", base=versions[0])
    assert not (tmp_path / "chain").exists()


def test_thinwire_to_thinwire(versions: list[Path], tmp_path: Path) -> None:
    delta = tmp_path / "step.tw"
    diff_checkpoint(versions[0], versions[1], delta)
    with pytest.raises(InvalidArgument, match="delta of thinwire's"):
        convert_delta(delta, tmp_path / "x.tw", "thinwire", base=versions[0])
    publish(tmp_path / "stream", tmp_path / "state", versions[:1])
    with pytest.raises(InvalidArgument, match="stream of thinwire's"):
        list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "out", "thinwire"))


def test_target_is_not_replaced(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions[:2])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    delta, target = tmp_path / "chain" / "weight_v000002", tmp_path / "x.tw"
    target.write_bytes(b"mine")
    with pytest.raises(AlreadyExists):
        convert_delta(delta, target, "thinwire", base=versions[0])
    assert target.read_bytes() == b"mine"
    convert_delta(delta, target, "thinwire", base=versions[0], overwrite=True)
    assert format_of(target) is None
    assert len(target.read_bytes()) > 100


def test_two_conversions_make_one_chain(versions: list[Path], tmp_path: Path) -> None:
    for number in (1, 2):
        delta = tmp_path / f"{number}.tw"
        diff_checkpoint(versions[number - 1], versions[number], delta)
        convert_delta(delta, tmp_path / "chain", "slime", base=versions[number - 1], version=number)
    states = replayed(tmp_path / "chain", versions[0], tmp_path / "work")
    assert states == {n: read_tensors(versions[n]) for n in (1, 2)}


def test_target_of_another_format(versions: list[Path], tmp_path: Path) -> None:
    delta = tmp_path / "step.tw"
    diff_checkpoint(versions[0], versions[1], delta)
    convert_delta(delta, tmp_path / "chain", "slime", base=versions[0], version=1)
    with pytest.raises(InvalidArgument, match="another format"):
        convert_delta(delta, tmp_path / "chain", "trl", base=versions[0], version=1)


def test_unknown_format_and_option(versions: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no format 'zip'"):
        format_named("zip")
    delta = tmp_path / "step.tw"
    diff_checkpoint(versions[0], versions[1], delta)
    with pytest.raises(InvalidArgument, match="no option 'colour'"):
        convert_delta(
            delta,
            tmp_path / "chain",
            "slime",
            base=versions[0],
            version=1,
            options={"colour": "red"},
        )


def test_chain_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no chain"):
        list(convert_chain(tmp_path, tmp_path / "out", "slime"))


def test_grail_names_its_anchor(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions[:3])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "grail"))
    said = json.loads((tmp_path / "chain" / "checkpoint-3" / "DELTA" / "metadata.json").read_text())
    assert (said["prev_window"], said["anchor_window"]) == (2, 1)


def test_a_version_is_not_written_over(versions: list[Path], tmp_path: Path) -> None:
    delta = tmp_path / "step.tw"
    diff_checkpoint(versions[0], versions[1], delta)
    convert_delta(delta, tmp_path / "chain", "slime", base=versions[0], version=2)
    before = (tmp_path / "chain" / "weight_v000002" / "model.safetensors.index.json").read_bytes()
    diff_checkpoint(versions[0], versions[2], tmp_path / "other.tw")
    for version in (2, 1):
        with pytest.raises(AlreadyExists, match="has version 2 already"):
            convert_delta(
                tmp_path / "other.tw",
                tmp_path / "chain",
                "slime",
                base=versions[0],
                version=version,
            )
    after = (tmp_path / "chain" / "weight_v000002" / "model.safetensors.index.json").read_bytes()
    assert after == before


def test_a_failed_conversion_leaves_the_target_free(versions: list[Path], tmp_path: Path) -> None:
    f32 = {"a.safetensors": {"w": ("F32", [40])}}
    other = write_versions(tmp_path / "other", 2, f32)
    diff_checkpoint(other[0], other[1], tmp_path / "f32.tw")
    with pytest.raises(ThinwireError):
        convert_delta(tmp_path / "f32.tw", tmp_path / "out", "trl", base=other[0], version=1)
    convert_delta(tmp_path / "f32.tw", tmp_path / "out", "slime", base=other[0], version=1)


def test_a_chain_becomes_a_stream_once(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions[:2])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    list(convert_chain(tmp_path / "chain", tmp_path / "again", "thinwire"))
    with pytest.raises(InvalidArgument, match="has versions already"):
        list(convert_chain(tmp_path / "chain", tmp_path / "again", "thinwire"))


def test_full_versions_in_a_format_without(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions)
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "hf", "slime"))
    # Version 3 in full, too: as slime's chains have it now and then.
    full = tmp_path / "hf" / "weight_v000003"
    shutil.rmtree(full)
    shutil.copytree(versions[2], full)
    index = json.loads((full / "model.safetensors.index.json").read_text())
    index["metadata"]["version"] = "000003"
    (full / "model.safetensors.index.json").write_text(json.dumps(index))
    done = list(convert_chain(tmp_path / "hf", tmp_path / "skyrl", "skyrl"))
    assert [(row.version, row.base_version) for row in done] == [(1, None), (2, 1), (3, 2), (4, 3)]
    states = replayed(tmp_path / "skyrl", versions[0], tmp_path / "work")
    assert states == {n: read_tensors(versions[n - 1]) for n in (2, 3, 4)}


def test_two_chains_do_not_mix(versions: list[Path], tmp_path: Path) -> None:
    publish(tmp_path / "stream", tmp_path / "state", versions[:2])
    list(convert_stream(open_stream(tmp_path / "stream"), tmp_path / "chain", "slime"))
    list(convert_chain(tmp_path / "chain", tmp_path / "out", "trl"))
    with pytest.raises(InvalidArgument, match="two chains"):
        list(convert_chain(tmp_path / "chain", tmp_path / "out", "trl"))
    diff_checkpoint(versions[2], versions[3], tmp_path / "far.tw")
    with pytest.raises(VersionGap, match="is at version 2, and this delta was made from 3"):
        convert_delta(tmp_path / "far.tw", tmp_path / "out", "trl", base=versions[2], version=4)
