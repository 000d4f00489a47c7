"""Comparing a model with the last committed version, while training stands still."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np
import torch

from thinwire.codec import _native
from thinwire.codec.digest import combine, xxh3_64
from thinwire.errors import InvalidArgument, TensorMismatch, ThinwireError
from thinwire.publish.baseline import Baseline, Region
from thinwire.publish.staging import Found, Staging
from thinwire.torch import cuda
from thinwire.torch.cuda import Device, StreamedCapture
from thinwire.torch.device_diff import DeviceDiff, DeviceDiffMode
from thinwire.torch.dtypes import dtype_name
from thinwire.torch.state import Source, pieces_of
from thinwire.torch.triton_diff import (
    WHOLE_ABOVE,
    Change,
    Part,
    bytes_needed,
    can_hold,
    why_unavailable,
)

# Elements compared at a time: with their rounded copy and the baseline they fit a core's cache.
RUN_WORDS = 1 << 17


class Capture:
    """Reads tensors into a rank's baseline, or notes where they differ from it.

    What is compared are the bits of ``tensor.to(dtype)``. FP32 weights published as BF16 are
    rounded by a kernel of our own, to nearest even as torch does; a run with a NaN in it is rounded
    by torch itself, since the bits of a NaN depend on the instructions that torch uses.

    What lies on a GPU is copied to the host and compared there (cuda.py), or compared where it is
    (device_diff.py).

    Args:
        baseline: The baseline.
        sources: The tensors as they are now; what of them lies on a GPU may be compared there.
        device_diff: Whether it is: "auto" where it is faster; "on"; "off".
        on_refused: Told why a GPU is not asked any more, where something went wrong.

    Raises:
        InvalidArgument: It is "on", and impossible.
    """

    def __init__(
        self,
        baseline: Baseline,
        sources: Sequence[Source] = (),
        *,
        device_diff: DeviceDiffMode = "off",
        on_refused: Callable[[ThinwireError], None] = lambda error: None,
    ) -> None:
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
        self._streams: dict[Device, StreamedCapture] = {}
        self._diffs: dict[Device, DeviceDiff] = {}
        if device_diff != "off":
            self._diffs = self._device_diffs(sources, device_diff == "on", on_refused)
        self._head: object = None

    def settle(self, head: object) -> None:
        """Before the next capture: what became of the last one.

        Args:
            head: The last committed version; another object than before, if it was committed.
        """
        for diff in self._diffs.values():
            diff.settle(head is not self._head)
        self._head = head

    @property
    def device_choices(self) -> dict[str, str]:
        """By device: which way its changes are found, and why."""
        return {diff.name: diff.way for diff in self._diffs.values()}

    def close(self) -> None:
        """Give back what is held on devices and in pinned memory."""
        for stream in self._streams.values():
            stream.close()
        for diff in self._diffs.values():
            diff.close()

    @torch.no_grad()
    def fill(self, sources: Iterable[Source]) -> None:
        """Make the tensors the baseline.

        Raises:
            TensorMismatch: They are not the tensors that were planned for.
        """
        for diff in self._diffs.values():
            diff.begin()
        with closing(self._batches(sources)) as batches:
            for device, parts in batches:
                with closing(self._runs(device, parts)) as runs:
                    for part, start, _, run in runs:
                        words = run.words()
                        at = start * part.word_bytes
                        part.region.baseline[at : at + words.size] = words

    @torch.no_grad()
    def diff(self, sources: Iterable[Source], staging: Staging) -> int:
        """Note what differs from the baseline; returns how many words do.

        Of an iterator each tensor is done with before the next one is drawn.

        Raises:
            TensorMismatch: They are not the tensors that were planned for.
        """
        changed_count = 0
        for diff in self._diffs.values():
            diff.begin()
        with closing(self._changes(sources)) as changes:
            for change in changes:
                changed_count += change.changed_count
                staging.add(change.place, change.found)
        for diff in self._diffs.values():
            diff.end()
        return changed_count

    def _changes(self, sources: Iterable[Source]) -> Generator[Change, None, None]:
        for device, parts in self._batches(sources):
            diff = None if device is None else self._diffs.get(device)
            if diff is None:
                yield from self._found_by_host(device, parts)
            else:
                yield from diff.changes(parts, partial(self._found_by_host, device))

    def _found_by_host(self, device: Device | None, parts: Sequence[Part]) -> Iterator[Change]:
        """What differs, run by run."""
        with closing(self._runs(device, parts)) as runs:
            for part, start, count, run in runs:
                width = part.word_bytes
                base = part.region.baseline[start * width : (start + count) * width]
                found = run.compare(base, self._positions, self._words)
                if not found:
                    continue
                if found > count * WHOLE_ABOVE:
                    kept = Found(start, None, run.words().copy())
                else:
                    positions = self._positions[:found].copy()
                    kept = Found(start, positions, self._words[: found * width].copy())
                yield Change(part.place, found, kept)

    def _runs(
        self, device: Device | None, parts: Sequence[Part]
    ) -> Generator[tuple[Part, int, int, _Run | _Copied], None, None]:
        """Where a run begins in its region, and its length; valid until the next one."""
        if device is None:
            for part in parts:
                for start in range(0, part.elements.numel(), RUN_WORDS):
                    elements = part.elements[start : start + RUN_WORDS]
                    run = _Run(elements, part.dtype, part.word_bytes)
                    yield part, start, elements.numel(), run
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = StreamedCapture(device, run_words=RUN_WORDS)
        tensors = [part.elements for part in parts]
        with closing(stream.iterate(tensors, [part.dtype for part in parts])) as copies:
            for copy in copies:
                part = parts[copy.tensor]
                count = copy.words.size // part.word_bytes
                yield part, copy.start, count, _Copied(copy.words, part.word_bytes)

    def _batches(
        self, sources: Iterable[Source]
    ) -> Generator[tuple[Device | None, list[Part]], None, None]:
        """What is captured here: of each device all together, where all is here at once.

        What had to be made for it, such as a tensor's copy in order, is never kept for longer than
        that tensor takes.
        """
        together: dict[Device, list[Part]] = {}
        for source in self._held(sources):
            if source.name not in self._regions:
                continue
            flat = _flat(source.tensor)
            device = cuda.device_of(source.tensor)
            parts = self._parts_of(source, flat)
            is_view = flat.data_ptr() == source.tensor.data_ptr()
            if device is not None and is_view and isinstance(sources, Sequence):
                together.setdefault(device, []).extend(parts)
            else:
                yield device, parts
        yield from together.items()

    def _held(self, sources: Iterable[Source]) -> Iterator[Source]:
        """Those of which this rank holds something, each as it was planned."""
        missing = set(self._parts)
        for source in sources:
            self._check(source)
            if source.held is None or source.name not in self._parts:
                continue
            if source.name not in missing:
                raise _changed(source.name, "came twice")
            missing.remove(source.name)
            yield source
        for name in sorted(missing):
            raise _changed(name, "is missing")

    def _parts_of(self, source: Source, flat: torch.Tensor) -> list[Part]:
        dtype = torch.float32 if source.dtype.is_complex else source.dtype
        return [
            Part(
                self._baseline.plan.place_of(region.unit),
                region,
                flat[region.source.start : region.source.stop],
                dtype,
                self._spreads[source.name].word_bytes,
            )
            for region in self._regions[source.name]
        ]

    def _device_diffs(
        self,
        sources: Sequence[Source],
        is_forced: bool,
        on_refused: Callable[[ThinwireError], None],
    ) -> dict[Device, DeviceDiff]:
        """One for each device on which something lies that it can compare.

        Raises:
            InvalidArgument: It is to be used and cannot.
        """
        regions: dict[Device, dict[int, Region]] = {}
        memory: dict[Device, torch.device] = {}
        place_of = self._baseline.plan.place_of
        for source in sources:
            device = cuda.device_of(source.tensor)
            held = [] if source.held is None else self._regions.get(source.name, [])
            if device is not None and held:
                memory[device] = source.tensor.device
                here = regions.setdefault(device, {})
                here |= {place_of(region.unit): region for region in held if can_hold(region)}
        regions = {device: here for device, here in regions.items() if here}
        reason = why_unavailable() if regions else "no tensor with short words lies on a GPU"
        for device, here in regions.items():
            needed_bytes, free_bytes = bytes_needed(here), device.free_bytes()
            if is_forced and needed_bytes > free_bytes:
                reason = reason or f"it needs {needed_bytes} bytes, {free_bytes} are free"
        if reason and is_forced and self._regions:
            raise InvalidArgument(
                f"changes cannot be found on the GPU: {reason}",
                hint='device_diff="auto" finds them there where that is possible and faster',
            )
        if reason:
            return {}
        return {
            device: DeviceDiff(
                device,
                memory[device],
                here,
                run_words=RUN_WORDS,
                is_forced=is_forced,
                on_refused=on_refused,
            )
            for device, here in regions.items()
        }

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
        self._word_bytes = word_bytes

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
        return _native.find_changes(base, self.words(), self._word_bytes, positions, words)


class _Copied:
    """Some elements as they are published, copied to the host."""

    def __init__(self, words: np.ndarray, word_bytes: int) -> None:
        self._words = words
        self._word_bytes = word_bytes

    def words(self) -> np.ndarray:
        """Their bits."""
        return self._words

    def compare(self, base: np.ndarray, positions: np.ndarray, words: np.ndarray) -> int:
        """See :class:`_Run`."""
        return _native.find_changes(base, self._words, self._word_bytes, positions, words)


@torch.no_grad()
def digests_of(sources: Sequence[Source], names: Collection[str]) -> dict[str, int]:
    """A digest of what is here of some tensors, as it is published."""
    return {
        source.name: combine(
            xxh3_64(_bits(piece.to(source.dtype))) for piece in pieces_of(source.tensor)
        )
        for source in sources
        if source.name in names and source.held is not None
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
