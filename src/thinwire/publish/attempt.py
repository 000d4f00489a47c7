"""One delta version in the making on one rank: captured changes to uploaded containers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from thinwire.checkpoint.disk import os_errors
from thinwire.codec import _native
from thinwire.codec.chunk import TABLE_BYTES, Spec, decode_chunk
from thinwire.codec.container import Attachment, unpack_table
from thinwire.codec.delta import Delta
from thinwire.codec.dtypes import dtype_named
from thinwire.codec.plan import Pair
from thinwire.codec.plan import Unit as Piece
from thinwire.codec.threads import map_in_order
from thinwire.codec.write import CodedTensor, Facts, SameTensor, code_unit, write_coded
from thinwire.errors import BaseMismatch, ChecksumMismatch
from thinwire.maintain.upload import put_files
from thinwire.publish.baseline import Baseline, Changes
from thinwire.publish.changes import GatheredChanges
from thinwire.publish.fitting import Fitting
from thinwire.publish.messages import Receipt, SentUnit, TensorRow, exchanged, in_step
from thinwire.publish.ranks import PeerFailed, Ranks
from thinwire.publish.spool import Kept, Spool
from thinwire.publish.staging import Staging
from thinwire.publish.units import Plan
from thinwire.store import Store
from thinwire.stream import keys
from thinwire.stream.blocks import ObjectRecord, record_of_file

# Chunks that are coded before their sections are handed on: what waits in memory is bounded.
_ROUND_UNITS = 16


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
        self._folder = folder
        self._topic = topic
        self._spec = spec
        self._workers = workers
        self._changes = GatheredChanges(ranks, baseline, staging)
        self._tables: Mapping[str, bytes] = {}
        self._changed: dict[int, tuple[Changes | None, int]] = {}
        self._coded: dict[int, Kept] = {}
        self._spool = Spool(folder)

    def encode(self, carried: Carried) -> Encoded:
        """Make the containers that this rank assembles.

        Raises:
            PeerFailed: Another rank failed.
            ThinwireError: This one did; the others were told. The baseline is as it was.
        """
        fitting = Fitting(self._ranks, self._baseline, self._changes)
        with self._spool:
            try:
                with in_step(self._ranks):
                    self._changes.exchange(self._topic)
                    fit = fitting.fit(self._topic)
                    self._tables = fit.tables
                    self._exchange_sections(-(-fit.most_units // _ROUND_UNITS))
            except PeerFailed:
                # Rank 0 told the others itself where fitting failed.
                if fitting.failure is not None:
                    raise fitting.failure from None
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

    def _exchange_sections(self, round_count: int) -> None:
        """Code what this rank owns, and hand the sections to those that assemble containers."""
        is_small = self._plan.is_small
        owned = [place for place, unit in self._baseline.owned() if not is_small(unit.tensor)]
        for number in range(round_count):
            batch = owned[number * _ROUND_UNITS : (number + 1) * _ROUND_UNITS]
            for sent in exchanged(self._ranks, self._code_all(batch), list[SentUnit]):
                self._coded[sent.place] = self._spool.keep(sent)

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
        new, changes = self._changes.new_of(place)
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
        found = [self._changes.new_of(self._plan.place_of(unit)) for unit in units]
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
