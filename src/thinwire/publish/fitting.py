"""One set of rate tables for what all ranks encode."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from thinwire.codec import _native
from thinwire.codec.chunk import native_codec
from thinwire.codec.dtypes import DType, dtype_named
from thinwire.codec.tables import SAMPLE_SOURCES, SAMPLE_WORDS
from thinwire.publish.baseline import Baseline
from thinwire.publish.changes import GatheredChanges
from thinwire.publish.messages import Fit, SentCounts, exchanged
from thinwire.publish.ranks import Fault, PeerFailed, Ranks

_RUN_WORDS = 1 << 10


class Fitting:
    """Fits rate tables to an even sample of everything.

    The sample does not depend on who holds what: nor, then, do the bytes of a chunk. Rank 0 fits,
    since another processor might round otherwise.

    Args:
        ranks: The line to the other ranks.
        baseline: The last committed version; only read.
        changes: What changed since.

    Attributes:
        failure: On rank 0, why it could not fit: the others were told.
    """

    def __init__(self, ranks: Ranks, baseline: Baseline, changes: GatheredChanges) -> None:
        self._ranks = ranks
        self._baseline = baseline
        self._plan = baseline.plan
        self._changes = changes
        self.failure: Exception | None = None

    def fit(self, topic: str) -> Fit:
        """The tables, the same on every rank.

        Args:
            topic: Of what is told about this attempt.

        Raises:
            PeerFailed: Another rank failed, or fitting did.
        """
        sent = exchanged(self._ranks, {0: self._sample()}, list[SentCounts])
        if self._ranks.rank == 0:
            try:
                fit = self._fitted(sent)
            except Exception as error:
                self.failure = error
                fit = Fit(fault=Fault.of(error))
            self._ranks.tell(f"{topic}/tables", msgspec.msgpack.encode(fit))
        fit = msgspec.msgpack.decode(self._ranks.hear(f"{topic}/tables"), type=Fit)
        if fit.fault is not None:
            raise PeerFailed(fit.fault.message)
        return fit

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
        return Fit(tables, most_units)

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
        unit_count = 0
        for place, unit in self._baseline.owned():
            unit_count += not self._plan.is_small(unit.tensor)
            dtype = self._plan.spreads[unit.tensor].dtype
            row = dtype_named(dtype)
            if dtype not in counts:
                counts[dtype] = self._no_counts(row)
                strides[dtype] = max(1, self._words_of(dtype) // SAMPLE_WORDS)
            if unit.start == unit.stop:
                continue
            base = self._baseline.whole(place)
            new, _ = self._changes.new_of(place)
            runs_before = (int(starts[unit.tensor]) + unit.start) // _RUN_WORDS
            stride = strides[dtype]
            source = place * len(counts[dtype]) // self._plan.total_units
            codec = native_codec(row, b"")
            codec.sample(base, new, -runs_before % stride, stride, counts[dtype][source])
        return [
            SentCounts(unit_count, dtype, source, rows.tobytes())
            for dtype, found in counts.items()
            for source, rows in enumerate(found)
            if rows.any() or source == 0
        ]
