"""How far a trainer and its samplers agree, for each version of the weights.

The same weights give two programs different log-probabilities: kernels, precision and batching
differ. That much is the floor. What is above it, or grows with a version, is a fault: weights that
are not those of the label, a stale cache, an expert chosen otherwise.

With d = log p(trainer) - log p(sampler) of a sampled token, and r = exp(d), the importance ratio:
the mean of -d (k1) and of r - 1 - d (k3) both estimate KL(sampler || trainer); k3 varies less and
is never negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thinwire.engines.record import LOWEST_LOG_PROB, Record
from thinwire.errors import InvalidArgument

MAX_LOG_RATIO = 20.0
"""Where a log-ratio is cut off before its exponential is taken: one token must not be a mean."""

# Places of a histogram of log-ratios: a quantile is exact to 5 % of its logarithm, or to 1e-4.
_POSITIVE = np.geomspace(1e-4, MAX_LOG_RATIO, 256)
_EDGES = np.concatenate([-_POSITIVE[::-1], _POSITIVE])
_ROUNDING = 1e-3
_EXPERT_ROWS = 1024  # compared at a time: each with each takes room


@dataclass(frozen=True, kw_only=True)
class VersionAgreement:
    """What was found for one version; numbers are NaN while there is nothing to tell them by.

    Attributes:
        version: Its label; empty: tokens of which the engine did not say whose they are.
        token_count: Tokens that were compared.
        missing_count: Tokens without a number on either side: not compared.
        impossible_count: Tokens that either side gave no chance at all: not compared, and a fault
            unless sampling was cut off (top-k, top-p).
        mean_difference: The mean of abs(d).
        max_difference: The largest abs(d).
        k1: An estimate of the KL divergence.
        k3: A better one.
        ratio_quantiles: The importance ratio at each of the shares that were asked for.
        clipped_share: Share of tokens whose ratio is outside of the clip range.
        expert_count: Pairs of a token and a layer whose experts were compared.
        expert_share: Share of the sampler's experts that the trainer chose, too.
    """

    version: str
    token_count: int
    missing_count: int
    impossible_count: int
    mean_difference: float
    max_difference: float
    k1: float
    k3: float
    ratio_quantiles: dict[float, float]
    clipped_share: float
    expert_count: int
    expert_share: float


class Agreement:
    """Compares records with a trainer's log-probabilities; memory does not grow with the run.

    Args:
        clip: The range of ratios that training does not clip.
        quantiles: Which quantiles of the ratio are told.
        keep: For how many versions numbers are kept; the oldest are let go first.

    Raises:
        InvalidArgument: The range, a quantile or the count is none.
    """

    def __init__(
        self,
        *,
        clip: tuple[float, float] = (0.8, 1.2),
        quantiles: Sequence[float] = (0.01, 0.5, 0.99),
        keep: int = 64,
    ) -> None:
        if not 0 < clip[0] <= 1 <= clip[1]:
            raise InvalidArgument(f"the clip range is {clip}", hint="Give one around 1")
        if not all(0 <= share <= 1 for share in quantiles):
            raise InvalidArgument(f"the quantiles are {tuple(quantiles)}, not shares of one")
        if keep < 1:
            raise InvalidArgument(f"{keep} versions would be kept")
        self._clip = np.log(clip)
        self._quantiles = tuple(quantiles)
        self._keep = keep
        self._tallies: dict[str, _Tally] = {}

    def compare(
        self,
        record: Record,
        trainer_log_probs: ArrayLike,
        trainer_experts: ArrayLike | None = None,
    ) -> None:
        """Take one record in; each token counts for the version that it was sampled under.

        Args:
            record: What the engine said.
            trainer_log_probs: The trainer's log-probability of each of the record's tokens, under
                the same temperature. NaN: not computed.
            trainer_experts: The trainer's choices for the record's tokens: [tokens, layers, top_k].

        Raises:
            InvalidArgument: A shape is not the record's, or a number is no log-probability.
        """
        count = len(record.tokens)
        theirs = np.array([np.nan if x is None else x for x in record.log_probs], np.float64)
        ours = np.asarray(trainer_log_probs, np.float64)
        if ours.shape != (count,):
            raise InvalidArgument(f"log-probabilities of shape {ours.shape} for {count} tokens")
        if (ours > _ROUNDING).any():
            raise InvalidArgument(f"{ours.max()} is no log-probability")
        shares = None if trainer_experts is None else _shares(record, np.asarray(trainer_experts))
        for span in record.spans:
            if span.end > span.start:
                tally = self._tally(span.version)
                tally.add(ours[span.start : span.end], theirs[span.start : span.end], self._clip)
                if shares is not None:
                    tally.add_experts(shares[span.start : span.end])

    def merge(self, other: Agreement) -> None:
        """Take in what another one found, such as that of another rank."""
        for version, tally in other._tallies.items():
            self._tally(version).merge(tally)

    @property
    def versions(self) -> tuple[str, ...]:
        """Those that anything was found for, the oldest first."""
        return tuple(self._tallies)

    def of(self, version: str) -> VersionAgreement:
        """What was found for a version so far.

        Raises:
            KeyError: Nothing was, or it was let go.
        """
        return self._tallies[version].told(version, self._quantiles)

    def _tally(self, version: str) -> _Tally:
        if version not in self._tallies:
            while len(self._tallies) >= self._keep:
                del self._tallies[next(iter(self._tallies))]
            self._tallies[version] = _Tally()
        return self._tallies[version]


class _Tally:
    """Sums over the tokens of one version."""

    def __init__(self) -> None:
        self.counts = np.zeros(3, np.int64)  # compared, missing, impossible
        self.sums = np.zeros(4)  # of abs(d), -d, r - 1 - d, and of the clipped
        self.largest = 0.0
        self.histogram = np.zeros(len(_EDGES) + 1, np.int64)
        self.expert_count = 0
        self.expert_sum = 0.0

    def add(
        self, ours: NDArray[np.float64], theirs: NDArray[np.float64], clip: NDArray[np.float64]
    ) -> None:
        is_missing = np.isnan(ours) | np.isnan(theirs)
        is_impossible = ~is_missing & (np.minimum(ours, theirs) <= LOWEST_LOG_PROB)
        kept = ~(is_missing | is_impossible)
        difference = ours[kept] - theirs[kept]
        self.counts += len(difference), is_missing.sum(), is_impossible.sum()
        if not len(difference):
            return
        cut = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        is_clipped = (cut < clip[0]) | (cut > clip[1])
        self.sums += (
            np.abs(difference).sum(),
            -difference.sum(),
            (np.expm1(cut) - cut).sum(),
            is_clipped.sum(),
        )
        self.largest = max(self.largest, float(np.abs(difference).max()))
        places = np.searchsorted(_EDGES, difference)
        self.histogram += np.bincount(places, minlength=len(self.histogram))

    def add_experts(self, shares: NDArray[np.float64]) -> None:
        told = shares[~np.isnan(shares)]
        self.expert_count += told.size
        self.expert_sum += float(told.sum())

    def merge(self, other: _Tally) -> None:
        self.counts += other.counts
        self.sums += other.sums
        self.largest = max(self.largest, other.largest)
        self.histogram += other.histogram
        self.expert_count += other.expert_count
        self.expert_sum += other.expert_sum

    def told(self, version: str, quantiles: Sequence[float]) -> VersionAgreement:
        compared, missing, impossible = self.counts.tolist()
        means = (self.sums / compared).tolist() if compared else [float("nan")] * 4
        has_experts = self.expert_count > 0
        return VersionAgreement(
            version=version,
            token_count=compared,
            missing_count=missing,
            impossible_count=impossible,
            mean_difference=means[0],
            max_difference=self.largest if compared else float("nan"),
            k1=means[1],
            k3=means[2],
            clipped_share=means[3],
            ratio_quantiles={share: self._quantile(share) for share in quantiles},
            expert_count=self.expert_count,
            expert_share=self.expert_sum / self.expert_count if has_experts else float("nan"),
        )

    def _quantile(self, share: float) -> float:
        total = int(self.histogram.sum())
        if not total:
            return float("nan")
        place = int(np.searchsorted(np.cumsum(self.histogram), max(share * total, 0.5)))
        low = _EDGES[place - 1] if place > 0 else _EDGES[0]
        high = _EDGES[place] if place < len(_EDGES) else _EDGES[-1]
        return float(np.exp((low + high) / 2))


def _shares(record: Record, ours: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Of each token and layer, which share of the sampler's experts the trainer chose.

    NaN where the sampler did not tell; None: it told nothing.
    """
    theirs = record.token_experts()
    if theirs is None:
        return None
    count = len(record.tokens)
    if ours.shape != (count, *theirs.shape[1:]):
        raise InvalidArgument(
            f"experts of shape {ours.shape} for {count} tokens and {theirs.shape[1:]} choices"
        )
    shares = np.full(ours.shape[:2], np.nan)
    skipped = count - len(theirs)
    for start in range(0, len(theirs), _EXPERT_ROWS):
        chosen = theirs[start : start + _EXPERT_ROWS]
        known = ours[skipped + start : skipped + start + len(chosen)]
        # In any order: a layer adds up what its experts say.
        is_shared = (chosen[..., :, None] == known[..., None, :]).any(axis=-1)
        shares[skipped + start : skipped + start + len(chosen)] = is_shared.mean(axis=-1)
    return shares
