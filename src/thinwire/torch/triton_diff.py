"""Finding what changed on the GPU, so that only the changes travel to the host.

**None of this has run on a GPU yet**: the kernels ran in Triton's interpreter on the CPU, and
nothing here was tuned. It needs the baseline (the last committed words) on the device: as many
bytes as are published. Weights that are not in the published dtype are converted by torch, a piece
at a time into scratch, so that the words are those of ``tensor.to(dtype)`` on this device to the
last NaN bit; the kernels compare integers only.

Two passes, no atomics, so the result is the same in every run and its positions rise: one counts
per block, torch sums the counts up, the other writes each block's changes to its place. The host
reads one number between them, and then the changes. All of it runs on the current stream, hence
after the step before and ahead of the step to come: it needs no guard.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    # Kernels look names up in their module; _kernels() puts it there at run time.
    import triton.language as tl

# Positions are int32, with room to round up to a block.
MAX_WORDS = 1 << 30
# 64 MiB of scratch for 2-byte words, and one wait of the host per 32 million words.
PIECE_WORDS = 1 << 25
RUN_WORDS = 1 << 18
MIN_GAIN = 1.25
MAX_SHARE = 0.5
_BLOCK_WORDS = 2048
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


def is_available() -> bool:
    """Whether ``find_changes`` can run here; ``why_unavailable`` says what is missing."""
    return not why_unavailable()


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


def find_changes_reference(
    new_words: torch.Tensor, base_words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``find_changes`` returns, by torch alone."""
    new, base = _comparable(new_words, base_words)
    positions = torch.nonzero(new != base).reshape(-1)
    return positions.to(torch.int32), new[positions].view(new_words.dtype)


def words_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The integers whose bits are ``tensor.to(dtype)``; a view where nothing is converted.

    Raises:
        InvalidArgument: The words are not 1, 2 or 4 bytes long.
    """
    if dtype.itemsize not in _SIGNED:
        raise InvalidArgument(f"{dtype} has words of {dtype.itemsize} bytes, not 1, 2 or 4")
    return tensor.detach().to(dtype).view(_SIGNED[dtype.itemsize])


def changed_runs(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    base_words: torch.Tensor,
    *,
    run_words: int = RUN_WORDS,
    piece_words: int = PIECE_WORDS,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """What differs in a flat tensor of any length, on the host, run by run, but for runs without.

    A piece at a time is converted, compared and fetched: beside the baseline that takes device
    memory for one piece's words and its changes (at worst 4 bytes and a word for each of them).

    Args:
        tensor: Flat and contiguous, on the device.
        dtype: What is published.
        base_words: The last committed words, as ``words_of`` gives them, on the device.
        run_words: Runs begin at multiples of this.
        piece_words: What is compared at once; a multiple of ``run_words``.

    Yields:
        The run's first word, the positions relative to it (uint32, rising), the new words (uint8,
        as many bytes for each as the dtype has).

    Raises:
        InvalidArgument: The tensors do not fit together, or Triton is not available.
    """
    if run_words < 1 or piece_words < 1 or piece_words % run_words or piece_words > MAX_WORDS:
        raise InvalidArgument(
            f"piece_words={piece_words} is not a multiple of run_words={run_words} up to "
            f"{MAX_WORDS}"
        )
    if tensor.dim() != 1 or tensor.shape != base_words.shape:
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} and a baseline of "
            f"{tuple(base_words.shape)} are not equally long and flat"
        )
    for piece in range(0, tensor.numel(), piece_words):
        stop = min(tensor.numel(), piece + piece_words)
        new_words = words_of(tensor[piece:stop], dtype)
        found = find_changes(new_words, base_words[piece:stop])
        positions = found[0].cpu().numpy().view(np.uint32)
        words = found[1].cpu().numpy().view(np.uint8)
        yield from _split(piece, positions, words, dtype.itemsize, stop - piece, run_words)


class Choice(NamedTuple):
    """Which way to capture, and why."""

    way: Literal["device", "host"]
    reason: str


def device_bytes(published_bytes: int, word_bytes: int, *, piece_words: int = PIECE_WORDS) -> int:
    """What the device way holds at its peak: the baseline, a piece's words, all of them changed."""
    piece_bytes = min(published_bytes, piece_words * word_bytes)
    return published_bytes + 2 * piece_bytes + 4 * (piece_bytes // word_bytes)


def fits(*, free_bytes: int, needed_bytes: int) -> bool:
    """Whether the device way leaves the training enough memory to be tried at all.

    Args:
        free_bytes: Device memory that the training does not use at its peak, without the baseline.
        needed_bytes: See ``device_bytes``.
    """
    return needed_bytes <= free_bytes * MAX_SHARE


def choose(
    *,
    host_s: float,
    device_s: float | None,
    free_bytes: int,
    needed_bytes: int,
) -> Choice:
    """Whether changes are found on the device from now on, from one measurement of either way.

    The host way copies every word through pinned memory and compares there; the device way compares
    where the words are and moves changes only, for as much device memory again as is published. It
    is chosen where it was ``MIN_GAIN`` times faster, which is more than chance explains, and takes
    at most ``MAX_SHARE`` of the free memory: too slow a capture is a nuisance, a step out of memory
    the run's end. Where it does not fit (``fits``), it need not be measured.

    Args:
        host_s: Seconds that the capture stopped the training for, the host way.
        device_s: The same for the same weights, the device way; None: not measured, or failed.
        free_bytes: As for ``fits``.
        needed_bytes: As for ``fits``.
    """
    if not fits(free_bytes=free_bytes, needed_bytes=needed_bytes):
        return Choice(
            "host",
            f"the device way needs {needed_bytes} bytes, more than {MAX_SHARE:.0%} of the "
            f"{free_bytes} that are free",
        )
    if device_s is None:
        return Choice("host", "the device way was not measured")
    if not (0 < host_s < math.inf and 0 < device_s < math.inf):
        return Choice("host", f"{host_s} s and {device_s} s are no measurement")
    gain = host_s / device_s
    facts = f"{device_s:.4g} s on the device, {host_s:.4g} s through the host"
    if gain < MIN_GAIN:
        return Choice("host", f"{facts}: not {MIN_GAIN:g} times faster")
    return Choice("device", f"{facts}: {gain:.3g} times faster")


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
            hint="Compare them in pieces, as changed_runs does",
        )
    signed = _SIGNED[new_words.dtype.itemsize]
    return new_words.view(signed), base_words.view(signed)


def _split(
    first: int,
    positions: np.ndarray,
    words: np.ndarray,
    word_bytes: int,
    length: int,
    run_words: int,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The changes of a piece, by run."""
    starts = np.arange(0, length, run_words, dtype=np.int64)
    edges = np.append(np.searchsorted(positions, starts), positions.size)
    for start, begin, end in zip(starts.tolist(), edges[:-1], edges[1:], strict=True):
        if begin < end:
            yield (
                first + start,
                positions[begin:end] - np.uint32(start),
                words[begin * word_bytes : end * word_bytes],
            )


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
