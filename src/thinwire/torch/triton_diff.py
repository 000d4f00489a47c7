"""Finding what changed on the GPU, so that only the changes travel to the host.

**None of this has run on a GPU yet**: the kernels ran in Triton's interpreter on the CPU, and
nothing here was tuned.

The last committed words lie on the device, too. New ones are converted by torch into scratch, a
piece at a time, so that they are those of ``tensor.to(dtype)`` on this device to the last NaN bit;
the kernels compare integers only. What differs travels to the host, and stays here as well, until
it is known what became of the version.

Two passes, no atomics, so the result is the same in every run and its positions rise: one counts
per block, torch sums the counts up, the other writes each block's changes to its place. The host
reads one number between them, and then the changes. All of it runs on the current stream, hence
after the step before and ahead of the step to come.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from thinwire.codec.digest import xxh3_64
from thinwire.errors import InvalidArgument
from thinwire.publish.baseline import Region
from thinwire.publish.staging import Found
from thinwire.torch.cuda import Device

if TYPE_CHECKING:
    # Kernels look names up in their module; _kernels() puts it there at run time.
    import triton.language as tl

# Positions are int32, with room to round up to a block.
MAX_WORDS = 1 << 30
# What is compared at once: for words of 2 bytes 32 MiB of scratch, and one wait of the host.
PIECE_WORDS = 1 << 24
# Above this share of changes a run is taken whole: a change takes four bytes more than its word.
WHOLE_ABOVE = 1 / 4
# Of a piece with a greater share of changes these do not stay here: they come from the host again.
KEPT_SHARE = 1 / 8
_BLOCK_WORDS = 2048
# What words of so many bytes are compared as.
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_WHOLE = {torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32}


def why_unavailable() -> str:
    """Why ``find_changes`` cannot run here; empty where it can."""
    try:
        importlib.import_module("triton.language")
    except Exception as error:  # a broken installation fails in its own ways
        return f"Triton cannot be imported: {error or type(error).__name__}"
    if _interprets() or torch.cuda.is_available():
        return ""
    return "there is no CUDA device, and Triton does not interpret (TRITON_INTERPRET=1)"


def find_changes(
    new_words: torch.Tensor, base_words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the new words differ, and the new words there, both on their device.

    Args:
        new_words: Flat and contiguous integers of 1, 2 or 4 bytes, at most ``MAX_WORDS``.
        base_words: What they were; the same dtype, length and device.

    Returns:
        Positions (int32, rising) and words, in the dtype that was given.

    Raises:
        InvalidArgument: The tensors are not as described, or Triton is not available.
    """
    new, base = _comparable(new_words, base_words)
    count, write = _kernels()
    if not (new.is_cuda or _interprets()):
        raise InvalidArgument(f"changes cannot be found on the device: {new.device} is none")
    length = new.numel()
    if length == 0:
        return new.new_empty(0, dtype=torch.int32), new_words[:0]
    block_count = -(-length // _BLOCK_WORDS)
    with torch.cuda.device(new.device) if new.is_cuda else nullcontext():
        counts = torch.empty(block_count, dtype=torch.int32, device=new.device)
        count[(block_count,)](new, base, counts, length, _BLOCK_WORDS)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        changed_count = int(ends[-1].item())
        positions = torch.empty(changed_count, dtype=torch.int32, device=new.device)
        words = torch.empty(changed_count, dtype=new.dtype, device=new.device)
        if changed_count:
            write[(block_count,)](new, base, ends, positions, words, length, _BLOCK_WORDS)
    return positions, words.view(new_words.dtype)


class Part(NamedTuple):
    """What is captured of a unit.

    Attributes:
        place: The unit's place.
        region: Where the last committed words are.
        elements: The new ones, flat, where the tensor lies; not converted yet.
        dtype: What they are published as.
        word_bytes: Of the dtype.
    """

    place: int
    region: Region
    elements: torch.Tensor
    dtype: torch.dtype
    word_bytes: int


class Change(NamedTuple):
    """What differs in a run of a unit, and how many words that are."""

    place: int
    changed_count: int
    found: Found

    @property
    def mark(self) -> tuple[int, ...]:
        """Is equal for the same changes."""
        _, positions, words = self.found
        digest = -1 if positions is None else xxh3_64(positions.view(np.uint8))
        return (self.place, self.changed_count, self.found.start, digest, xxh3_64(words))


class _Kept(NamedTuple):
    """Changes of a piece, on the device."""

    word_bytes: int
    start: int
    positions: torch.Tensor
    words: torch.Tensor


class DeviceWords:
    """The last committed words of some regions, on the device where their tensors lie.

    They come from the host's baseline when they are first compared, and again wherever that moved
    on without them.

    Args:
        device: The device.
        memory: The same, as torch calls it.
        regions: What is captured there, by the unit's place, in words of 1, 2 or 4 bytes.
        run_words: The longest run to hand out.
    """

    def __init__(
        self, device: Device, memory: torch.device, regions: Mapping[int, Region], run_words: int
    ) -> None:
        self._device = device
        self._run_words = run_words
        counts, self._starts = _laid_out(regions)
        longest = max(_length(region) * _width_of(region) for region in regions.values())
        for width, count in counts.items():
            longest = max(longest, min(count, PIECE_WORDS) * width)
        # What is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._scratch = torch.empty(longest, dtype=torch.uint8, device=memory)
            self._bases = {
                width: torch.empty(count, dtype=_SIGNED[width], device=memory)
                for width, count in counts.items()
            }
        # Regions whose words here are those of the host's baseline.
        self._current: set[int] = set()
        # Of the capture that is not settled yet: what need not come from the host again if it is
        # committed, and what differed there.
        self._followed: set[int] = set()
        self._kept: list[_Kept] = []

    def settle(self, is_committed: bool) -> None:
        """The words become those of the last capture, if it was committed."""
        if is_committed:
            for kept in self._kept:
                base = self._bases[kept.word_bytes][kept.start :]
                base.index_copy_(0, kept.positions.long(), kept.words)
            self._current &= self._followed
        self._kept.clear()
        self._followed.clear()

    def pieces(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[Change]]]:
        """What differs, piece by piece, and how many of the parts are done with.

        Args:
            parts: Of regions that were given; those of one word size together, by place, so that
                pieces are long.
        """
        begin = 0
        while begin < len(parts):
            end = begin + 1
            length = _length(parts[begin].region)
            while end < len(parts) and self._follows(parts[end - 1], parts[end]):
                length += _length(parts[end].region)
                if length > PIECE_WORDS:
                    break
                end += 1
            yield end, self._piece(parts[begin:end])
            begin = end

    def _follows(self, one: Part, other: Part) -> bool:
        stop = self._starts[one.place] + _length(one.region)
        return one.word_bytes == other.word_bytes and stop == self._starts[other.place]

    def _piece(self, parts: Sequence[Part]) -> list[Change]:
        """What differs in parts whose words lie one after the other."""
        width, start = parts[0].word_bytes, self._starts[parts[0].place]
        counts = [_length(part.region) for part in parts]
        new = self._scratch[: sum(counts) * width].view(_SIGNED[width])
        base = self._bases[width][start : start + new.numel()]
        stream = self._device.current_stream()
        at = 0
        for part, count in zip(parts, counts, strict=True):
            target = new[at : at + count]
            if part.place not in self._current:
                committed = torch.from_numpy(part.region.baseline).view(target.dtype)
                base[at : at + count].copy_(committed)
                self._current.add(part.place)
            if part.elements.dtype == part.dtype:
                # As words, so that nothing interprets a NaN on the way.
                self._device.copy(target, part.elements.view(target.dtype), stream)
            else:
                self._device.copy(target.view(part.dtype), part.elements, stream)
            at += count
        positions, words = find_changes(new, base)
        if positions.numel() <= new.numel() * KEPT_SHARE:
            self._kept.append(_Kept(width, start, positions, words))
            self._followed.update(part.place for part in parts)
        return self._by_run(parts, new, positions.cpu().numpy(), words.cpu().numpy())

    def _by_run(
        self, parts: Sequence[Part], new: torch.Tensor, positions: np.ndarray, words: np.ndarray
    ) -> list[Change]:
        """The changes of a piece by run, as the host would have found them."""
        runs = []
        at = 0
        for part in parts:
            count = _length(part.region)
            for first in range(0, count, self._run_words):
                stop = min(count, first + self._run_words)
                runs.append((part.place, first, at + first, at + stop))
            at += count
        stops = np.array([stop for _, _, _, stop in runs], np.int32)
        changes = []
        begin = 0
        for (place, first, start, stop), end in zip(
            runs, np.searchsorted(positions, stops).tolist(), strict=True
        ):
            if end - begin > (stop - start) * WHOLE_ABOVE:
                whole = new[start:stop].to("cpu", copy=True).numpy().view(np.uint8)
                found = Found(first, None, whole)
                changes.append(Change(place, end - begin, found))
            elif end > begin:
                local = (positions[begin:end] - np.int32(start)).view(np.uint32)
                found = Found(first, local, words[begin:end].view(np.uint8))
                changes.append(Change(place, end - begin, found))
            begin = end
        return changes


