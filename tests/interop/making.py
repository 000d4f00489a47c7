"""Small checkpoints, changes between them, and what deltas make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.interop.change import Change, CheckpointChange, ForeignChange
from thinwire.interop.foreign import ForeignDelta, OutFile

from .by_hand import Tensor, Tensors, safetensors

__all__ = ["Tensor", "Tensors"]

Bits = dict[str, tuple[str, tuple[int, ...], bytes]]

BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "I64": 64, "I32": 32, "U8": 8, "BOOL": 8}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I8": 8}


def tensor(dtype: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """A tensor of random bits."""
    size_bytes = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
    return dtype, shape, np.random.default_rng(seed).bytes(size_bytes)


def stepped(old: Tensor, seed: int = 0) -> Tensor:
    """The same tensor with about one byte in twenty one higher."""
    dtype, shape, data = old
    values = np.frombuffer(data, np.uint8).copy()
    values[np.random.default_rng(seed).random(values.size) < 0.05] += 1
    return dtype, shape, values.tobytes()


MIXED: dict[str, Tensor] = {
    "w": tensor("BF16", [40, 30], 1),
    "scale": tensor("F32", [], 2),
    "empty": tensor("BF16", [0, 7], 3),
    "q": tensor("F8_E4M3", [99], 4),
    "ids": tensor("I64", [12], 6),
    "mask": ("BOOL", [3], b"\1\0\1"),
    "half": tensor("F16", [1], 8),
}
MIXED_NEW: dict[str, Tensor] = {
    name: stepped(old, seed) for seed, (name, old) in enumerate(MIXED.items())
}

SHARED = Path(__file__).parents[3] / "shared"
"""Beside a checkout of the project; not beside a clone elsewhere."""


def write_checkpoint(
    folder: Path,
    tensors: Tensors,
    *,
    shards: int = 1,
    files: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Checkpoint:
    """A checkpoint's folder, its tensors in so many files, and an index if there are several."""
    folder.mkdir(parents=True)
    names = list(tensors)
    places = {}
    for number in range(shards):
        mine = names[number::shards]
        file_name = "model.safetensors"
        if shards > 1:
            file_name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        (folder / file_name).write_bytes(
            safetensors({name: tensors[name] for name in mine}, metadata)
        )
        places |= dict.fromkeys(mine, file_name)
    if shards > 1:
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    return Checkpoint.open(folder)


def change_between(
    folder: Path, old: Tensors, new: Tensors, *, shards: int = 1
) -> CheckpointChange:
    """The change between two checkpoints that are written for it."""
    base = write_checkpoint(folder / "old", old, shards=shards)
    return CheckpointChange(base, write_checkpoint(folder / "new", new, shards=shards))


def bits_of(tensors: Tensors) -> Bits:
    """Tensors in a form that can be compared."""
    return {name: (dtype, tuple(shape), data) for name, (dtype, shape, data) in tensors.items()}


def checkpoint_bits(checkpoint: Checkpoint) -> Bits:
    """All tensors of a checkpoint."""
    return {
        name: (tensor.dtype, tensor.shape, tensor.data.tobytes())
        for name, tensor in checkpoint.tensors.items()
    }


def applied(base: Checkpoint, delta: ForeignDelta) -> Bits:
    """All tensors of what a delta makes of a base."""
    change = ForeignChange(base, delta)
    news = {name: change.new_tensor(name) for name in base.tensors}
    return {name: (new.dtype, new.shape, new.data.tobytes()) for name, new in news.items()}


def brought(files: Sequence[OutFile], chain: Path) -> Path:
    """Bring what was written to where it belongs in a chain's folder; the last file's folder."""
    for key, path in files:
        target = chain / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return (chain / files[-1].key).parent


def written(system: ModuleType, folder: Path, change: Change, **options: Any) -> Path:
    """Write a delta and bring it to the chain in a folder; the version's folder.

    It makes version 1 from version 0, unless told otherwise.
    """
    version = options.pop("version", 1)
    out = folder / f"out-{version}"
    out.mkdir()
    files = system.write_delta(change, out, version=version, base_version=version - 1, **options)
    return brought(files, folder / "chain")


# Words whose bits mean something to a float: zeros of both signs, infinities, NaNs with payloads.
_SPECIAL = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0001], "<u2")


@st.composite
def tensor_pairs(draw: st.DrawFn, dtypes: Sequence[str]) -> tuple[Tensors, Tensors]:
    """Tensors and what becomes of them: nothing, some words, all of them; also 0-d and empty."""
    old: dict[str, Tensor] = {}
    new: dict[str, Tensor] = {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(0, 6), max_size=3))
        size = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        before = rng.integers(0, 256, size, np.uint8)
        after = before.copy()
        kind = draw(st.sampled_from(["same", "some", "all", "special"]))
        if kind == "some":
            after[rng.random(size) < 0.2] ^= np.uint8(draw(st.integers(1, 255)))
        elif kind == "all":
            after ^= rng.integers(1, 256, size, np.uint8)
        elif kind == "special":
            words = rng.choice(_SPECIAL, (size + 1) // 2)
            after = words.view(np.uint8)[:size].copy()
        name = draw(st.sampled_from(["w", "model.layers.0.é", "__x__", "a b"])) + str(number)
        old[name] = (dtype, shape, before.tobytes())
        new[name] = (dtype, shape, after.tobytes())
    return old, new
