"""One delta version in the making on one rank: captured changes to uploaded containers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from thinwire.checkpoint.disk import os_errors
from thinwire.codec import _native
from thinwire.codec.chunk import TABLE_BYTES, Spec, decode_chunk, native_codec
from thinwire.codec.container import Attachment, unpack_table
from thinwire.codec.delta import Delta
from thinwire.codec.dtypes import DType, dtype_named
from thinwire.codec.plan import Pair
from thinwire.codec.plan import Unit as Piece
from thinwire.codec.tables import SAMPLE_SOURCES, SAMPLE_WORDS
from thinwire.codec.threads import map_in_order
from thinwire.codec.write import CodedTensor, Facts, SameTensor, code_unit, write_coded
from thinwire.errors import BaseMismatch, ChecksumMismatch
from thinwire.maintain.upload import put_files
from thinwire.publish.baseline import Baseline, Changes, as_words
from thinwire.publish.messages import (
    Fit,
    Receipt,
    SentChanges,
    SentCounts,
    SentRun,
    SentUnit,
    TensorRow,
    exchanged,
    in_step,
)
from thinwire.publish.ranks import Fault, PeerFailed, Ranks
from thinwire.publish.spool import Kept, Spool
from thinwire.publish.staging import Found, Staging
from thinwire.publish.units import Plan, Unit
from thinwire.store import Store
from thinwire.stream import keys
from thinwire.stream.blocks import ObjectRecord, record_of_file

_RUN_WORDS = 1 << 10
# Chunks that are coded before their sections are handed on: what waits in memory is bounded.
_ROUND_UNITS = 16
# Captured changes that all ranks together send in a round, at least one unit each: at worst, one of
# them gets them all.
_ROUND_BYTES = 512 << 20
_MOST_ROUND_BYTES = 8 << 20


class Carried(NamedTuple):
    """What the first container names besides the trainer's tensors.

    Attributes:
        same: Tensors of the stream that the trainer does not publish.
        attachments: Headers and small files, none of which changes.
    """

    same: Sequence[SameTensor] = ()
    attachments: Sequence[Attachment] = ()


class Encoded(NamedTuple):
    """What an attempt did on this rank.

    Attributes:
        paths: The containers' files, by number; empty where this rank assembles none.
        units: The units that this rank owns and that changed: what is needed to move on.
    """

    paths: Mapping[int, Path]
    units: Mapping[int, tuple[Changes | None, int]]


class Attempt:
    """Encodes what was captured; every rank runs one, in step with the others.

    Args:
        plan: Who does what.
        ranks: The line to the other ranks.
        baseline: The last committed version; only read.
        staging: What this rank captured.
        folder: Where containers are written.
        topic: Of what is told about this attempt.
        spec: What to ask of the encoder.
        workers: Threads.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        baseline: Baseline,
        staging: Staging,
        folder: Path,
        topic: str,
        *,
        spec: Spec,
        workers: int,
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._baseline = baseline
        self._staging = staging
        self._folder = folder
        self._topic = topic
        self._spec = spec
        self._workers = workers
        self._received: dict[int, Staging] = {}  # by source
        self._tables: dict[str, bytes] = {}
        self._failure: Exception | None = None
        self._changed: dict[int, tuple[Changes | None, int]] = {}
        self._coded: dict[int, Kept] = {}
        self._spool = Spool(folder)

    def encode(self, carried: Carried) -> Encoded:
        """Make the containers that this rank assembles.

        Raises:
            PeerFailed: Another rank failed.
            ThinwireError: This one did; the others were told. The baseline is as it was.
        """
        with self._spool:
            try:
                with in_step(self._ranks):
                    self._exchange_changes()
                    self._exchange_sections(self._fit())
            except PeerFailed:
                # Rank 0 told the others itself where fitting failed.
                if self._failure is not None:
                    raise self._failure from None
                raise
            paths: dict[int, Path] = {}
            try:
                for number, home in enumerate(self._plan.homes):
                    if home == self._ranks.rank:
                        paths[number] = self._folder / f"{secrets.token_hex(8)}.tw"
                        beside = carried if number == 0 else Carried()
                        self._assemble(number, beside, paths[number])
            except BaseException:
                for path in paths.values():
                    path.unlink(missing_ok=True)
                raise
        return Encoded(paths, self._changed)

    def _found_in(self, place: int) -> dict[int, list[Found]]:
        """What all sources found in a unit that this rank owns."""
        found: dict[int, list[Found]] = {}
        for source, staging in self._received.items():
            if runs := list(staging.of(place)):
                found[source] = runs
        own = list(self._staging.of(place))
        if own:
            found[self._own_source(self._baseline.units[place])] = own
        return found

    def _own_source(self, unit: Unit) -> int:
        ranks = [source.rank for source in unit.sources]
        return ranks.index(self._ranks.rank)

    def _exchange_changes(self) -> None:
        """Send what was found in units that others encode, some of it at a time."""
        batches = self._batches()
        topic = f"{self._topic}/rounds"
        counts = list(exchanged(self._ranks, {0: [len(batches)]}, list[int]))
        if self._ranks.rank == 0:
            self._ranks.tell(topic, str(max(counts)).encode())
        for number in range(int(self._ranks.hear(topic))):
            outgoing = self._outgoing_changes(batches[number] if number < len(batches) else [])
            for changes in exchanged(self._ranks, outgoing, list[SentChanges]):
                if changes.source not in self._received:
                    self._received[changes.source] = self._staging.another()
                for run in changes.runs:
                    self._received[changes.source].add(changes.place, run.found())

    def _batches(self) -> list[list[int]]:
        """The units that others encode, cut by what was found in them.

        Not by their number: a rank of a thousand sends a little of each tensor.
        """
        limit_bytes = min(_MOST_ROUND_BYTES, _ROUND_BYTES // self._ranks.size)
        batches: list[list[int]] = []
        left_bytes = 0
        for place in self._staging.units():
            if self._baseline.units[place].owner == self._ranks.rank:
                continue
            size = self._staging.bytes_of(place)
            if not batches or size > left_bytes:
                batches.append([])
                left_bytes = limit_bytes
            batches[-1].append(place)
            left_bytes -= size
        return batches

    def _outgoing_changes(self, places: Sequence[int]) -> dict[int, list[SentChanges]]:
        outgoing: dict[int, list[SentChanges]] = {}
        for place in places:
            unit = self._baseline.units[place]
            runs = [SentRun.of(found) for found in self._staging.of(place)]
            changes = SentChanges(place, self._own_source(unit), runs)
            outgoing.setdefault(unit.owner, []).append(changes)
        return outgoing

    def _exchange_sections(self, round_count: int) -> None:
        """Code what this rank owns, and hand the sections to those that assemble containers."""
        owned = [place for place, unit in self._baseline.owned() if self._is_large(unit)]
        for number in range(round_count):
            batch = owned[number * _ROUND_UNITS : (number + 1) * _ROUND_UNITS]
            for sent in exchanged(self._ranks, self._code_all(batch), list[SentUnit]):
                self._coded[sent.place] = self._spool.keep(sent)

    def _is_large(self, unit: Unit) -> bool:
        return not self._plan.is_small(unit.tensor)

    def _fit(self) -> int:
        """Fit one set of rate tables for all ranks to an even sample of everything.

        The sample does not depend on who holds what: nor, then, do the bytes of a chunk. Rank 0
        fits, since another processor might round otherwise.

        Returns:
            In how many rounds the coded units are exchanged.
        """
        sent = exchanged(self._ranks, {0: self._sample()}, list[SentCounts])
        topic = f"{self._topic}/tables"
        if self._ranks.rank == 0:
            try:
                fit = self._fitted(sent)
            except Exception as error:
                self._failure = error
                fit = Fit(fault=Fault.of(error))
            self._ranks.tell(topic, msgspec.msgpack.encode(fit))
        fit = msgspec.msgpack.decode(self._ranks.hear(topic), type=Fit)
        if fit.fault is not None:
            raise PeerFailed(fit.fault.message)
        self._tables = fit.tables
        return fit.round_count

    def _fitted(self, sent: Iterable[SentCounts]) -> Fit:
        totals: dict[str, np.ndarray] = {}
        most_units = 0
        for part in sent:
            most_units = max(most_units, part.unit_count)
            row = dtype_named(part.dtype)
            total = totals.setdefault(part.dtype, self._no_counts(row))
            total[part.source] += np.frombuffer(part.counts, "<u8").reshape(total[0].shape)
        tables = {
            dtype: bytes(_native.fit(total, self._words_of(dtype)))
            for dtype, total in totals.items()
        }
        return Fit(tables, -(-most_units // _ROUND_UNITS))

    def _words_of(self, dtype: str) -> int:
        return sum(s.word_count for s in self._plan.spreads if s.dtype == dtype)

    def _no_counts(self, row: DType) -> np.ndarray:
        source_count = min(SAMPLE_SOURCES, max(1, self._plan.total_units))
        return np.zeros((source_count, 3, row.field_mask + 1), np.uint64)

    def _sample(self) -> list[SentCounts]:
        """What this rank counted, of the sources that it has units of."""
        starts = np.cumsum([0, *(spread.word_count for spread in self._plan.spreads)])
        counts: dict[str, np.ndarray] = {}
        strides: dict[str, int] = {}
        for place, unit in self._baseline.owned():
            dtype = self._plan.spreads[unit.tensor].dtype
            row = dtype_named(dtype)
            if dtype not in counts:
                counts[dtype] = self._no_counts(row)
                strides[dtype] = max(1, self._words_of(dtype) // SAMPLE_WORDS)
            if unit.start == unit.stop:
                continue
            base = self._baseline.whole(place)
            new, _ = self._new_of(place)
            runs_before = (int(starts[unit.tensor]) + unit.start) // _RUN_WORDS
            stride = strides[dtype]
            source = place * len(counts[dtype]) // self._plan.total_units
            codec = native_codec(row, b"")
            codec.sample(base, new, -runs_before % stride, stride, counts[dtype][source])
        unit_count = sum(self._is_large(unit) for _, unit in self._baseline.owned())
        return [
            SentCounts(unit_count, dtype, source, rows.tobytes())
            for dtype, found in counts.items()
            for source, rows in enumerate(found)
            if rows.any() or source == 0
        ]

    def _new_of(self, place: int) -> tuple[np.ndarray, Changes | None]:
        """A unit's new bytes, and what changed; the base's own bytes where nothing did."""
        base = self._baseline.whole(place)
        found = self._found_in(place)
        if not found:
            return base, None
        changes = self._baseline.merged(place, found)
        word_bytes = self._plan.spreads[self._baseline.units[place].tensor].word_bytes
        new = base.copy()
        as_words(new, word_bytes)[changes.positions] = as_words(changes.words, word_bytes)
        return new, changes

    def _code_all(self, places: Sequence[int]) -> dict[int, list[SentUnit]]:
        """Code some owned chunks of large tensors, for the ranks that assemble them."""
        outgoing: dict[int, list[SentUnit]] = {}
        for sent, changes in map_in_order(self._code, places, self._workers):
            unit = self._baseline.units[sent.place]
            home = self._plan.home_of(unit.tensor)
            if home == self._ranks.rank:
                self._coded[sent.place] = self._spool.keep(sent)
            else:
                outgoing.setdefault(home, []).append(sent)
            if sent.changed_count:
                self._changed[sent.place] = (None if unit.is_own else changes, sent.new_digest)
        return outgoing

    def _code(self, place: int) -> tuple[SentUnit, Changes | None]:
        unit = self._baseline.units[place]
        known = self._baseline.digests[place]
        new, changes = self._new_of(place)
        if changes is None:
            return SentUnit(place, b"", 0, known, known, ([], [])), None
        spread = self._plan.spreads[unit.tensor]
        base = self._baseline.whole(place)
        pair = Pair(spread.name, spread.dtype, (unit.stop - unit.start,), base, new)
        tables = self._tables[spread.dtype]
        coded = code_unit(Piece([pair], 0, base.size), tables, self._spec)
        facts = coded.members[0]
        self._check_base(spread.name, facts.base_digest, known)
        section = coded.chunk.data
        self._check_section(spread.name, spread.dtype, base, section, facts.new_digest)
        steps = coded.chunk.steps
        sent = SentUnit(place, section, *facts, (list(steps[0]), list(steps[1])))
        return sent, changes

    def _check_base(self, name: str, actual: int, expected: int) -> None:
        if actual != expected:
            raise BaseMismatch(
                f"tensor {name!r}: the baseline in memory is not that of the last version any more",
                hint="Something wrote over it, or the memory is failing. Restart the trainer: the "
                "publisher takes its baseline from the stream",
                tensor=name,
            )

    def _check_section(
        self, name: str, dtype: str, base: np.ndarray, section: bytes, digest: int
    ) -> None:
        """Decode what was just encoded: a version that nobody can apply must not exist."""
        data = np.frombuffer(section, np.uint8)
        out = np.empty_like(base)
        if decode_chunk(dtype_named(dtype), self._tables[dtype], base, data, out) != digest:
            raise ChecksumMismatch(
                f"tensor {name!r} does not decode to what was encoded",
                hint="The processor or the memory is failing; restart on another machine",
                tensor=name,
            )

    def _assemble(self, number: int, carried: Carried, path: Path) -> None:
        """Write a container."""
        steps = np.zeros((2, 64), np.int64)
        groups: list[tuple[str, bytes]] = []
        members: dict[int, tuple[int, Facts]] = {}
        for group_number, group in enumerate(self._plan.groups(number)):
            dtype = self._plan.spreads[group[0]].dtype
            groups.append((dtype, self._code_group(group_number, group, members, steps)))
        tensors: list[CodedTensor | SameTensor] = []
        for tensor in self._plan.containers[number]:
            spread = self._plan.spreads[tensor]
            if tensor in members:
                own, found = members[tensor]
                tensors.append(CodedTensor(*spread[:3], [found], (), own))
                continue
            units = [self._coded[self._plan.place_of(u)] for u in self._plan.units_of(tensor)]
            for unit in units:
                _add_steps(steps, unit.steps)
            facts = [unit.facts for unit in units]
            tensors.append(CodedTensor(*spread[:3], facts, map(self._spool.section, units), None))
        tables = [
            unpack_table(dtype, packed[at : at + TABLE_BYTES])
            for dtype, packed in self._tables.items()
            for at in range(0, len(packed), TABLE_BYTES)
        ]
        with os_errors("cannot write", path), path.open("xb") as file:
            write_coded(
                cast(BinaryIO, file),
                [*tensors, *carried.same],
                groups,
                tables,
                carried.attachments,
                steps=steps,
                spec=self._spec,
                spool_dir=self._folder,
            )

    def _code_group(
        self,
        number: int,
        group: Sequence[int],
        members: dict[int, tuple[int, Facts]],
        steps: np.ndarray,
    ) -> bytes:
        pairs = []
        units = [next(self._plan.units_of(tensor)) for tensor in group]
        found = [self._new_of(self._plan.place_of(unit)) for unit in units]
        for unit, (new, _) in zip(units, found, strict=True):
            spread = self._plan.spreads[unit.tensor]
            base = self._baseline.whole(self._plan.place_of(unit))
            pairs.append(Pair(spread.name, spread.dtype, spread.shape, base, new))
        dtype = pairs[0].dtype
        coded = code_unit(Piece(pairs, 0, 0), self._tables[dtype], self._spec)
        for unit, (_, changes), facts in zip(units, found, coded.members, strict=True):
            place = self._plan.place_of(unit)
            name = self._plan.spreads[unit.tensor].name
            self._check_base(name, facts.base_digest, self._baseline.digests[place])
            members[unit.tensor] = (number, facts)
            if changes is not None:
                own = None if unit.is_own else changes
                self._changed[place] = (own, facts.new_digest)
        _add_steps(steps, coded.chunk.steps)
        section = coded.chunk.data
        if section:
            base = np.concatenate([pair.base for pair in pairs if pair.base is not None])
            new = np.concatenate([pair.new for pair in pairs if pair.new is not None])
            digest = int(_native.xxh3_64(new))
            self._check_section(f"{pairs[0].name} and others", dtype, base, section, digest)
        return section


def upload(
    store: Store,
    paths: Mapping[int, Path],
    key_of: Callable[[int, ObjectRecord], str],
) -> list[Receipt]:
    """Upload containers and say what is in them.

    Raises:
        StoreError: One could not be uploaded.
    """
    receipts = []
    files = []
    for number, path in paths.items():
        record = record_of_file(path)
        files.append((key_of(number, record), path))
        with Delta.open(path) as delta:
            rows = [
                TensorRow(e.name, e.dtype, list(e.shape), e.base_digest, e.new_digest or 0)
                for e in delta.tensors.values()
            ]
            beside = [(a.name, a.kind, a.size, a.digest) for a in delta.attachments]
            changed = sum(entry.changed_count for entry in delta.tensors.values())
        receipts.append(Receipt(number, record, rows, beside, changed))
    put_files(store, files)
    return receipts


def move_on(baseline: Baseline, staging: Staging, encoded: Encoded) -> None:
    """Move a rank's baseline to the version that was just committed."""
    for place in staging.units():
        baseline.apply_captured(place, list(staging.of(place)))
    for place, (changes, digest) in encoded.units.items():
        if changes is None:
            baseline.digests[place] = digest
        else:
            baseline.apply_owned(place, changes, digest)


def shard_key(
    lineage: str, base: int, version: int, session: str
) -> Callable[[int, ObjectRecord], str]:
    """Where a version's containers go."""
    return lambda number, record: keys.shard(lineage, base, version, session, number, record.digest)


def _add_steps(total: np.ndarray, steps: Sequence[Sequence[int]]) -> None:
    for row, counts in zip(total, steps, strict=True):
        row[: len(counts)] += np.asarray(counts, np.int64)
