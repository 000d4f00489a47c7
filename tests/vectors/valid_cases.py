"""The valid golden files: what base and new hold. A change here changes no file that exists."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bits
Tensors = dict[str, Tensor]

RNG = np.random.default_rng(20_240_607)


def bits16(words: np.ndarray, dtype: str = "BF16", shape: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of 16-bit words."""
    return dtype, shape or words.shape, words.astype("<u2").tobytes()


def weights(count: int, spread: int = 12) -> np.ndarray:
    """BF16 words of both signs whose exponents spread over some octaves below one."""
    exponents = 0x7E - np.minimum(RNG.geometric(0.3, count), spread)
    return (RNG.integers(0, 2, count) << 15 | exponents << 7 | RNG.integers(0, 128, count)).astype(
        "<u2"
    )


def stepped(words: np.ndarray, share: float, reach: int = 1) -> np.ndarray:
    """A share of the words moved by up to ``reach`` steps either way."""
    steps = RNG.integers(1, reach, words.size, endpoint=True) * RNG.choice([-1, 1], words.size)
    return (words + np.where(RNG.random(words.size) < share, steps, 0)).astype(words.dtype)


def random_tensor(dtype: str, shape: tuple[int, ...], bits: int) -> Tensor:
    """Random bits."""
    return dtype, shape, RNG.bytes(int(np.prod(shape)) * bits // 8)


def touched(old: Tensor, share: float) -> Tensor:
    """Some bytes one higher, at least one where there is one."""
    data = np.frombuffer(old[2], np.uint8).copy()
    chosen = RNG.random(data.size) < share
    chosen[-1:] = True
    data[chosen] += 1
    return *old[:2], data.tobytes()


def pairs_of(*tensors: tuple[str, Tensor, Tensor]) -> tuple[Tensors, Tensors]:
    """Base and new from tensors that both have."""
    return {n: old for n, old, _ in tensors}, {n: new for n, _, new in tensors}


def bf16(count: int, share: float, reach: int) -> tuple[Tensors, Tensors]:
    """One BF16 tensor."""
    old = weights(count)
    return pairs_of(("w", bits16(old), bits16(stepped(old, share, reach))))


def corners() -> tuple[Tensors, Tensors]:
    """Every pair of zeros, subnormals, infinities and NaNs."""
    words = np.array([0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF], "<u2")
    words = np.concatenate([words, words | 0x8000])
    old, new = np.repeat(words, words.size), np.tile(words, words.size)
    return pairs_of(*((d, bits16(old, d), bits16(new, d)) for d in ("BF16", "F16")))


def two_tables() -> tuple[Tensors, Tensors]:
    """In one tensor large weights change, in the other small ones."""
    rows = []
    for name, large in (("large", True), ("small", False)):
        old = weights(4500)
        moves = ((old >> 7 & 255) > 0x7B) == large
        rows.append((name, bits16(old), bits16(np.where(moves, stepped(old, 0.5), old))))
    return pairs_of(*rows)


def eights(dtypes: list[str]) -> tuple[Tensors, Tensors]:
    """8-bit floats."""
    rows = []
    for dtype in dtypes:
        old = ((RNG.integers(0, 2, 3000) << 7) | RNG.integers(20, 60, 3000)).astype(np.uint8)
        new = stepped(old, 0.06, 2)
        rows.append((dtype, (dtype, (60, 50), old.tobytes()), (dtype, (60, 50), new.tobytes())))
    return pairs_of(*rows)


def floats(dtype: str, numpy_dtype: str, count: int, scale: float) -> tuple[Tensors, Tensors]:
    """A wide float of which every element moves a little."""
    old = RNG.standard_normal(count).astype(numpy_dtype)
    new = (old + RNG.standard_normal(count) * scale).astype(numpy_dtype)
    return pairs_of(("w", (dtype, (count,), old.tobytes()), (dtype, (count,), new.tobytes())))


def integers() -> tuple[Tensors, Tensors]:
    """Integers of every width, and BOOL."""
    rows = []
    for dtype, bits in [(f"{s}{b}", b) for b in (8, 16, 32, 64) for s in "IU"]:
        old = random_tensor(dtype, (5, 11), bits)
        rows.append((dtype, old, touched(old, 0.02)))
    rows.append(("BOOL", ("BOOL", (4,), b"\0\1\0\1"), ("BOOL", (4,), b"\1\1\0\0")))
    return pairs_of(*rows)


def packed() -> tuple[Tensors, Tensors]:
    """Elements narrower than a byte, and scales."""
    rows = []
    for dtype, bits in (("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F8_E8M0", 8)):
        old = random_tensor(dtype, (16, 24), bits)
        rows.append((dtype, old, touched(old, 0.05)))
    return pairs_of(*rows)


def group() -> tuple[Tensors, Tensors]:
    """Small tensors around the sizes of the coder's groups and blocks, with an empty one."""
    rows = []
    for count in (1, 7, 8, 0, 9, 127, 128, 129, 255, 257):
        old = weights(count)
        rows.append((f"w.{count}", bits16(old), bits16(stepped(old, 0.2, 3))))
    scalar = random_tensor("F32", (), 32)
    rows.append(("scalar", scalar, touched(scalar, 1)))
    frozen = bits16(weights(40), shape=(2, 4, 5))
    rows.append(("frozen", frozen, frozen))
    return pairs_of(*rows)


def full_and_removed() -> tuple[Tensors, Tensors]:
    """Added, removed, reshaped, retyped; one that stays."""
    old = weights(300)
    kept = bits16(old), bits16(stepped(old, 0.1))
    base = {"gone": random_tensor("F16", (9,), 16), "kept": kept[0]}
    base |= {"shape": bits16(weights(12), shape=(3, 4)), "dtype": bits16(weights(6))}
    new = {"added": random_tensor("F32", (7, 3), 32), "kept": kept[1]}
    new |= {"shape": bits16(weights(12), shape=(4, 3)), "dtype": random_tensor("F16", (6,), 16)}
    new["zeros"] = ("I64", (500,), bytes(4000))
    return base, new


def counters() -> tuple[Tensors, Tensors]:
    """Integers that all move by the same: XOR and byte planes win."""
    old = np.arange(2000, dtype="<u4") * 7919
    new = old ^ np.uint32(0x0101)
    return pairs_of(("ids", ("U32", (2000,), old.tobytes()), ("U32", (2000,), new.tobytes())))


def large() -> tuple[Tensors, Tensors]:
    """Large enough to stand outside of groups."""
    old = np.tile(weights(2500), 28)
    new = stepped(old, 0.001)
    return pairs_of(("w", bits16(old, shape=(100, 700)), bits16(new, shape=(100, 700))))


def two_chunks() -> tuple[Tensors, Tensors]:
    """One chunk of 2**20 words and a short one; the first does not change in the second tensor."""
    old = np.tile(RNG.integers(40, 60, 4096).astype(np.uint8), 257)[: (1 << 20) + 777]
    late = old.copy()
    late[[1 << 20, -1]] ^= 1
    rows = [("w", old, stepped(old, 0.0002)), ("late", old, late)]
    shape = (old.size,)
    return pairs_of(
        *((n, ("F8_E4M3", shape, a.tobytes()), ("F8_E4M3", shape, b.tobytes())) for n, a, b in rows)
    )


VALID: dict[str, Callable[[], tuple[Tensors, Tensors]]] = {
    "bf16-sparse": lambda: bf16(4000, 0.005, 1),
    "bf16-dense": lambda: bf16(4000, 0.4, 30),
    "corners": corners,
    "two-tables": two_tables,
    "f8": lambda: eights(["F8_E4M3", "F8_E5M2"]),
    "f8-fnuz": lambda: eights(["F8_E4M3FNUZ", "F8_E5M2FNUZ"]),
    "f32-all-changed": lambda: floats("F32", "<f4", 3000, 1e-6),
    "f64": lambda: floats("F64", "<f8", 700, 1e-15),
    "c64": lambda: floats("C64", "<c8", 900, 1e-6),
    "integers": integers,
    "packed": packed,
    "group": group,
    "random": lambda: pairs_of(
        ("w", random_tensor("U16", (999,), 16), random_tensor("U16", (999,), 16))
    ),
    "counters": counters,
    "unchanged": lambda: bf16(500, 0, 1),
    "full-and-removed": full_and_removed,
    "no-tensors": lambda: ({}, {}),
    "large": large,
    "two-chunks": two_chunks,
    "attachments": lambda: bf16(200, 0.05, 1),
}

# name, kind, text (null: not carried, equal to the base's), size where not carried
ATTACHMENTS: dict[str, list[tuple[str, str, str | None, str]]] = {
    "attachments": [
        ("model.safetensors", "header", '{"w":1}', ""),
        ("config.json", "file", '{"hidden_size": 64}\n' * 20, ""),
        ("empty.txt", "file", "", ""),
        ("tokenizer.json", "file", None, "what the base has"),
        ("old.txt", "removed", None, ""),
    ]
}
