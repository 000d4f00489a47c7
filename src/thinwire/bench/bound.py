"""The class-conditional bound: what the changes cost given the exponents of the base weights.

Plug-in entropies of one step, with the probabilities taken from the very data they are charged on
and never paid for. So it is no limit for a coder that uses more context than the exponent, and a
coder that uses just that cannot reach it on small tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinwire.bench.tensors import Checkpoint, Tensor, Words, raw_bytes

# dtype: (exponent bits, mantissa bits). Other dtypes have one class only.
_FLOAT_FIELDS = {
    "BF16": (8, 7),
    "F16": (5, 10),
    "F32": (8, 23),
    "F64": (11, 52),
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
}


@dataclass(frozen=True)
class Bound:
    """The parts of the bound in bits, summed over tensors.

    ``positions_bits``: which elements changed, given the class. ``direction_bits``: the sign of
    each step, one probability per tensor. ``size_bits``: its length in ordered bits, given the
    class.
    """

    positions_bits: float
    direction_bits: float
    size_bits: float
    raw_bytes: int

    @property
    def total_bits(self) -> float:
        """All three parts."""
        return self.positions_bits + self.direction_bits + self.size_bits

    @property
    def payload_bytes(self) -> int:
        """The total, rounded up to whole bytes."""
        return int(np.ceil(self.total_bits / 8))

    def percent(self, part_bits: float) -> float:
        """A number of bits as a share of the raw bytes, in %."""
        return 100 * part_bits / (8 * self.raw_bytes) if self.raw_bytes else 0.0


def ordered_bits(words: Words, dtype: str) -> Words:
    """Words whose unsigned order is the order of the values.

    Floats: negative ones have all bits flipped, the others their sign bit. Other dtypes keep their
    bits.
    """
    if dtype not in _FLOAT_FIELDS:
        return words
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    negative = (words & sign) != 0
    return np.where(negative, ~words, words | sign)


def class_of(words: Words, dtype: str) -> npt.NDArray[np.intp]:
    """The exponent field of each word; 0 for dtypes without one."""
    if dtype not in _FLOAT_FIELDS:
        return np.zeros(words.size, np.intp)
    exponent_bits, mantissa_bits = _FLOAT_FIELDS[dtype]
    shifted = words >> words.dtype.type(mantissa_bits)
    classes: npt.NDArray[np.intp] = shifted & words.dtype.type((1 << exponent_bits) - 1)
    return classes.astype(np.intp)


def bound_of_tensor(base: Tensor, new: Tensor) -> Bound:
    """The bound for one tensor; both must have the same dtype and shape."""
    classes = class_of(base.words, base.dtype)
    changed = np.flatnonzero(base.words != new.words)
    changed_classes = classes[changed]
    totals = np.bincount(classes)
    hits = np.bincount(changed_classes, minlength=totals.size)
    positions_bits = float(np.sum(_binary_entropy_bits(hits, totals)))

    # Unsigned subtraction wraps, so the step is a signed distance modulo the word size.
    step = ordered_bits(new.words[changed], new.dtype) - ordered_bits(
        base.words[changed], base.dtype
    )
    down = step >> step.dtype.type(8 * step.itemsize - 1) != 0
    size = np.where(down, np.negative(step), step)
    direction_bits = _binary_entropy_bits(np.array([np.count_nonzero(down)]), np.array([step.size]))
    return Bound(
        positions_bits=positions_bits,
        direction_bits=float(direction_bits[0]),
        size_bits=_conditional_entropy_bits(size, changed_classes),
        raw_bytes=new.words.nbytes,
    )


def class_bound(base: Checkpoint, new: Checkpoint) -> Bound:
    """The bound summed over all tensors of two checkpoints of the same layout."""
    parts = [bound_of_tensor(base[name], tensor) for name, tensor in new.items()]
    return Bound(
        positions_bits=sum(part.positions_bits for part in parts),
        direction_bits=sum(part.direction_bits for part in parts),
        size_bits=sum(part.size_bits for part in parts),
        raw_bytes=raw_bytes(new),
    )


def _binary_entropy_bits(
    hits: npt.NDArray[np.intp], totals: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """Bits to tell, for each class, which of its ``totals`` draws are ``hits``."""
    misses = totals - hits
    return _log_count(totals) - _log_count(hits) - _log_count(misses)


def _conditional_entropy_bits(symbols: Words, contexts: npt.NDArray[np.intp]) -> float:
    """Bits to tell all ``symbols`` given their ``contexts``: joint minus context counts."""
    if symbols.size == 0:
        return 0.0
    order = np.lexsort((symbols, contexts))
    symbols, contexts = symbols[order], contexts[order]
    is_first = np.ones(symbols.size, bool)
    is_first[1:] = (symbols[1:] != symbols[:-1]) | (contexts[1:] != contexts[:-1])
    joint_counts = np.diff(np.flatnonzero(is_first), append=symbols.size)
    context_counts = np.bincount(contexts)
    return float(np.sum(_log_count(context_counts)) - np.sum(_log_count(joint_counts)))


def _log_count(counts: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """The product n log2 n of each count, with 0 for n = 0."""
    return np.where(counts > 0, counts * np.log2(np.maximum(counts, 1)), 0.0)
