"""Pairs of small checkpoints that have every corner the peers must carry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from thinwire.bench import Checkpoint, Tensor, as_tensor

Pair = tuple[Checkpoint, Checkpoint]

NAN, OTHER_NAN, NEGATIVE_NAN = 0x7FC0, 0x7F81, 0xFFC1
ZERO, NEGATIVE_ZERO, INFINITY = 0x0000, 0x8000, 0x7F80


def bf16(words: list[int] | np.ndarray, shape: tuple[int, ...] | None = None) -> Tensor:
    """A BF16 tensor from its bits; one-dimensional unless a shape is given."""
    array = np.asarray(words, np.uint16)
    return as_tensor("BF16", array.shape if shape is None else shape, array)


def weights(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """BF16 weights of the spread that a layer has."""
    values = rng.normal(0, 0.02, shape).astype(np.float32)
    return as_tensor("BF16", shape, (values.view(np.uint32) >> 16).astype(np.uint16))


def stepped(rng: np.random.Generator, tensor: Tensor, share: float) -> Tensor:
    """The tensor with this share of its words one unit up or down."""
    words = tensor.words.copy()
    changed = rng.random(words.size) < share
    words[changed] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(changed.sum()))
    return tensor._replace(words=words)


def _sparse(rng: np.random.Generator) -> Pair:
    shapes: dict[str, tuple[int, ...]] = {
        "m": (300, 70),
        "v": (999,),
        "t": (3, 5, 7),
        "far": (200_000,),
    }
    base = {name: weights(rng, shape) for name, shape in shapes.items()}
    return base, {name: stepped(rng, tensor, 0.01) for name, tensor in base.items()}


def _one_change(rng: np.random.Generator, position: int) -> Pair:
    tensor = weights(rng, (70_000, 3))
    words = tensor.words.copy()
    words[position] ^= 1
    return {"w": tensor}, {"w": tensor._replace(words=words)}


def _all_changed(rng: np.random.Generator) -> Pair:
    tensor = weights(rng, (64, 33))
    return {"w": tensor}, {"w": tensor._replace(words=~tensor.words)}


def _random_bits(rng: np.random.Generator) -> Pair:
    base, new = (bf16(rng.integers(0, 1 << 16, 5000), (50, 100)) for _ in range(2))
    return {"w": base}, {"w": new}


def _odd_floats(_rng: np.random.Generator) -> Pair:
    base = [ZERO, NEGATIVE_ZERO, NAN, NAN, NEGATIVE_NAN, INFINITY, 0x3F80, NAN]
    new = [NEGATIVE_ZERO, ZERO, OTHER_NAN, NEGATIVE_NAN, NAN, NAN, NAN, NAN]
    return {"w": bf16(base)}, {"w": bf16(new)}


def _scalar(_rng: np.random.Generator) -> Pair:
    return {"w": bf16([0x3F80], ())}, {"w": bf16([0x3F81], ())}


def _unchanged(rng: np.random.Generator) -> Pair:
    base = {"w": weights(rng, (9, 9)), "one": bf16([1])}
    return base, dict(base)


def _empty(rng: np.random.Generator) -> Pair:
    empty = {"none": bf16([]), "rows": bf16([], (0, 4)), "columns": bf16([], (4, 0))}
    tensor = weights(rng, (8,))
    return {**empty, "w": tensor}, {**empty, "w": stepped(rng, tensor, 0.5)}


def _other_dtypes(rng: np.random.Generator) -> Pair:
    base, new = {}, {}
    for dtype, width in [
        ("F32", 4),
        ("F16", 2),
        ("F8_E4M3", 1),
        ("I64", 8),
        ("U8", 1),
        ("BOOL", 1),
    ]:
        bits = rng.integers(0, 2, (40, width)).astype(np.uint8)
        base[dtype] = as_tensor(dtype, (4, 10), bits)
        new[dtype] = as_tensor(dtype, (4, 10), bits ^ (rng.random(bits.shape) < 0.1))
    packed = rng.integers(0, 256, 20).astype(np.uint8)
    base["F4"] = as_tensor("F4", (4, 10), packed)
    new["F4"] = as_tensor("F4", (4, 10), packed ^ np.uint8(3))
    return base, new


PAIRS: dict[str, Callable[[np.random.Generator], Pair]] = {
    "sparse": _sparse,
    "first_changed": lambda rng: _one_change(rng, 0),
    "last_changed": lambda rng: _one_change(rng, -1),
    "all_changed": _all_changed,
    "random_bits": _random_bits,
    "nan_and_negative_zero": _odd_floats,
    "scalar": _scalar,
    "unchanged": _unchanged,
    "empty": _empty,
    "other_dtypes": _other_dtypes,
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Base and new of each corner in turn, the same ones on every run."""
    return PAIRS[request.param](np.random.default_rng(7))


@pytest.fixture
def sparse_pair() -> Pair:
    """Base and new of an ordinary step."""
    return _sparse(np.random.default_rng(7))
