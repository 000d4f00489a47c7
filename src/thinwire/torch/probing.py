"""Finds an index map by asking the engine's own loader: probe tensors that spell their own index.

Every element of the checkpoint gets a number. Its digits are loaded one after another, a pass for
each, as values that no loader rounds or refuses: finite, normal and positive. What the parameters
then hold, read back, says which element went where. Digits of even and odd passes come from
disjoint ranges, so what a pass did not write is told from what it wrote; what was written and
spells no digit was transformed by the loader, and its parameter is refused. A loader that scales
may turn one digit into another: so one more pass loads what spells nothing, and every parameter
must then hold it where the digits said.

The method was tried on vLLM for the design of this project; nobody published it before, as far as
we know.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thinwire.errors import EngineError
from thinwire.torch.dtypes import torch_dtype
from thinwire.torch.index_map import IndexMap, Int64s, find_runs, fold_runs, join_runs
from thinwire.torch.live import Parameter
from thinwire.torch.scatter import LiveModel

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Catalog = Mapping[str, tuple[str, tuple[int, ...]]]
Codes = npt.NDArray[np.signedinteger[Any]]

# Elements looked at at a time: a piece and what is computed from it stay in cache.
_PIECE = 1 << 17
# Up to here, what a pass read is kept in memory; beyond, in an unlinked file.
_IN_MEMORY_BYTES = 1 << 30
# A map may take this share of a parameter's bytes; a parameter that needs more is refused.
_MAX_TABLE_SHARE = 1 / 16
_MIN_TABLE_BYTES = 1 << 14
# What the last pass loads repeats after so many elements, a prime: no layout moves by that.
_CHECK_PERIOD = 65_521
_TRANSFORMS = "the loader transforms what it writes to it"


class Alphabet(NamedTuple):
    """The digits of a family of dtypes, as codes in one contiguous range.

    Attributes:
        lowest: The first code.
        even: How many digits there are in even passes; a power of two.
        odd: How many follow them for odd passes.
    """

    lowest: int
    even: int
    odd: int

    def range_of(self, number: int) -> tuple[int, int]:
        """The first code of a pass, and how many it has."""
        return (self.lowest, self.even) if number % 2 == 0 else (self.lowest + self.even, self.odd)


# Codes of floats are the bits of a BF16. The wide alphabet is every positive normal number. The
# narrow one is what BF16, F16 and F32 hold exactly: exponents from -14 to 15.
WIDE = Alphabet(0x0080, 1 << 14, (1 << 15) - (1 << 14) - 256)
NARROW = Alphabet((127 - 14) << 7, 1 << 11, 30 * 128 - (1 << 11))
_E4M3 = Alphabet(0x08, 64, 54)
_E5M2 = Alphabet(0x04, 64, 56)
_BYTE = Alphabet(0, 64, 64)
_WORD = Alphabet(0, 1 << 14, 1 << 14)

_FLOATS = ("BF16", "F16", "F32")
_ALPHABETS = {
    "F8_E4M3": _E4M3,
    "F8_E5M2": _E5M2,
    "I8": _BYTE,
    "U8": _BYTE,
    "I32": _WORD,
    "I64": _WORD,
}


class _Family:
    """Tensors whose elements are numbered together, because their codes can meet in a parameter."""

    def __init__(self, alphabet: Alphabet, tensors: Mapping[str, tuple[int, str, int]]) -> None:
        self.alphabet = alphabet
        self._tensors = tensors  # number, dtype and element count by name
        # Numbers begin at a multiple of the first digit's base: so the other digits are the same
        # for a whole block. A gap keeps the last of one tensor from the first of the next.
        self._first_block: dict[str, int] = {}
        block = 0
        for name, (_, _, count) in tensors.items():
            self._first_block[name] = block
            block += count // alphabet.even + 1
        self.pass_count = 1
        reach = 1
        while reach < block or self.pass_count < 2:
            reach *= self.alphabet.range_of(self.pass_count)[1]
            self.pass_count += 1
        self._firsts = np.array(list(self._first_block.values()), np.int64) * alphabet.even
        self._owners = np.array([number for number, _, _ in tensors.values()], np.int64)

    def codes(self, name: str, number: int) -> Codes:
        """What a tensor holds in a pass."""
        count = self._tensors[name][2]
        alphabet = self.alphabet
        first, _ = alphabet.range_of(number)
        if number == 0:
            ramp = np.arange(first, first + alphabet.even, dtype=np.int32)
            return np.resize(ramp, count)
        block_count = -(-count // alphabet.even)
        blocks = self._first_block[name] + np.arange(block_count, dtype=np.int64)
        for earlier in range(1, number):
            blocks //= alphabet.range_of(earlier)[1]
        digits = (blocks % alphabet.range_of(number)[1] + first).astype(np.int32)
        return np.repeat(digits, alphabet.even)[:count]

    def numbers(self, codes: list[Codes]) -> Int64s:
        """The elements that codes, one array for each pass, spell; -1 where they spell none."""
        is_digit = np.ones(codes[0].shape, bool)
        found = np.zeros(codes[0].shape, np.int64)
        scale = 1
        for number in range(self.pass_count):
            first, count = self.alphabet.range_of(number)
            digit = codes[number] - first
            is_digit &= (digit >= 0) & (digit < count)
            found += digit * scale
            scale *= count
        found[~is_digit] = -1
        return found

    def owners(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """The tensors that numbers belong to, and the elements in them."""
        at = np.searchsorted(self._firsts, numbers, side="right") - 1
        return self._owners[at], numbers - self._firsts[at]

    def counts(self) -> Int64s:
        """Elements of the tensors, in order."""
        return np.array([count for _, _, count in self._tensors.values()], np.int64)


class Prober:
    """Probes one model.

    Args:
        parameters: The engine's parameters by name.
        catalog: Dtype and shape of the checkpoint's tensors, in the order in which they are loaded.
        load: The engine's own loader. It is called once a pass with every tensor.
        scratch: A folder for what a pass read, where memory is not enough.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        catalog: Catalog,
        load: Load,
        scratch: Path | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._catalog = dict(catalog)
        self._load = load
        self._scratch = scratch
        self._refused: dict[str, str] = {}
        self._kept_bytes = 0
        self._families = self._make_families()

    def find(self) -> IndexMap:
        """Load the probes and make the map. The parameters hold probes afterwards: restore them.

        Raises:
            EngineError: The loader failed, or there is nothing that can be probed.
        """
        if not self._families:
            raise EngineError("no tensor of the checkpoint has a dtype that can be probed")
        kept: list[dict[str, np.ndarray]] = []
        pass_count = max(family.pass_count for family in self._families.values())
        for number in range(pass_count):
            self._load_all(self._probes(number))
            if number + 1 < pass_count:
                kept.append(
                    {name: self._keep(parameter) for name, parameter in self._parameters.items()}
                )
        rows = [np.empty((0, 9), np.int64)]
        for number, (name, parameter) in enumerate(self._parameters.items()):
            found = self._runs(number, name, parameter, [words.pop(name) for words in kept])
            if found is not None:
                rows.append(found)
        tensors = {name: (dtype, _count(shape)) for name, (dtype, shape) in self._catalog.items()}
        places = {
            name: (parameter.dtype, parameter.count) for name, parameter in self._parameters.items()
        }
        return self._checked(IndexMap(tensors, places, np.concatenate(rows), self._refused))

    def _checked(self, index_map: IndexMap) -> IndexMap:
        """The map without the parameters that do not hold what it says."""
        # Rounded to integers, tiny values are all alike; those that come now are not.
        placed = {index_map.parameter_name(number) for number in set(index_map.runs[:, 1].tolist())}
        others = {
            name: self._keep(parameter)
            for name, parameter in self._parameters.items()
            if name not in placed and name not in self._refused
        }
        self._load_all(self._checks())
        wrong = {
            name
            for name, before in others.items()
            if any((a != b).any() for a, b in _pieces(before, self._parameters[name].words()))
        }
        live = LiveModel(self._parameters, index_map)
        for name, value in self._checks():
            if value.numel():
                size = value.element_size()
                words = value.reshape(-1).view(torch.uint8).numpy().view(f"u{size}")
                wrong |= live.differing_parameters(name, words)
        return index_map.without(dict.fromkeys(wrong, _TRANSFORMS)) if wrong else index_map

    def _checks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Values that follow no rule which a loader could know."""
        noise = np.random.default_rng(0x7417).permutation(_CHECK_PERIOD)
        for number, (name, (dtype, shape)) in enumerate(self._catalog.items()):
            family = self._families.get("float" if dtype in _FLOATS else dtype)
            if family is not None:
                low, even, odd = family.alphabet
                table = (low + noise % (even + odd)).astype(np.int32)
                codes = np.resize(np.roll(table, -12_289 * number), _count(shape))
                yield name, _as_tensor(codes, dtype).reshape(shape)

    def _make_families(self) -> dict[str, _Family]:
        numbers = {name: number for number, name in enumerate(self._catalog)}
        is_narrow = any(p.dtype == "F16" for p in self._parameters.values()) or any(
            dtype == "F16" for dtype, _ in self._catalog.values()
        )
        floats = NARROW if is_narrow else WIDE
        members: dict[str, dict[str, tuple[int, str, int]]] = {}
        for name, (dtype, shape) in self._catalog.items():
            if can_probe(dtype):
                key = "float" if dtype in _FLOATS else dtype
                members.setdefault(key, {})[name] = (numbers[name], dtype, _count(shape))
        return {
            key: _Family(floats if key == "float" else _ALPHABETS[key], tensors)
            for key, tensors in members.items()
        }

    def _load_all(self, probes: Iterator[tuple[str, torch.Tensor]]) -> None:
        try:
            with torch.no_grad():
                self._load(probes)
        except Exception as error:
            raise EngineError(
                f"the engine's loader failed on a probe: {type(error).__name__}: {error}"[:500]
            ) from error

    def _probes(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape) in self._catalog.items():
            family = self._families.get("float" if dtype in _FLOATS else dtype)
            if family is None:
                continue
            codes = family.codes(name, min(number, family.pass_count - 1))
            yield name, _as_tensor(codes, dtype).reshape(shape)

    def _keep(self, parameter: Parameter) -> np.ndarray:
        words = parameter.words()
        self._kept_bytes += words.nbytes
        if self._kept_bytes < _IN_MEMORY_BYTES or self._scratch is None:
            return words.copy()
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            kept = np.memmap(file, words.dtype, "w+", shape=words.shape)
        kept[:] = words
        return kept

    def _runs(
        self, number: int, name: str, parameter: Parameter, before: list[np.ndarray]
    ) -> Int64s | None:
        """The rows of one parameter; None, with a reason kept, where it cannot be placed."""
        family = self._families.get("float" if parameter.dtype in _FLOATS else parameter.dtype)
        last = parameter.words()
        if family is None:
            # Beside each other: digits of every other pass may be the same.
            if any((a != b).any() for a, b in _pieces(before[0], [*before, last][1])):
                self._refused[name] = f"the loader writes {parameter.dtype} to it"
            return None
        # Passes beyond a family's own repeat its last one.
        words = [*before, last][: family.pass_count]
        rows = []
        for start in range(0, parameter.count, _PIECE):
            piece = [array[start : start + _PIECE] for array in words]
            codes = [_codes(part, parameter.dtype) for part in piece]
            ids = family.numbers(codes)
            is_written = codes[0] != codes[1]
            if (is_written & (ids < 0)).any():
                self._refused[name] = _TRANSFORMS
                return None
            ids[~is_written] = -1
            rows.append(find_runs(ids, start))
        found = join_runs(np.concatenate(rows)) if rows else np.empty((0, 4), np.int64)
        return self._placed(number, name, parameter, family, _cut(found, family))

    def _placed(
        self, number: int, name: str, parameter: Parameter, family: _Family, found: Int64s
    ) -> Int64s | None:
        if not len(found):
            return np.empty((0, 9), np.int64)
        owners, inside = family.owners(found[:, 1])
        last = inside + (found[:, 3] - 1) * found[:, 2]
        counts = np.zeros(len(self._catalog), np.int64)
        counts[family._owners] = family.counts()
        if (inside < 0).any() or (last >= counts[owners]).any():
            self._refused[name] = _TRANSFORMS
            return None
        rows = []
        # Runs of different tensors are never folded into one.
        edges = np.flatnonzero(np.diff(owners)) + 1
        for part in np.split(np.arange(len(found)), edges):
            folded = fold_runs(found[part])
            ids, start, length, step, repeat, id_jump, jump = folded.T
            owner = np.full(len(folded), owners[part[0]])
            source = family.owners(ids)[1]
            holder = np.full(len(folded), number)
            rows.append(
                np.stack(
                    [owner, holder, source, start, length, step, repeat, id_jump, jump], axis=1
                )
            )
        table = np.concatenate(rows)
        if table.nbytes > max(_MIN_TABLE_BYTES, parameter.byte_count * _MAX_TABLE_SHARE):
            self._refused[name] = f"its elements lie in {len(table)} pieces, which are too many"
            return None
        return table


def can_probe(dtype: str) -> bool:
    """Whether tensors of a dtype can spell their elements."""
    return dtype in _FLOATS or dtype in _ALPHABETS


def _cut(found: Int64s, family: _Family) -> Int64s:
    """Cut runs that reach from one tensor into the next, which numbers alone do not show."""
    if not len(found):
        return found
    last = found[:, 1] + (found[:, 3] - 1) * found[:, 2]
    crossing = family.owners(found[:, 1])[0] != family.owners(last)[0]
    if not crossing.any():
        return found
    rows = [found[~crossing]]
    for start, first, step, length in found[crossing].tolist():
        ids = first + step * np.arange(length, dtype=np.int64)
        owner = family.owners(ids)[0]
        edges = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1, [length]])
        rows.append(
            np.array(
                [[start + a, ids[a], step, b - a] for a, b in pairwise(edges.tolist())],
                np.int64,
            )
        )
    joined = np.concatenate(rows)
    return joined[np.argsort(joined[:, 0], kind="stable")]


def _as_tensor(codes: Codes, dtype: str) -> torch.Tensor:
    """Codes as values of a checkpoint's dtype."""
    if dtype == "BF16":
        return torch.from_numpy(codes.astype(np.int16)).view(torch.bfloat16)
    if dtype in ("F16", "F32"):
        floats = (codes.astype(np.uint32) << 16).view(np.float32)
        return torch.from_numpy(floats).to(torch_dtype(dtype))
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return torch.from_numpy(codes.astype(np.uint8)).view(torch_dtype(dtype))
    return torch.from_numpy(codes.astype({"I8": "i1", "U8": "u1", "I32": "i4", "I64": "i8"}[dtype]))


def _codes(words: np.ndarray, dtype: str) -> Codes:
    """What a parameter's words spell; -1 where they are no value of an alphabet."""
    if dtype == "F16":
        words = words.view(np.float16).astype(np.float32).view(np.uint32)
    if dtype in ("F16", "F32"):
        return np.where(words & 0xFFFF, -1, (words >> 16).astype(np.int32))
    return words.astype(np.int32) if words.dtype.itemsize < 8 else words.view(np.int64)


def _pieces(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, a.size, _PIECE):
        yield a[start : start + _PIECE], b[start : start + _PIECE]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
