"""A lineage's first version from memory: an ordinary checkpoint, each file by one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thinwire.checkpoint.disk import ByteArray, create_mapped, sync, write_file
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.codec.container import Attachment
from thinwire.codec.digest import tensor_digest, xxh3_64
from thinwire.maintain.upload import file_record
from thinwire.publish.baseline import Baseline, scatter
from thinwire.publish.messages import FileReceipt, SentPart, TensorRow, exchanged, in_step
from thinwire.publish.ranks import Ranks
from thinwire.publish.source import FILE_BYTES, index_of, safetensors_header
from thinwire.publish.units import Plan, Unit

# What a rank sends or receives at a time; several copies of it are in memory.
_ROUND_BYTES = 8 << 20
# Rounds that may still get more.
_OPEN_ROUNDS = 64


class WeightsFile(NamedTuple):
    """A weights file of the first version.

    Attributes:
        name: Its name.
        tensors: The numbers of its tensors.
        home: The rank that writes it.
    """

    name: str
    tensors: Sequence[int]
    home: int


def weights_files(plan: Plan, single_name: str = "model.safetensors") -> list[WeightsFile]:
    """The weights files of a first version: up to 5 GiB each, one container's tensors or a part.

    Args:
        plan: Who does what.
        single_name: The name of the file where there is only one.
    """
    groups: list[tuple[list[int], int]] = []
    for container, home in zip(plan.containers, plan.homes, strict=True):
        groups.append(([], home))
        size = 0
        for tensor in container:
            byte_count = plan.spreads[tensor].byte_count
            if groups[-1][0] and size + byte_count > FILE_BYTES:
                groups.append(([], home))
                size = 0
            groups[-1][0].append(tensor)
            size += byte_count
    if len(groups) == 1:
        return [WeightsFile(single_name, *groups[0])]
    stem = single_name.removesuffix(".safetensors")
    return [
        WeightsFile(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", *group)
        for number, group in enumerate(groups, 1)
    ]


class FirstVersion:
    """Spreads what every rank captured to those that need it whole, and writes the files.

    Args:
        plan: Who does what.
        ranks: The line to the other ranks.
        baseline: What every rank captured; the units that it encodes whole are filled in.
        folder: Where the files are written.
        files: The weights files.
        metadata: What the headers say besides.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        baseline: Baseline,
        folder: Path,
        files: Sequence[WeightsFile],
        metadata: Mapping[str, str],
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._baseline = baseline
        self._folder = folder
        self._files = files
        self._metadata = metadata
        self._views: dict[int, ByteArray] = {}
        self._headers: dict[str, bytes] = {}

    def write(self) -> dict[str, Path]:
        """Write this rank's weights files; returns them by name.

        Raises:
            PeerFailed: Another rank failed.
            ThinwireError: This one did.
        """
        paths: dict[str, Path] = {}
        with in_step(self._ranks):
            self._create(paths)
            for batch in self._rounds():
                for part in exchanged(self._ranks, self._outgoing(batch), list[SentPart]):
                    self._put(part)
        for path in paths.values():
            sync(path)
        self._baseline.digest_owned()
        return paths

    def receipts(
        self, paths: Mapping[str, Path], small: Mapping[str, bytes] | None
    ) -> tuple[list[FileReceipt], dict[str, Path]]:
        """What this rank's files hold.

        Args:
            paths: Its weights files.
            small: On rank 0 the small files, which are written, and returned by name.
        """
        receipts = []
        for file in self._files:
            if file.name in paths:
                header = self._headers[file.name]
                rows = [self._row(tensor) for tensor in file.tensors]
                record = file_record(file.name, paths[file.name])
                receipts.append(FileReceipt(record, "header", len(header), xxh3_64(header), rows))
        others: dict[str, Path] = {}
        if small is not None:
            contents = dict(small)
            if len(self._files) > 1:
                names = {
                    self._plan.spreads[t].name: file.name
                    for file in self._files
                    for t in file.tensors
                }
                total = sum(spread.byte_count for spread in self._plan.spreads)
                contents[INDEX_NAME] = index_of(names, total)
            for name, data in contents.items():
                others[name] = self._folder / name
                write_file(others[name], data)
                record = file_record(name, others[name])
                receipts.append(FileReceipt(record, "file", len(data), xxh3_64(data), []))
        return receipts, others

    def _create(self, paths: dict[str, Path]) -> None:
        for file in self._files:
            if file.home != self._ranks.rank:
                continue
            spreads = [self._plan.spreads[tensor] for tensor in file.tensors]
            rows = [(spread.name, spread.dtype, spread.shape) for spread in spreads]
            header = safetensors_header(rows, self._metadata)
            path = paths[file.name] = self._folder / file.name
            size = len(header) + sum(spread.byte_count for spread in spreads)
            view = create_mapped(path, size)
            view[: len(header)] = np.frombuffer(header, np.uint8)
            self._headers[file.name] = header
            at = len(header)
            for tensor, spread in zip(file.tensors, spreads, strict=True):
                self._views[tensor] = view[at : at + spread.byte_count]
                at += spread.byte_count

    def _rounds(self) -> list[list[Unit]]:
        """All units, so that no rank sends or receives much at a time.

        Each goes to the first of the last rounds in which its ranks have room; looking at all of
        them would take time with the square of the model's size.
        """
        rounds: list[list[Unit]] = []
        loads: list[dict[int, int]] = []
        for unit in self._interleaved():
            moved = self._moved_bytes(unit, self._plan.spreads[unit.tensor].word_bytes)
            number = max(0, len(rounds) - _OPEN_ROUNDS)
            while number < len(rounds) and any(
                loads[number].get(rank, 0) + size > _ROUND_BYTES for rank, size in moved.items()
            ):
                number += 1
            if number == len(rounds):
                rounds.append([])
                loads.append({})
            rounds[number].append(unit)
            for rank, size in moved.items():
                loads[number][rank] = loads[number].get(rank, 0) + size
        return rounds

    def _interleaved(self) -> Iterator[Unit]:
        """A unit of each container in turn: those who write them have something to do at once."""
        waiting = [
            chain.from_iterable(map(self._plan.units_of, tensors))
            for tensors in self._plan.containers
        ]
        while waiting:
            left = []
            for units in waiting:
                if (unit := next(units, None)) is not None:
                    left.append(units)
                    yield unit
            waiting = left

    def _moved_bytes(self, unit: Unit, word_bytes: int) -> dict[int, int]:
        """What a unit has each rank send, or receive."""
        receivers = self._receivers(unit)
        moved = dict.fromkeys(receivers, (unit.stop - unit.start) * word_bytes)
        for source in unit.sources:
            sent = (source.stop - source.start) * word_bytes * len(receivers)
            moved[source.rank] = moved.get(source.rank, 0) + sent
        return moved

    def _receivers(self, unit: Unit) -> set[int]:
        """Who needs a unit whole: for its file, and to encode it later on."""
        home = self._plan.home_of(unit.tensor)
        return {home} if unit.is_own else {home, unit.owner}

    def _outgoing(self, units: Sequence[Unit]) -> dict[int, list[SentPart]]:
        outgoing: dict[int, list[SentPart]] = {}
        for unit in units:
            for number, source in enumerate(unit.sources):
                if source.rank != self._ranks.rank:
                    continue
                place = self._plan.place_of(unit)
                part = SentPart(place, number, self._baseline.captured(place).tobytes())
                for rank in self._receivers(unit):
                    outgoing.setdefault(rank, []).append(part)
        return outgoing

    def _put(self, part: SentPart) -> None:
        unit = self._plan.unit_at(part.place)
        data = np.frombuffer(part.data, np.uint8)
        if unit.owner == self._ranks.rank:
            self._baseline.put(part.place, part.source, data)
        view = self._views.get(unit.tensor)
        if view is not None:
            word_bytes = self._plan.spreads[unit.tensor].word_bytes
            out = view[unit.start * word_bytes : unit.stop * word_bytes]
            scatter(self._plan, unit, unit.sources[part.source], data, out)

    def _row(self, tensor: int) -> TensorRow:
        spread = self._plan.spreads[tensor]
        digest = tensor_digest(spread.dtype, self._views[tensor])
        return TensorRow(spread.name, spread.dtype, list(spread.shape), None, digest)


def attachments_of(receipts: Sequence[FileReceipt]) -> list[Attachment]:
    """A first version's headers and small files as later deltas name them."""
    return [
        Attachment(receipt.record.name, receipt.kind, None, receipt.size, receipt.digest)
        for receipt in receipts
    ]
