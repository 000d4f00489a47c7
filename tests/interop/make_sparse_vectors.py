"""Makes the golden files of TRL's, grail's and NeMo-RL's formats; refuses to rewrite any.

Run from the root of the repository, with torch installed::

    python -m tests.interop.make_sparse_vectors

They are made by the writers of :mod:`.sparse_by_hand` and by torch, not by thinwire: whoever has no
files of the real systems can test against these.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from . import sparse_by_hand as by_hand
from .by_hand import Tensor, Tensors, safetensors
from .nemo_by_hand import payload, saved

VECTORS = Path(__file__).parent / "vectors"


def versions() -> tuple[Tensors, Tensors]:
    """Two versions of a tiny model, with bits that floats lose."""
    rng = np.random.default_rng(66)

    def bf16(*shape: int) -> Tensor:
        words = (rng.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2")
        return "BF16", shape, words.tobytes()

    first: dict[str, Tensor] = {
        "model.embed.weight": bf16(300, 12),
        "model.layers.0.weight": bf16(2, 3, 5),
        "model.norm.weight": bf16(40),
        "model.still": bf16(4, 4),
    }
    second = dict(first)
    for name, old in first.items():
        if name != "model.still":
            dtype, shape, data = old
            words = np.frombuffer(data, "<u2").copy()
            words[rng.random(words.size) < 0.05] ^= 1
            words[[0, -1]] = [0x8000, 0x7FC1]
            second[name] = dtype, shape, words.tobytes()
    return first, second


def main() -> None:
    """Write all of them."""
    old, new = versions()
    trl, grail, nemo = VECTORS / "trl", VECTORS / "grail", VECTORS / "nemo"
    for folder in (trl, grail, nemo):
        # Fails where it is there: golden files are never rewritten.
        folder.mkdir(parents=True)
    (trl / "anchors").mkdir()
    for step, tensors in enumerate((old, new)):
        path = trl / "anchors" / f"step_{step:06d}.safetensors"
        path.write_bytes(safetensors(tensors, {"sparse": "False"}))
        for folder in (grail, nemo):
            (folder / f"full_{step}").mkdir()
            weights = folder / f"full_{step}" / "model.safetensors"
            weights.write_bytes(safetensors(tensors))
    for layout, encoding in (("v1", "raw"), ("v2", "raw"), ("v2", "gap_delta")):
        by_hand.write_trl(trl / f"{layout}-{encoding}", old, new, 1, layout, encoding)
    for layout in ("v2", "v3", "v3.1"):
        by_hand.write_grail(grail / layout, old, new, layout, 1, 0)
    digests = {}
    for operation in ("xor", "overwrite"):
        data = by_hand.zstd.compress(saved(*payload(old, new, operation)), 1)
        (nemo / f"{operation}.pt").write_bytes(data)
        digests[f"{operation}.pt"] = hashlib.sha256(data).hexdigest()
    (nemo / "sha256.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
