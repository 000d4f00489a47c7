"""Plain checkpoints, one folder a version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import InvalidArgument
from thinwire.interop import hf
from thinwire.interop.formats import chain_of
from thinwire.interop.weights_out import new_weights

from .making import MIXED, bits_of, brought, checkpoint_bits, write_checkpoint


def test_written_and_listed(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "base", MIXED, shards=2, files={"config.json": "{}"})
    for version in (12, 7):
        out = tmp_path / f"out{version}"
        out.mkdir()
        files = hf.write_full(checkpoint, out, version=version)
        assert files[-1].key == "latest"
        brought(files, tmp_path / "chain")
        files[-1].path.unlink()
        (tmp_path / "chain" / "latest").unlink()
    (tmp_path / "chain" / "version_000009").write_text("a file")
    (tmp_path / "chain" / "version_8").mkdir()
    rows = hf.list_versions(tmp_path / "chain")
    assert [(row.version, row.base_version, row.name) for row in rows] == [
        (7, None, "version_000007"),
        (12, None, "version_000012"),
    ]
    assert checkpoint_bits(Checkpoint.open(rows[0].path)) == bits_of(MIXED)


def test_what_is_no_folder_has_no_versions(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "nowhere", tmp_path / "file", tmp_path / "file" / "below", tmp_path):
        assert hf.list_versions(path) == []
        assert chain_of(path) is None


def test_names_that_are_no_text(tmp_path: Path) -> None:
    one = StoredTensor("U8", (1,), np.zeros(1, np.uint8))
    with (
        pytest.raises(InvalidArgument, match=r"'\\udc80' is not Unicode text"),
        new_weights(tmp_path / "model.safetensors") as writer,
    ):
        writer.add("\udc80", one)
    assert list(tmp_path.iterdir()) == []
