"""Changes as positions and values: what TRL's, grail's and NeMo-RL's deltas share.

A position counts elements of the flat tensor. All three systems write them in rising order, and
none may come twice: what breaks that is refused, as the last of two values would win by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.dtypes import dtype_named
from thinwire.errors import FormatError, TensorMismatch, Unsupported
from thinwire.interop.foreign import rule_broken

Words: TypeAlias = npt.NDArray[Any]
"""Unsigned integers, one per element: its bits."""

Positions: TypeAlias = npt.NDArray[np.integer[Any]]

RUN = 1 << 20
"""Changes that are decoded at a time."""

_SHOWN_CHARS = 200


def words_of(tensor: StoredTensor) -> Words:
    """A tensor's elements as their bits; no copy is made.

    Raises:
        Unsupported: Its elements are packed, several in a byte: they have no bytes of their own.
    """
    bits = dtype_named(tensor.dtype).bits
    if bits < 8:
        raise Unsupported(
            f"elements of {tensor.dtype} are packed: formats of positions and values have no"
            " place for them",
            hint="Write full weights for this version, or another format",
            dtype=tensor.dtype,
        )
    word = np.dtype(f"<u{bits // 8}")
    return tensor.data.view(word) if tensor.data.size else np.empty(0, word)


def changed_positions(old: StoredTensor, new: StoredTensor) -> Positions:
    """Where the bits of two tensors of one dtype and shape differ, rising.

    Raises:
        Unsupported: As :func:`words_of`.
    """
    return np.flatnonzero(words_of(old) != words_of(new))


def to_gaps(positions: Positions) -> Positions:
    """How many unchanged elements lie before each change, since the one before it."""
    return np.diff(positions, prepend=-1) - 1


def positions_of_gaps(gaps: Words) -> Iterator[Positions]:
    """Inverse of :func:`to_gaps`, a run at a time; hostile gaps give positions that do not rise.

    Put each run to use, and so to the test, before the next one is asked for.
    """
    first = 0
    for start in range(0, gaps.size, RUN):
        # A gap beyond 63 bits comes out negative, and a sum beyond them wraps: such positions are
        # not a tensor's, or do not rise.
        positions = np.cumsum(gaps[start : start + RUN], dtype=np.int64)
        positions += np.arange(first, first + positions.size)
        first = int(positions[-1]) + 1
        yield positions


class NewWords:
    """A base's words, and the changes as they come: rising, and inside of the tensor.

    Args:
        system: Whose rules the changes follow, for messages.
        file: Where they come from.
        name: Of which tensor.
        base: What it was before; only read.
    """

    def __init__(self, system: str, file: object, name: str, base: StoredTensor) -> None:
        self._system, self._file, self._name = system, file, name
        self._base = base
        self._words = words_of(base).copy()
        self._last = -1

    def put(self, positions: Positions, values: Words) -> None:
        """New values, at positions beyond all those before.

        Raises:
            Corrupt: A position does not rise, or is not one of the tensor's.
        """
        self._check(positions)
        self._words[positions] = values

    def flip(self, positions: Positions, bits: Words) -> None:
        """Bits to flip, at positions beyond all those before; errors as :meth:`put`."""
        self._check(positions)
        self._words[positions] ^= bits

    def finish(self) -> StoredTensor:
        """The new tensor."""
        data = self._words.view(np.uint8)
        data.flags.writeable = False
        return StoredTensor(self._base.dtype, self._base.shape, data)

    def _check(self, positions: Positions) -> None:
        if positions.size == 0:
            return
        # The ends alone do not do: a sum that wrapped may come back between them.
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self._words.size:
            outside = low if low < 0 else high
            raise self._fault(
                f"the position {outside} is not one of its {self._words.size} elements"
            )
        if int(positions[0]) <= self._last or not bool((np.diff(positions) > 0).all()):
            raise self._fault("its positions do not rise")
        self._last = int(positions[-1])

    def _fault(self, rule: str) -> FormatError:
        return rule_broken(self._system, rule, file=self._file, tensor=self._name)


def check_fits(
    system: str, file: object, name: str, said: tuple[str, tuple[int, ...]], base: StoredTensor
) -> None:
    """Compare the dtype and shape that a delta says with the base's.

    Raises:
        TensorMismatch: They differ.
    """
    if said != (base.dtype, base.shape):
        raise TensorMismatch(
            f"{file}: tensor {name[:_SHOWN_CHARS]!r} is {said[0]} {list(said[1])[:8]}, and the"
            f" base's is {base.dtype} {list(base.shape)[:8]} ({system} format)",
            hint="Give the checkpoint that the delta was made from",
            tensor=name,
            file=str(file),
        )
