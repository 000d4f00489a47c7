"""Changes of a checkpoint, carried out in the parameters of a running model through an index map.

Preparing finds every place and converts every word, while the model is used. What is left for the
moment when nobody uses it is to exchange words: doing it once more undoes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.codec import _native
from thinwire.errors import TensorMismatch
from thinwire.torch.index_map import IndexMap, Int64s, Run
from thinwire.torch.live import Parameter, converted

Words = np.ndarray[Any, Any]

_PIECE = 1 << 20
# Positions are handed to the kernel as 32 bits from the start of a window.
_WINDOW = 1 << 31


class Change(NamedTuple):
    """New words of one tensor: ``positions`` rise; ``words`` are unsigned integers."""

    tensor: str
    positions: Int64s
    words: Words


class _Host(NamedTuple):
    """Words to exchange in a window of a parameter in memory."""

    window: Words  # uint8
    positions: np.ndarray[Any, np.dtype[np.uint32]]
    words: Words  # uint8
    word_bytes: int


class _Device:
    """Words to exchange in a parameter on a device; they are there already."""

    def __init__(self, parameter: Parameter, at: Int64s, words: Words) -> None:
        device = parameter.flat.device
        self._flat = parameter.flat
        self._at = torch.from_numpy(at).to(device)
        self._words = torch.from_numpy(words.view(f"i{words.itemsize}")).to(device)
        self._signed = words.itemsize > 1
        if not self._signed:
            self._words = self._words.view(torch.uint8)
        self._new = self._words

    def swap(self) -> None:
        old = self._flat.index_select(0, self._at)
        self._flat.index_copy_(0, self._at, self._words)
        self._words = old

    def holds_new(self) -> bool:
        return bool(torch.equal(self._flat.index_select(0, self._at), self._new))


class Swap:
    """Prepared changes. Never tried on a GPU.

    Attributes:
        word_count: Words that will be exchanged; those that a model holds twice count twice.
        is_swapped: Whether the parameters hold the new words.
    """

    def __init__(self, hosts: list[_Host], devices: list[_Device], word_count: int) -> None:
        self._hosts = hosts
        self._devices = devices
        self.word_count = word_count
        self.is_swapped = False
        self._new = [host.words.copy() for host in hosts]

    def swap(self) -> None:
        """Exchange the words in the parameters with those kept here. Nobody may use the model.

        After an error, nothing is exchanged.
        """
        done: list[_Device] = []
        try:
            for device in self._devices:
                device.swap()
                done.append(device)
            # This does everything or raises.
            _native.swap_words(
                [(h.window, h.positions, h.words, h.word_bytes) for h in self._hosts]
            )
        except BaseException:
            for device in done:
                device.swap()
            raise
        self.is_swapped = not self.is_swapped

    def holds_new(self) -> bool:
        """Whether the parameters hold the new words; reads them back one by one."""
        for host, new in zip(self._hosts, self._new, strict=True):
            words = host.window.view(f"u{host.word_bytes}")
            if not np.array_equal(words[host.positions], new.view(f"u{host.word_bytes}")):
                return False
        return all(device.holds_new() for device in self._devices)


class LiveModel:
    """A running model's parameters, and where the checkpoint's elements lie in them.

    Args:
        parameters: The parameters by name, those of ``index_map``.
        index_map: Where things lie.

    Raises:
        TensorMismatch: The parameters are not those that the map was made for.
    """

    def __init__(self, parameters: Mapping[str, Parameter], index_map: IndexMap) -> None:
        found = {name: (p.dtype, p.count) for name, p in parameters.items()}
        if found != index_map.parameters:
            raise TensorMismatch(
                "the model's parameters are not those that the index map was made for"
            )
        self.index_map = index_map
        self._parameters = list(parameters.values())

    def prepare(self, changes: Iterable[Change]) -> Swap:
        """Find the places of changes and convert their words; the parameters are only looked at.

        Elements that are not held here are left out.
        """
        found: dict[int, list[tuple[Int64s, Words]]] = {}
        for change in changes:
            dtype, count = self.index_map.tensors[change.tensor]
            if change.positions.size and not 0 <= change.positions[-1] < count:
                raise TensorMismatch(f"a change lies outside tensor {change.tensor!r}")
            for places in self.index_map.places(change.tensor, change.positions):
                target = self._parameters[places.parameter]
                asked = np.ascontiguousarray(change.words[places.asked])
                words = converted(asked, dtype, target.dtype)
                found.setdefault(places.parameter, []).append((places.at, words))
        hosts: list[_Host] = []
        devices: list[_Device] = []
        word_count = 0
        for number, parts in found.items():
            at = np.concatenate([part[0] for part in parts])
            words = np.concatenate([part[1] for part in parts])
            order = np.argsort(at, kind="stable")
            at, words = at[order], words[order]
            word_count += at.size
            parameter = self._parameters[number]
            if parameter.is_on_cpu:
                hosts += _windows(parameter, at, words)
            else:
                devices.append(_Device(parameter, at, words))
        return Swap(hosts, devices, word_count)

    def differences(self, tensor: str, words: Words) -> Int64s:
        """Where a tensor differs from what is held of it: rising positions, each once.

        Args:
            tensor: Its name.
            words: All of its words, unsigned integers.
        """
        found = [positions for _, positions in self._differences(tensor, words)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def differing_parameters(self, tensor: str, words: Words) -> set[str]:
        """The names of the parameters in which a tensor differs from what is held of it."""
        numbers = {number for number, _ in self._differences(tensor, words)}
        return {self.index_map.parameter_name(number) for number in numbers}

    def _differences(self, tensor: str, words: Words) -> Iterator[tuple[int, Int64s]]:
        dtype = self.index_map.tensors[tensor][0]
        for run in self.index_map.runs_of(tensor):
            parameter = self._parameters[run.parameter]
            for row, stop, column, end in _pieces(run):
                positions = _positions(run, row, stop, column, end)
                source = np.ascontiguousarray(_source(run, words, row, stop, column, end))
                wanted = converted(source.reshape(-1), dtype, parameter.dtype)
                held = _held(run, parameter, row, stop, column, end)
                differ = np.flatnonzero(wanted != held)
                if differ.size:
                    yield run.parameter, positions(differ)


def _windows(parameter: Parameter, at: Int64s, words: Words) -> Iterator[_Host]:
    memory = parameter.words().view(np.uint8)
    size = words.dtype.itemsize
    for start in range(0, parameter.count, _WINDOW):
        low, high = np.searchsorted(at, [start, start + _WINDOW])
        if low < high:
            window = memory[start * size : (start + _WINDOW) * size]
            yield _Host(
                window,
                (at[low:high] - start).astype(np.uint32),
                words[low:high].copy().view(np.uint8),
                size,
            )


def _pieces(run: Run) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles of rows and columns with a bounded number of elements."""
    if run.length >= _PIECE:
        for row in range(run.repeat):
            for column in range(0, run.length, _PIECE):
                yield row, row + 1, column, min(column + _PIECE, run.length)
    else:
        rows = max(1, _PIECE // run.length)
        for row in range(0, run.repeat, rows):
            yield row, min(row + rows, run.repeat), 0, run.length


def _positions(run: Run, row: int, stop: int, column: int, end: int) -> Any:
    """Turns places in a rectangle into positions in the tensor."""

    def positions(places: Int64s) -> Int64s:
        r, c = np.divmod(places, end - column)
        found: Int64s = run.source + (row + r) * run.source_jump + (column + c) * run.source_step
        return found

    return positions


def _source(run: Run, words: Words, row: int, stop: int, column: int, end: int) -> Words:
    size = words.dtype.itemsize
    first = run.source + row * run.source_jump + column * run.source_step
    return np.lib.stride_tricks.as_strided(
        words[first:],
        (stop - row, end - column),
        (run.source_jump * size, run.source_step * size),
        writeable=False,
    )


def _held(run: Run, parameter: Parameter, row: int, stop: int, column: int, end: int) -> Words:
    first = run.start + row * run.jump + column
    held = torch.as_strided(
        parameter.flat,
        (stop - row, end - column),
        (run.jump, 1),
        parameter.flat.storage_offset() + first,
    )
    words = held.cpu().contiguous().numpy().reshape(-1)
    return words.view(f"u{words.dtype.itemsize}")
