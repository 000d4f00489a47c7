"""Whether changes are found on a GPU: where it fits, is faster, and finds the same as the host.

**None of this has run on a GPU yet.** The host's baseline is the authority. The first captures, and
some later ones, are done both ways; where these do not agree, or the device fails, the host's word
counts, and the device is not asked again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from thinwire.errors import BaseMismatch, ThinwireError
from thinwire.publish.baseline import Region
from thinwire.torch.cuda import Device
from thinwire.torch.triton_diff import Change, DeviceWords, Part, bytes_needed

T = TypeVar("T")
DeviceDiffMode = Literal["auto", "on", "off"]
ByHost = Callable[[Sequence[Part]], Iterator[Change]]
MIN_GAIN = 1.25
MAX_SHARE = 0.5
# Captures that are done both ways: the first ones, of which the last is measured, and then every
# so many.
TRIAL_COUNT = 2
CHECK_EVERY = 100


class Choice(NamedTuple):
    """Which way to capture, and why."""

    way: Literal["device", "host"]
    reason: str


def fits(*, free_bytes: int, needed_bytes: int) -> bool:
    """Whether the device way leaves the training enough memory to be tried at all.

    Too slow a capture is a nuisance, a step out of memory the run's end: so at most ``MAX_SHARE``.

    Args:
        free_bytes: Device memory that the training does not use at its peak, without the baseline.
        needed_bytes: What the device way takes at its peak, baseline and all.
    """
    return needed_bytes <= free_bytes * MAX_SHARE


def choose(*, host_s: float, device_s: float) -> Choice:
    """Whether changes are found on the device from now on, from one measurement of either way.

    The host way copies every word through pinned memory and compares there; the device way compares
    where the words are and moves changes only, for as much device memory again as is published. It
    is chosen where it was ``MIN_GAIN`` times faster, which is more than chance explains.

    Args:
        host_s: Seconds that the capture stopped the training for, the host way.
        device_s: The same for the same weights, the device way.
    """
    if not (0 < host_s < math.inf and 0 < device_s < math.inf):
        return Choice("host", f"{host_s} s and {device_s} s are no measurement")
    gain = host_s / device_s
    facts = f"{device_s:.4g} s on the device, {host_s:.4g} s through the host"
    if gain < MIN_GAIN:
        return Choice("host", f"{facts}: not {MIN_GAIN:g} times faster")
    return Choice("device", f"{facts}: {gain:.3g} times faster")


class DeviceDiff:
    """Finds what changed in some regions, on their device or by the host.

    It begins with the second capture: the training has shown by then what memory it needs.

    Args:
        device: Where their tensors lie.
        memory: The same, as torch calls it.
        regions: What is captured there, by the unit's place, in words of 1, 2 or 4 bytes.
        run_words: The longest run to hand out.
        is_forced: Use the device also where it is not faster.
        on_refused: Told why the device is not used any more, where something went wrong.
    """

    def __init__(
        self,
        device: Device,
        memory: torch.device,
        regions: Mapping[int, Region],
        *,
        run_words: int,
        is_forced: bool,
        on_refused: Callable[[ThinwireError], None],
    ) -> None:
        self._device = device
        self._memory = memory
        self._regions = regions
        self._run_words = run_words
        self._is_forced = is_forced
        self._on_refused = on_refused
        self._words: DeviceWords | None = None
        self._capture_count = 0
        self._trials_left = TRIAL_COUNT
        self._host_clock, self._device_clock = _Clock(), _Clock()
        self._choice: Choice | None = None

    @property
    def name(self) -> str:
        """The device's."""
        return str(self._memory)

    @property
    def way(self) -> str:
        """Which way changes are found, and why."""
        choice = self._choice or Choice("host", "the device was not tried yet")
        return f"{choice.way}: {choice.reason}"

    def settle(self, is_committed: bool) -> None:
        """It is known what became of the last capture."""
        if self._words is not None:
            try:
                self._words.settle(is_committed)
            except Exception as error:
                self._give_up(error)

    def begin(self) -> None:
        """A capture begins; those before are settled."""
        self._capture_count += 1
        self._host_clock, self._device_clock = _Clock(), _Clock()
        if self._capture_count == 1 or self._words is not None or self._choice is not None:
            return
        free_bytes, needed_bytes = self._device.free_bytes(), bytes_needed(self._regions)
        if not self._is_forced and not fits(free_bytes=free_bytes, needed_bytes=needed_bytes):
            reason = f"the device way needs {needed_bytes} bytes, {free_bytes} are free"
            self._choice = Choice("host", reason)
            return
        try:
            self._words = DeviceWords(self._device, self._memory, self._regions, self._run_words)
        except Exception as error:
            self._give_up(error)

    def end(self) -> None:
        """A capture is complete; after the trials it is decided which way the next ones go."""
        if self._words is None or self._trials_left == 0:
            return
        self._trials_left -= 1
        if self._trials_left == 0:
            self._choice = choose(
                host_s=self._host_clock.seconds, device_s=self._device_clock.seconds
            )
            if self._is_forced:
                self._choice = Choice("device", self._choice.reason)
            if self._choice.way == "host":
                self._words = None

    def changes(self, parts: Sequence[Part], by_host: ByHost) -> Iterator[Change]:
        """What differs in some parts.

        Args:
            parts: They lie on this device.
            by_host: Finds it the other way, run by run, in the order of the parts.
        """
        words = self._words
        here = [part for part in parts if words is not None and part.place in self._regions]
        rest = [part for part in parts if words is None or part.place not in self._regions]
        if rest:
            yield from by_host(rest)
        if words is None or not here:
            return
        here.sort(key=lambda part: (part.word_bytes, part.place))
        if self._trials_left or self._capture_count % CHECK_EVERY == 0:
            yield from self._both_ways(words, here, by_host)
            return
        done = 0
        try:
            for end, changes in words.pieces(here):
                yield from changes
                done = end
        except Exception as error:
            self._give_up(error)
            yield from by_host(here[done:])

    def close(self) -> None:
        """Give the memory back."""
        self._words = None

    def _both_ways(
        self, words: DeviceWords, parts: Sequence[Part], by_host: ByHost
    ) -> Iterator[Change]:
        """What the host finds; and a look whether the device finds the same."""
        # The training step before is not to be measured.
        before = self._device.new_event()
        self._device.record(before, self._device.current_stream())
        self._device.synchronize(before)
        marks = []
        for change in self._host_clock.over(by_host(parts)):
            marks.append(change.mark)
            yield change
        try:
            pieces = self._device_clock.over(words.pieces(parts))
            found = [change.mark for _, changes in pieces for change in changes]
        except Exception as error:
            self._give_up(error)
        else:
            if found != marks:
                self._give_up(BaseMismatch("it found other changes than the host did"))

    def _give_up(self, error: Exception) -> None:
        self._words = None
        reason = f"changes are not looked for on {self._memory} any more: {error}"
        self._choice = Choice("host", reason)
        kind = BaseMismatch if isinstance(error, BaseMismatch) else ThinwireError
        self._on_refused(kind(reason))


class _Clock:
    """How long something that is asked for bit by bit takes, without what is done between."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, items: Iterator[T]) -> Iterator[T]:
        while True:
            start_s = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - start_s
            yield item
