"""Tiny streams, made by the library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thinwire.follow import open_stream
from thinwire.maintain import Maintainer
from thinwire.publish import Publisher
from thinwire.stream.records import Policy
from thinwire.stream.signing import SigningKey

SHAPES = {
    "layers.0.weight": ("BF16", "<u2", (260, 300)),
    "layers.1.weight": ("F32", "<u4", (66_000,)),
    "größe": ("F16", "<u2", (77,)),
    "norm": ("BF16", "<u2", (5, 3)),
    "ids": ("I64", "<u8", (4,)),
}
Arrays = dict[str, np.ndarray]
Files = dict[str, bytes]


def first_arrays(seed: int = 0) -> Arrays:
    """Random bits near those of small weights."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, (_, kind, shape) in SHAPES.items():
        made[name] = rng.integers(0x2000, 0x3000, shape).astype(kind)
    return made


def stepped(arrays: Arrays, seed: int, share: float = 0.01) -> Arrays:
    """About this share of the words moved by one, up or down, and at least one of each tensor."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, array in arrays.items():
        new = array.copy().reshape(-1)
        chosen = rng.random(new.size) < share
        chosen[rng.integers(new.size)] = True
        new[chosen] += rng.choice(np.array([1, -1]), int(chosen.sum())).astype(new.dtype)
        made[name] = new.reshape(array.shape)
    return made


def safetensors(arrays: Arrays) -> bytes:
    header = {}
    at = 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        shape = list(array.shape)
        header[name] = {"dtype": SHAPES[name][0], "shape": shape, "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    return len(text).to_bytes(8, "little") + text + data


def files_of(arrays: Arrays, config: object = 1) -> Files:
    """A checkpoint of two weights files with their index, and a configuration."""
    parts = {
        "model-00001-of-00002.safetensors": ["layers.0.weight", "norm"],
        "model-00002-of-00002.safetensors": ["layers.1.weight", "größe", "ids"],
    }
    files = {name: safetensors({t: arrays[t] for t in part}) for name, part in parts.items()}
    places = {tensor: name for name, part in parts.items() for tensor in part}
    index = {"metadata": {}, "weight_map": places}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = json.dumps({"config": config}).encode()
    return files


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@dataclass
class Made:
    """A stream, and what each version must hold."""

    bucket: Path
    key: SigningKey | None
    contents: dict[int, Files] = field(default_factory=dict)

    @property
    def pinned(self) -> list[str]:
        return [] if self.key is None else [self.key.public]


def make_stream(
    root: Path,
    *,
    versions: int = 6,
    key: SigningKey | None = None,
    levels: Iterable[int] = (2, 4),
    anchor_every: int = 0,
) -> Made:
    """An anchor, step deltas (the third with another configuration and one file more), merges."""
    made = Made(root / "bucket", key)
    policy = Policy(merge_levels=list(levels), anchor_every=anchor_every)
    opened = open_stream(str(made.bucket), model="tiny", policy=policy, signing_key=key)
    arrays = first_arrays()
    with Publisher(opened, root / "publisher", maintain=False) as publisher:
        for version in range(1, versions + 1):
            files = files_of(arrays, config=1 if version < 3 else "ö")
            if version >= 3:
                files["tokenizer.json"] = b"[]"
            published = publisher.publish(
                write(root / "new", files), step=10 * version, metadata={"loss": 1 / version}
            )
            assert published.version == version
            made.contents[version] = files
            arrays = stepped(arrays, version)
    with Maintainer(open_stream(str(made.bucket), signing_key=key), root / "work") as maintainer:
        maintainer.run_once()
    return made