def bytes_needed(regions: Mapping[int, Region]) -> int:
    """What ``DeviceWords`` takes of a device at its peak: words, scratch, changes twice."""
    needed = 0
    for width, count in _laid_out(regions)[0].items():
        piece = min(count, PIECE_WORDS)
        needed += count * width + int(count * KEPT_SHARE) * (4 + width)
        needed += piece * width + piece * (4 + width)
    return needed


def can_hold(region: Region) -> bool:
    """Whether the words are short enough for the kernels."""
    return _width_of(region) in _SIGNED


def _width_of(region: Region) -> int:
    """Bytes of a word."""
    return region.baseline.size // _length(region)


def _laid_out(regions: Mapping[int, Region]) -> tuple[dict[int, int], dict[int, int]]:
    """How many words there are of each size, and where among them a region's begin."""
    counts: dict[int, int] = {}
    starts: dict[int, int] = {}
    for place in sorted(regions):
        width = _width_of(regions[place])
        starts[place] = counts.get(width, 0)
        counts[width] = starts[place] + _length(regions[place])
    return counts, starts


def _length(region: Region) -> int:
    return region.source.stop - region.source.start


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _comparable(
    new_words: torch.Tensor, base_words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as signed integers: equality is all that is asked of them."""
    facts = [(words.shape, words.dtype, words.device) for words in (new_words, base_words)]
    if facts[0] != facts[1]:
        raise InvalidArgument(
            f"new and base words differ in shape, dtype or device: {facts[0]} and {facts[1]}"
        )
    if new_words.dtype not in _WHOLE:
        raise InvalidArgument(f"{new_words.dtype} is not an integer dtype of 1, 2 or 4 bytes")
    if new_words.dim() != 1 or not (new_words.is_contiguous() and base_words.is_contiguous()):
        raise InvalidArgument("the words are not flat and contiguous")
    if new_words.numel() > MAX_WORDS:
        raise InvalidArgument(
            f"{new_words.numel()} words at once, more than {MAX_WORDS}",
            hint="Compare them in pieces",
        )
    signed = _SIGNED[new_words.dtype.itemsize]
    return new_words.view(signed), base_words.view(signed)


@lru_cache(maxsize=1)
def _kernels() -> tuple[Any, Any]:
    """Both kernels, for Triton's compiler or its interpreter, whichever it was imported for."""
    if reason := why_unavailable():
        raise InvalidArgument(f"changes cannot be found on the device: {reason}")
    triton = importlib.import_module("triton")
    globals()["tl"] = importlib.import_module("triton.language")
    return triton.jit(_count), triton.jit(_write)


# Offsets are 32 bits wide: lengths end at MAX_WORDS, and Triton widens them to address bytes.


def _count(
    new: tl.tensor, base: tl.tensor, counts: tl.tensor, length: tl.tensor, block: tl.constexpr
) -> None:
    index = tl.program_id(0)
    at = index * block + tl.arange(0, block)
    inside = at < length
    new_words = tl.load(new + at, mask=inside, other=0)
    differs = new_words != tl.load(base + at, mask=inside, other=0)
    tl.store(counts + index, tl.sum(differs.to(tl.int32), axis=0))


def _write(
    new: tl.tensor,
    base: tl.tensor,
    ends: tl.tensor,
    positions: tl.tensor,
    words: tl.tensor,
    length: tl.tensor,
    block: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    end = tl.load(ends + index)
    first = tl.load(ends + index - 1, mask=index > 0, other=0)
    if end > first:
        at = index * block + tl.arange(0, block)
        inside = at < length
        new_words = tl.load(new + at, mask=inside, other=0)
        differs = new_words != tl.load(base + at, mask=inside, other=0)
        place = first + tl.cumsum(differs.to(tl.int32), axis=0) - 1
        tl.store(positions + place, at, mask=differs)
        tl.store(words + place, new_words, mask=differs)
