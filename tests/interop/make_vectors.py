"""Makes the golden files of slime's and SkyRL's formats; refuses to rewrite any.

Run from the root of the repository::

    python -m tests.interop.make_vectors

They are made by the writers of :mod:`.by_hand`, not by thinwire: whoever has no files of the real
systems can test against these.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from .by_hand import Tensor, Tensors, safetensors, slime_payloads, write_skyrl, write_slime

VECTORS = Path(__file__).parent / "vectors"


def versions() -> list[Tensors]:
    """Three versions of a tiny model; the last one has the bits that floats lose."""
    rng = np.random.default_rng(6)

    def bf16(*shape: int) -> Tensor:
        words = (rng.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2")
        return "BF16", shape, words.tobytes()

    first: dict[str, Tensor] = {
        "model.embed.weight": bf16(40, 12),
        "model.norm.weight": bf16(12),
        "model.scale": ("F32", (), np.float32(0.25).tobytes()),
        "model.quantized": ("F8_E4M3", (99,), rng.bytes(99)),
        "model.ids": ("I64", (3,), np.arange(3, dtype="<i8").tobytes()),
        "model.none": ("F16", (0, 4), b""),
    }
    second = first | {
        "model.embed.weight": _stepped(first["model.embed.weight"], rng),
        "model.scale": ("F32", (), np.float32(0.5).tobytes()),
        "model.quantized": _stepped(first["model.quantized"], rng),
    }
    dtype, shape, data = _stepped(second["model.embed.weight"], rng)
    special = np.array([0x8000, 0x0000, 0x7FC1, 0xFF80], "<u2").tobytes()
    third = second | {
        "model.embed.weight": (dtype, shape, special + data[len(special) :]),
        "model.ids": ("I64", (3,), np.full(3, -1, "<i8").tobytes()),
        "model.scale": ("F32", (), b"\x00\x00\x00\x80"),
    }
    return [first, second, third]


def _stepped(tensor: Tensor, rng: np.random.Generator) -> Tensor:
    dtype, shape, data = tensor
    values = np.frombuffer(data, "u1").copy()
    values[rng.random(values.size) < 0.03] ^= 1
    return dtype, shape, values.tobytes()


def main() -> None:
    """Write all of them."""
    if VECTORS.exists():
        sys.exit(f"{VECTORS} exists: golden files are never rewritten")
    full = versions()
    for number, tensors in enumerate(full):
        folder = VECTORS / f"full_{number}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(safetensors(tensors, {"format": "pt"}))
    for encoding, checksum, files in (
        ("xor", "xxh3-128", 1),
        ("xor", "decimal adler32", 2),
        ("overwrite", "blake3", 2),
        ("overwrite", "adler32", 1),
    ):
        chain = VECTORS / f"slime-{encoding}-{checksum.replace(' ', '-')}"
        for version in (1, 2):
            write_slime(
                chain / f"weight_v{version:06d}",
                slime_payloads(full[version - 1], full[version], encoding, checksum),
                version=f"{version:06d}",
                base_version=f"{version - 1:06d}",
                encoding=encoding,
                checksum=checksum,
                files=files,
            )
    for kind, files in (("now", 2), ("first-release", 1)):
        for version in (1, 2):
            write_skyrl(
                VECTORS
                / f"skyrl-{kind}"
                / (f"delta-{version:08d}" if kind == "now" else f"v{version:08d}"),
                full[version - 1],
                full[version],
                version=version,
                base_version=version - 1,
                files=files,
                legacy=kind == "first-release",
            )


if __name__ == "__main__":
    main()
