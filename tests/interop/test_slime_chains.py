"""slime's weight_v: full versions, and chains of versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.errors import Corrupt, InvalidArgument, VersionGap
from thinwire.interop import formats, slime

from . import by_hand
from .making import (
    MIXED,
    MIXED_NEW,
    bits_of,
    brought,
    change_between,
    checkpoint_bits,
    write_checkpoint,
    written,
)


class TestFullVersions:
    @pytest.mark.parametrize("shards", [1, 3])
    def test_written(self, shards: int, tmp_path: Path) -> None:
        files = {"config.json": "{}", "tokenizer.txt": "t"}
        checkpoint = write_checkpoint(tmp_path / "full", MIXED, shards=shards, files=files)
        out = tmp_path / "out"
        out.mkdir()
        files_out = slime.write_full(checkpoint, out, version=12)
        # The weights stay where they are; only the index is new, and it is last.
        assert [path.name for path in out.iterdir()] == [INDEX_NAME]
        assert files_out[-1] == ("weight_v000012/" + INDEX_NAME, out / INDEX_NAME)
        folder = brought(files_out, tmp_path / "chain")
        opened = Checkpoint.open(folder)
        assert checkpoint_bits(opened) == bits_of(MIXED)
        assert {"config.json", "tokenizer.txt", INDEX_NAME} == opened.files.keys()
        metadata = json.loads((folder / INDEX_NAME).read_text())["metadata"]
        assert metadata == {"version": "000012"} | ({"total_size": 1} if shards > 1 else {})
        assert slime.list_versions(tmp_path / "chain") == [(12, None, folder, "weight_v000012")]
        assert not slime.is_delta(folder)
        with pytest.raises(InvalidArgument, match="no delta"):
            slime.open_delta(folder)

    def test_an_old_index_is_kept_but_for_what_is_nested(self, tmp_path: Path) -> None:
        checkpoint = write_checkpoint(tmp_path / "full", MIXED, shards=2)
        path = checkpoint.path / INDEX_NAME
        index = json.loads(path.read_text())
        index["metadata"] |= {"version": "old", "by": "a trainer", "nested": {"a": 1}}
        path.write_text(json.dumps(index))
        out = tmp_path / "out"
        out.mkdir()
        slime.write_full(Checkpoint.open(checkpoint.path), out, version=3)
        metadata = json.loads((out / INDEX_NAME).read_text())["metadata"]
        assert metadata == {"total_size": 1, "version": "000003", "by": "a trainer"}

    def test_of_one_file_with_another_name(self, tmp_path: Path) -> None:
        (tmp_path / "weights.safetensors").write_bytes(by_hand.safetensors(MIXED))
        checkpoint = Checkpoint.open(tmp_path / "weights.safetensors")
        (tmp_path / "out").mkdir()
        folder = brought(
            slime.write_full(checkpoint, tmp_path / "out", version=1), tmp_path / "chain"
        )
        assert checkpoint_bits(Checkpoint.open(folder)) == bits_of(MIXED)

    def test_refused(self, tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        delta = written(slime, tmp_path, change)
        with pytest.raises(InvalidArgument, match="is a delta"):
            slime.write_full(Checkpoint.open(delta), tmp_path, version=1)
        with pytest.raises(InvalidArgument, match="-1"):
            slime.write_full(change.base, tmp_path, version=-1)


class TestChains:
    @pytest.fixture
    def chain(self, tmp_path: Path) -> Path:
        """Deltas 1 and 2, full weights 3, delta 4."""
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        for version in (1, 2, 4):
            written(slime, tmp_path, change, version=version)
        (tmp_path / "out-3").mkdir()
        brought(slime.write_full(change.base, tmp_path / "out-3", version=3), tmp_path / "chain")
        return tmp_path / "chain"

    def test_full_versions_begin_anew(self, chain: Path) -> None:
        versions = slime.list_versions(chain)
        assert [row[:2] for row in versions] == [(1, 0), (2, 1), (3, None), (4, 3)]
        assert [row.is_full for row in versions] == [False, False, True, False]
        assert checkpoint_bits(
            Checkpoint.open(versions[2].path, ignore_subfolders=True)
        ) == bits_of(MIXED)
        assert formats.FORMATS["slime"].list_versions(chain) == versions
        # Those before a full one may go, in any number.
        shutil.rmtree(chain / "weight_v000001")
        shutil.rmtree(chain / "weight_v000002")
        assert [row[:2] for row in slime.list_versions(chain)] == [(3, None), (4, 3)]

    def test_a_gap(self, chain: Path) -> None:
        shutil.rmtree(chain / "weight_v000003")
        with pytest.raises(VersionGap, match=r"weight_v000004: a delta from version 3, .* is 2"):
            slime.list_versions(chain)

    def test_a_gap_before_a_full_version(self, chain: Path) -> None:
        shutil.rmtree(chain / "weight_v000001")
        assert [row[:2] for row in slime.list_versions(chain)] == [(2, 1), (3, None), (4, 3)]

    def test_one_that_is_being_written(self, chain: Path) -> None:
        (chain / "weight_v000004" / INDEX_NAME).unlink()
        assert [row.version for row in slime.list_versions(chain)] == [1, 2, 3]

    def test_full_weights_without_an_index(self, chain: Path) -> None:
        (chain / "weight_v000003" / INDEX_NAME).unlink()
        assert [row[:2] for row in slime.list_versions(chain)][2:] == [(3, None), (4, 3)]

    def test_what_is_no_version(self, chain: Path, tmp_path: Path) -> None:
        for name in (
            "weight_v5",
            "weight_v0000005",
            "weight_v000005.tmp",
            "weight_v" + "\u0665" * 6,
        ):
            shutil.copytree(chain / "weight_v000004", chain / name)
        (chain / "weight_v000005").write_text("a file")
        (chain / "latest").write_text("run/weight_v000004")
        assert [row.version for row in slime.list_versions(chain)] == [1, 2, 3, 4]
        assert slime.list_versions(tmp_path / "nowhere") == []
        assert slime.list_versions(chain / "latest") == []
        assert slime.list_versions(tmp_path / "old") == []

    def test_another_number_than_its_folder(self, chain: Path) -> None:
        (chain / "weight_v000002").rename(chain / "weight_v000005")
        with pytest.raises(Corrupt, match="its version is 2, and its folder is weight_v000005"):
            slime.list_versions(chain)
        with pytest.raises(Corrupt, match="its version is 2, and its folder is weight_v000005"):
            slime.open_delta(chain / "weight_v000005")
