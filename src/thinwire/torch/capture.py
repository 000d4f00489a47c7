"""Comparing a model with the last committed version, while training stands still."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from thinwire.codec import _native
from thinwire.codec.digest import xxh3_64
from thinwire.errors import TensorMismatch
from thinwire.publish.baseline import Baseline, Region
from thinwire.publish.staging import Found, Staging
from thinwire.torch.state import Source, dtype_name

# Elements compared at a time: with their rounded copy and the baseline they fit a core's cache.
RUN_WORDS = 1 << 17
# Above this share of changes a run is kept whole: a change takes four bytes more than its word.
_WHOLE_ABOVE = 1 / 4


class Capture:
    """Reads tensors into a rank's baseline, or notes where they differ from it.

    What is compared are the bits of ``tensor.to(dtype)``. FP32 weights published as BF16 are
    rounded by a kernel of our own, to nearest even as torch does; a run with a NaN in it is rounded
    by torch itself, since the bits of a NaN depend on the instructions that torch uses.

    Args:
        baseline: The baseline.
    """

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._positions = np.empty(RUN_WORDS, np.uint32)
        self._words = np.empty(RUN_WORDS * 8, np.uint8)
        spreads = baseline.plan.spreads
        self._regions: dict[str, list[Region]] = {}
        for region in baseline.regions():
            self._regions.setdefault(spreads[region.unit.tensor].name, []).append(region)
        self._spreads = {spread.name: spread for spread in spreads}
        self._parts = {
            spread.name: part
            for spread in spreads
            for part, ranks in zip(spread.parts, spread.holders, strict=True)
            if baseline.rank in ranks
        }

    @torch.no_grad()
    def fill(self, sources: Iterable[Source]) -> None:
        """Make the tensors the baseline.

        Raises:
            TensorMismatch: They are not the tensors that were planned for.
        """
        for region, start, _, run in self._runs(sources):
            at = start * run.word_bytes
            words = run.words()
            region.baseline[at : at + words.size] = words

    @torch.no_grad()
    def diff(self, sources: Iterable[Source], staging: Staging) -> int:
        """Note what differs from the baseline; returns how many words do.

        Each tensor is done with before the next one is drawn.

        Raises:
            TensorMismatch: They are not the tensors that were planned for.
        """
        changed = 0
        place_of = self._baseline.plan.place_of
        for region, start, count, run in self._runs(sources):
            at = start * run.word_bytes
            base = region.baseline[at : at + count * run.word_bytes]
            found = run.compare(base, self._positions, self._words)
            if not found:
                continue
            changed += found
            if found > count * _WHOLE_ABOVE:
                staging.add(place_of(region.unit), Found(start, None, run.words().copy()))
            else:
                positions = self._positions[:found].copy()
                words = self._words[: found * run.word_bytes].copy()
                staging.add(place_of(region.unit), Found(start, positions, words))
        return changed

    def _runs(self, sources: Iterable[Source]) -> Iterator[tuple[Region, int, int, _Run]]:
        """What is captured here, run by run: where a run begins in its region, and its length."""
        missing = set(self._parts)
        for source in sources:
            self._check(source)
            if source.held is None or source.name not in self._parts:
                continue
            if source.name not in missing:
                raise _changed(source.name, "came twice")
            missing.remove(source.name)
            flat = _flat(source.tensor)
            dtype = torch.float32 if source.dtype.is_complex else source.dtype
            word_bytes = self._spreads[source.name].word_bytes
            for region in self._regions.get(source.name, ()):
                for start in range(region.source.start, region.source.stop, RUN_WORDS):
                    stop = min(start + RUN_WORDS, region.source.stop)
                    run = _Run(flat[start:stop], dtype, word_bytes)
                    yield region, start - region.source.start, stop - start, run
        for name in sorted(missing):
            raise _changed(name, "is missing")

    def _check(self, source: Source) -> None:
        spread = self._spreads.get(source.name)
        if spread is None:
            raise _changed(source.name, "is new")
        expected = self._parts.get(source.name)
        held = source.held
        if held is not None and held.size == 0 and expected is None:
            return
        if held != expected or dtype_name(source.dtype) != spread.dtype:
            raise _changed(source.name, "has another dtype, shape or sharding")


class _Run:
    """Some elements of a flat tensor, to be published in a dtype."""

    def __init__(self, elements: torch.Tensor, dtype: torch.dtype, word_bytes: int) -> None:
        self._elements = elements
        self._dtype = dtype
        self.word_bytes = word_bytes

    def words(self) -> np.ndarray:
        """Their bits in that dtype."""
        return _bits(self._elements.to(self._dtype))

    def compare(self, base: np.ndarray, positions: np.ndarray, words: np.ndarray) -> int:
        """How many differ from ``base``; where, and their new bits, go to the front of the rest."""
        elements = self._elements
        is_rounded = self._dtype == torch.bfloat16 and elements.dtype == torch.float32
        if is_rounded and elements.device.type == "cpu":
            found = _native.find_rounded_changes(base, elements.numpy(), positions, words)
            if found is not None:
                return found
        return _native.find_changes(base, self.words(), self.word_bytes, positions, words)


def check_replicas(baseline: Baseline, digests: Sequence[Mapping[str, int]]) -> None:
    """Raise unless ranks that hold the same part of a tensor hold the same weights.

    Args:
        baseline: Of any rank.
        digests: What :func:`replica_digests` found, by rank.

    Raises:
        TensorMismatch: They do not: the tensor is something else than what it looks like.
    """
    for spread in baseline.plan.spreads:
        for ranks in spread.holders:
            for rank in ranks[1:]:
                if digests[rank].get(spread.name) != digests[ranks[0]].get(spread.name):
                    raise TensorMismatch(
                        f"tensor {spread.name!r} is on ranks {ranks[0]} and {rank}, with other "
                        "weights on each",
                        hint="Ranks that hold different parts of a tensor must publish DTensors, "
                        "which say what part that is; replicas must be kept equal",
                        tensor=spread.name,
                    )


def replica_digests(baseline: Baseline, sources: Sequence[Source]) -> dict[str, int]:
    """A digest of each tensor of which other ranks hold the same part."""
    shared = {
        spread.name
        for spread in baseline.plan.spreads
        if any(len(ranks) > 1 and baseline.rank in ranks for ranks in spread.holders)
    }
    return {
        source.name: xxh3_64(_bits(source.tensor.to(source.dtype).contiguous().reshape(-1)))
        for source in sources
        if source.name in shared and source.held is not None
    }


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in order; a view where they lie so, else a copy."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    # A tensor in a file may begin at any byte; the kernels read words.
    return flat.clone() if flat.data_ptr() % flat.element_size() else flat


def _bits(tensor: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return bits


def _changed(name: str, reason: str) -> TensorMismatch:
    return TensorMismatch(
        f"tensor {name!r} {reason} since the publisher was opened",
        hint="Publish the same tensors each time; open another publisher after changing the model",
        tensor=name,
    )
