"""TRL's anchors: all weights in one file, which is no delta."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.checkpoint import Checkpoint
from thinwire.errors import Unsupported
from thinwire.interop import trl

from .by_hand import Tensors, safetensors
from .making import MIXED, bits_of, checkpoint_bits, tensor, write_checkpoint

ANCHOR: Tensors = {"w": tensor("BF16", [4]), "v": tensor("BF16", [3, 2])}


def test_an_anchor_is_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "base", MIXED, shards=2, files={"config.json": "{}"})
    (tmp_path / "out").mkdir()
    files = trl.write_full(checkpoint, tmp_path / "out", version=10)
    assert [file.key for file in files] == ["anchors/step_000010.safetensors"]
    again = Checkpoint.open(files[0].path)
    assert checkpoint_bits(again) == bits_of(MIXED)
    widths = {"I64": 8, "F32": 4, "BF16": 2, "F16": 2}
    for name, span in again.weights["."].header.spans.items():
        assert span.start % widths.get(span.dtype, 1) == 0, name
    assert not trl.is_delta(files[0].path)
    with pytest.raises(Unsupported, match="not that of a delta"):
        trl.open_delta(files[0].path)


FIRST_DRAFT = {
    "format": "anchor_checkpoint",
    "version": "1",
    "model_version": "10",
    "base_model_id": "",
    "checksum_sha256": "0" * 64,
}
AS_A_DELTA = {
    "format": "sparse_weight_patch",
    "version": "1",
    "model_version": "10",
    "prev_model_version": "-1",
    "changed_params": "[]",
}


@pytest.mark.parametrize("metadata", [FIRST_DRAFT, AS_A_DELTA, AS_A_DELTA | {"encoding": "raw"}])
def test_whole_tensors_are_no_delta(metadata: dict[str, str], tmp_path: Path) -> None:
    """The first drafts do not say whether a file is sparse."""
    path = tmp_path / "anchors" / "step_000010.safetensors"
    path.parent.mkdir()
    path.write_bytes(safetensors(ANCHOR, metadata))
    assert not trl.is_delta(path)
    with pytest.raises(Unsupported, match="An anchor is a checkpoint"):
        trl.open_delta(path)
    assert [row[:2] for row in trl.list_versions(tmp_path)] == [(10, None)]
    assert checkpoint_bits(Checkpoint.open(path)) == bits_of(ANCHOR)
