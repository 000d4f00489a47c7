"""What the weights must be: a pure function of (seed, run, step), and readers that share no code
with thinwire. The publisher makes its weights with it, everyone else checks what they hold.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint16]

# Large enough that a partial follower may leave one out, and some that are always held.
SHAPES = {
    "blocks.0.weight": (256, 300),
    "blocks.1.weight": (300, 256),
    "embed.weight": (40, 64),
    "norm.weight": (64,),
}
PARTIAL = ["blocks.0.*"]
HELD_BY_PARTIAL = set(SHAPES) - {"blocks.1.weight"}


def _words_of(*parts: object) -> np.random.Generator:
    key = hashlib.sha256(repr(parts).encode()).digest()
    return np.random.Generator(np.random.Philox(key=list(struct.unpack("<2Q", key[:16]))))


class Oracle:
    """The weights of every run and step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._base: dict[str, Words] = {}
        self._phase: dict[str, npt.NDArray[np.int64]] = {}
        self._period: dict[str, npt.NDArray[np.int64]] = {}
        for name, shape in SHAPES.items():
            rng = _words_of(seed, name)
            values = rng.normal(0, 0.02, shape).astype(np.float16)
            self._base[name] = values.view(np.uint16)
            self._period[name] = rng.integers(20, 600, shape)
            self._phase[name] = rng.integers(0, 600, shape)

    def words(self, run: str, step: int) -> dict[str, Words]:
        """Every tensor's bits. ``run`` is a publisher's: each has its own few elements."""
        made = {}
        for name, base in self._base.items():
            moves = (step + self._phase[name]) // self._period[name]
            rng = _words_of(self._seed, name, run)
            own = np.zeros(base.shape, np.int64)
            at = rng.integers(0, base.size, max(1, base.size // 200))
            own.reshape(-1)[at] = rng.integers(1, 6, at.size)
            made[name] = (base + moves + own).astype(np.uint16)
        return made

    def tensors(self, run: str, step: int) -> dict[str, npt.NDArray[np.float16]]:
        """The same as a trainer has them."""
        return {name: words.view(np.float16) for name, words in self.words(run, step).items()}

    def digest(self, run: str, step: int) -> str:
        """SHA-256 over all tensors."""
        return digest_of({n: w.tobytes() for n, w in self.words(run, step).items()})

    def faults(self, held: Mapping[str, bytes], run: str, step: int, names: set[str]) -> list[str]:
        """What is wrong with the tensors ``names`` that someone holds."""
        words = self.words(run, step)
        faults = []
        if set(held) != names:
            faults.append(f"holds the tensors {sorted(held)}, not {sorted(names)}")
        for name in sorted(names & set(held)):
            if held[name] == words[name].tobytes():
                continue
            data = np.frombuffer(held[name], np.uint16)
            whole = words[name].reshape(-1)
            wrong = int(np.count_nonzero(data != whole)) if data.size == whole.size else -1
            faults.append(f"{name}: {wrong} of {whole.size} words are not those of {run}@{step}")
        return faults


def digest_of(tensors: Mapping[str, bytes]) -> str:
    """SHA-256 over names and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensors[name])
    return digest.hexdigest()


def read_folder(folder: Path) -> dict[str, bytes]:
    """Every tensor of a folder's safetensors files."""
    tensors: dict[str, bytes] = {}
    for path in sorted(folder.glob("[!.]*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        start = 8 + length
        for name, facts in json.loads(data[8:start]).items():
            if name != "__metadata__":
                if name in tensors:
                    raise ValueError(f"{path}: {name} is in two files")
                first, last = facts["data_offsets"]
                tensors[name] = data[start + first : start + last]
    return tensors


def write_folder(folder: Path, tensors: Mapping[str, bytes], config: str) -> None:
    """A checkpoint folder of another layout than thinwire writes: two files, sorted backwards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors, reverse=True)
    halves = {"model-00001-of-00002.safetensors": names[:2]}
    halves["model-00002-of-00002.safetensors"] = names[2:]
    for file, part in halves.items():
        header, at = {}, 0
        for name in part:
            end = at + len(tensors[name])
            header[name] = {"dtype": "F16", "shape": list(SHAPES[name]), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        body = b"".join(tensors[name] for name in part)
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + body)
    places = {name: file for file, part in halves.items() for name in part}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(config)
