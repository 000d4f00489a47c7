"""Checkpoints of consecutive versions, written by a few lines of our own; streams and chains of
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.checkpoint import apply_checkpoint
from thinwire.interop.convert import convert_delta
from thinwire.interop.formats import chain_of
from thinwire.publish import Publisher

Tensors = dict[str, tuple[str, list[int], bytes]]

_WIDTHS = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}
_LAYOUT: dict[str, dict[str, tuple[str, list[int]]]] = {
    "model-00001-of-00002.safetensors": {
        "model.embed_tokens.weight": ("BF16", [300, 40]),
        "model.layers.0.norm.weight": ("BF16", [40]),
    },
    "model-00002-of-00002.safetensors": {
        "model.layers.0.mlp.weight": ("BF16", [80, 40]),
        "model.empty": ("BF16", [0, 4]),
        "model.scalar": ("BF16", []),
    },
}


def weights_file(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(row[2] for row in tensors.values())


def read_tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes of a checkpoint folder, or file, read by a few lines of its own."""
    found = {}
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            found[name] = data[start + first : start + last]
    return found


def write_versions(
    root: Path, count: int, layout: dict[str, dict[str, tuple[str, list[int]]]] | None = None
) -> list[Path]:
    """Folders of consecutive versions: about 2 % of the words change; odd values among them."""
    random = np.random.default_rng(7)
    layout = _LAYOUT if layout is None else layout
    state = {}
    for tensors in layout.values():
        for name, (dtype, shape) in tensors.items():
            size = int(np.prod(shape, dtype=np.int64)) * _WIDTHS[dtype]
            state[name] = random.integers(0, 256, size, np.uint8)
    folders = []
    for number in range(1, count + 1):
        folder = root / f"step-{number}"
        folder.mkdir(parents=True)
        for file, tensors in layout.items():
            rows = {
                name: (dtype, shape, state[name].tobytes())
                for name, (dtype, shape) in tensors.items()
            }
            (folder / file).write_bytes(weights_file(rows, {"format": "pt"}))
        index = {name: file for file, tensors in layout.items() for name in tensors}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        folders.append(folder)
        for name, data in state.items():
            if name.endswith(("norm.weight", "scalar")):
                continue
            words = data.view(np.uint16) if data.size % 2 == 0 else data
            places = random.integers(0, max(words.size, 1), words.size // 50 + 1)
            if words.size:
                words[places] ^= 1
            if words.size > 8:
                # A NaN with a payload, -0.0 and an infinity.
                words[:3] = [0x7FC1, 0x8000, 0xFF80] if words.itemsize == 2 else [1, 2, number]
    return folders


def publish(url: Path | str, state: Path, folders: list[Path], *, first_step: int = 1) -> None:
    """Publish checkpoints to a stream, one version each."""
    with Publisher(url, state, maintain=False) as publisher:
        for number, folder in enumerate(folders, first_step):
            publisher.publish(folder, step=number)


def replayed(chain: Path, base: Path | None, work: Path) -> dict[int, dict[str, bytes]]:
    """The weights of every version of a chain, through its reader and thinwire's folder."""
    found = chain_of(chain)
    assert found is not None
    format, rows = found
    work.mkdir()
    at, states = base, {}
    for row in rows:
        if row.is_full:
            at = row.path
        else:
            assert at is not None
            out = work / f"{row.version}.tw"
            convert_delta(row.path, out, "thinwire", base=at)
            apply_checkpoint(at, out, work / str(row.version))
            at = work / str(row.version)
        states[row.version] = read_tensors(at)
    assert format.name
    return states
