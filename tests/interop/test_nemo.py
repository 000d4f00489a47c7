"""NeMo-RL's payloads are read, as its receivers read them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.errors import TensorMismatch
from thinwire.interop import nemo

from .making import Tensors, applied, bits_of, checkpoint_bits, tensor_pairs, write_checkpoint
from .nemo_by_hand import NEW, OLD, packed, payload, saved, sound, stored

VECTORS = Path(__file__).parent / "vectors" / "nemo"


@pytest.mark.claim("nemo", "read", "payloads by real torch.save")
@pytest.mark.parametrize("operation", ["xor", "overwrite"])
def test_payloads_are_read(tmp_path: Path, operation: str) -> None:
    base = write_checkpoint(tmp_path / "base", OLD)
    path = packed(tmp_path, sound(operation))
    assert nemo.is_delta(path)
    with nemo.open_delta(path) as delta:
        assert delta.facts.encoding == operation
        assert (delta.facts.version, delta.facts.base_version) == (None, None)
        assert delta.facts.file_bytes == path.stat().st_size
        assert delta.tensors.keys() == OLD.keys() - {"still"}
        assert delta.tensors["model.far"][1:4] == ("BF16", (70_000,), 2)
        assert applied(base, delta) == bits_of(NEW)
    assert nemo.list_versions(tmp_path) == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pairs=tensor_pairs(["BF16", "F16", "F32", "F8_E4M3", "I64", "F64", "U8", "BOOL"]),
    operation=st.sampled_from(["xor", "overwrite"]),
)
def test_any_bits_survive(
    tmp_path_factory: pytest.TempPathFactory, pairs: tuple[Tensors, Tensors], operation: str
) -> None:
    old, new = pairs
    folder = tmp_path_factory.mktemp("any")
    base = write_checkpoint(folder / "base", old)
    with nemo.open_delta(packed(folder, saved(*payload(old, new, operation)))) as delta:
        assert applied(base, delta) == bits_of(new)


def test_gaps_of_64_bits_and_samples(tmp_path: Path) -> None:
    index, groups, tables = payload(OLD, NEW, "xor", verification_samples=3)
    _, at = tables[0].pop("index_end"), tables[0]
    gaps = np.frombuffer(index.tobytes(), "<u2", tables[0]["value_end"])
    wide = gaps.astype("<u8").tobytes()
    longer = len(wide) - gaps.nbytes
    at["index_end"] = len(wide)
    for table in tables[1:]:
        table["index_start"] += longer
        table["index_end"] += longer
    index = np.frombuffer(wide + index.tobytes()[gaps.nbytes :], "u1")
    base = write_checkpoint(tmp_path / "base", OLD)
    with nemo.open_delta(packed(tmp_path, saved(index, groups, tables))) as delta:
        assert applied(base, delta) == bits_of(NEW)


def test_views_of_a_storage(tmp_path: Path) -> None:
    """A slice of a tensor is saved with the whole storage that it is a part of."""
    torch = pytest.importorskip("torch")
    index, groups, tables = payload(OLD, NEW, "overwrite")
    parts = [torch.from_numpy(group.copy()) for group in groups]
    parts[0] = torch.cat([torch.zeros(5, dtype=parts[0].dtype), parts[0], parts[0]])
    parts[0] = parts[0][5 : 5 + groups[0].size]
    base = write_checkpoint(tmp_path / "base", OLD)
    with nemo.open_delta(packed(tmp_path, saved(index, parts, tables))) as delta:
        assert applied(base, delta) == bits_of(NEW)


def test_the_base_must_fit(tmp_path: Path) -> None:
    with nemo.open_delta(packed(tmp_path, sound("xor"))) as delta:
        with pytest.raises(TensorMismatch, match=r"F32 \[50\], and the base's is BF16"):
            delta.new_tensor("model.norm", stored(OLD["model.w"]))
        with pytest.raises(TensorMismatch, match="no tensor"):
            delta.new_tensor("model.norm", None)


@pytest.mark.claim("nemo", "read", "golden files, without torch")
@pytest.mark.parametrize("operation", ["xor", "overwrite"])
def test_golden_files(operation: str) -> None:
    """Made once by torch 2.13: where torch is not installed, these are read."""
    base = Checkpoint.open(VECTORS / "full_0")
    new = Checkpoint.open(VECTORS / "full_1")
    path = VECTORS / f"{operation}.pt"
    digests = json.loads((VECTORS / "sha256.json").read_text())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digests[path.name]
    with nemo.open_delta(path) as delta:
        assert applied(base, delta) == checkpoint_bits(new)
