"""The end of the run: the proof, the rewards, the table, and the plot."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from digests import digest_of, load_folder
from player import pad
from policy import token_log_probs
from report import rebuild
from trainer import Settings, StepRecord, clipped_share, effective_share, span_of, turns_of

import thinwire
from thinwire.engines.agreement import Agreement
from thinwire.engines.engine import label_of
from thinwire.engines.record import Record

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from changes_plot import Axis, Panel, Series, draw

# The sampler and the scorer compute the same in FP32, in another order.
LARGEST_DIFFERENCE = 1e-3
_SCORED_TURNS = 64  # of each version
_ROWS = 10
WIDTHS = {
    "steps": 9,
    "reward": 13,
    "staleness": 13,
    "dropped": 7,
    "ratio 1-99 %": 12,
    "effective": 9,
    "clipped": 7,
    "bytes": 8,
    "full bytes": 10,
    "changed": 7,
}


@dataclass(frozen=True)
class Row:
    """A step: ratios are importance ratios of tokens, shares are of them or of all weights."""

    step: int
    reward: float
    staleness: float
    max_staleness: int
    dropped_count: int
    low_ratio: float
    high_ratio: float
    effective_share: float
    clipped_share: float
    payload_bytes: int
    raw_bytes: int
    changed_share: float
    wait_s: float
    step_s: float
    publish_s: float
    digest: str


def closing_report(
    model: Any,
    records: Sequence[StepRecord],
    stats: dict[str, Any],
    url: str,
    work: Path,
    settings: Settings,
) -> bool:
    """Print it, and write the rows and the plot; returns whether everything is as it should be.

    Args:
        model: The trainer's module, which is not needed for anything else any more.
        records: Of every step; the first is of the weights that the run began with.
        stats: What the environment counted.
        url: The stream.
        work: Where the sampler's folder is, and the files are written.
        settings: Of the run.
    """
    rows = [row_of(record) for record in records[1:]]
    print()
    print_table(rows)
    is_right = prove_weights(model, records, url, work)
    is_right &= prove_sessions(stats, settings)
    is_right &= prove_rewards([row.reward for row in rows], settings.required_rise)
    (work / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    (work / "wordle.svg").write_text(plot(rows, settings), encoding="utf-8")
    print(f"rows.json, wordle.svg and the logs are in {work}")
    return is_right


def prove_weights(model: Any, records: Sequence[StepRecord], url: str, work: Path) -> bool:
    """Whether all samples were made with exactly the weights that the trainer had."""
    turns: dict[str, list[Record]] = defaultdict(list)
    for turn in turns_of([group for record in records for group in record.batch.groups]):
        turns[str(turn.version)].append(turn)
    digests = {record.step: record.digest for record in records}
    agreement, others = Agreement(keep=len(records)), Agreement(keep=len(records))
    rebuilt: dict[str, bool] = {}
    previous = ""
    for found in rebuild(url, work / "replay", None):
        label = label_of(found.version)
        rebuilt[label] = found.digest == digests.get(found.version.step or 0)
        load(model, work / "replay")
        score(model, turns[label][:_SCORED_TURNS], agreement)
        # By how much a sampler would be off that is one version behind: else it proves nothing.
        score(model, turns[previous][:_SCORED_TURNS], others)
        previous = label
    used = {label for label, found in turns.items() if found}
    worst = max((agreement.of(label).max_difference for label in agreement.versions), default=9.9)
    wrong = [statistics.median(others.of(v).mean_difference for v in others.versions)]
    served = served_digest(url, work / "served")
    is_complete = len(rebuilt) == len(records) and all(rebuilt.values())
    is_known = used <= rebuilt.keys()
    is_served = served in digests.values()
    is_sampled = worst < LARGEST_DIFFERENCE
    print(
        f"\nevery version rebuilt from the store equals the trainer's weights of its step: "
        f"{_yes(is_complete)} ({sum(rebuilt.values())} of {len(records)}, BLAKE3)\n"
        f"the weights that the sampler held in the end are the trainer's: {_yes(is_served)}\n"
        f"turns were sampled with {len(used)} versions, all of them published: {_yes(is_known)}\n"
        f"the sampler's log-probabilities are those of the version it names: {_yes(is_sampled)} "
        f"(largest difference {worst:.1e}; the next version's weights: {wrong[0]:.1e} on average)"
    )
    return is_complete and is_known and is_served and is_sampled


def load(model: Any, folder: Path) -> None:
    """Give the module a folder's weights."""
    tensors = load_folder(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(tensors[name])


@torch.no_grad()
def score(model: Any, turns: Sequence[Record], agreement: Agreement) -> None:
    """Compare what the sampler said of turns with what the module computes."""
    if not turns:
        return
    tokens, _ = pad([([*turn.prompt, *turn.tokens], []) for turn in turns])
    log_probs = token_log_probs(model(tokens).logits[:, :-1], tokens[:, 1:])
    for row, turn in enumerate(turns):
        span = span_of(turn)
        agreement.compare(turn, log_probs[row, span.start - 1 : span.stop - 1].numpy())


def served_digest(url: str, folder: Path) -> str:
    """Of the sampler's folder, from which it takes its weights; it has ended by now."""
    with thinwire.Follower(url, folder) as follower:
        version = follower.version()
    print(f"the sampler ended at version {None if version is None else version.version}")
    return digest_of(load_folder(folder).items())


def prove_sessions(stats: dict[str, Any], settings: Settings) -> bool:
    """Whether all sessions were open at once."""
    wanted = settings.concurrent_groups * settings.group_size
    is_right = bool(stats["peak"] == wanted)
    print(
        f"sessions: {stats['opened']:,} opened, {stats['peak']} open at once at most and "
        f"{stats['mean']:.0f} on average, by the environment's own count; {stats['expired']} "
        f"expired; as many at once as there are players: {_yes(is_right)}"
    )
    return is_right


def prove_rewards(rewards: Sequence[float], required_rise: float | None) -> bool:
    """Whether the last steps earn enough more than the first; None: not judged."""
    count = max(3, len(rewards) // 8)
    first, last = rewards[:count], rewards[-count:]
    rise = statistics.fmean(last) - statistics.fmean(first)
    error = math.hypot(*(statistics.stdev(some) / math.sqrt(count) for some in (first, last)))
    is_right = required_rise is None or rise >= required_rise
    judged = (
        "too few steps to judge"
        if required_rise is None
        else (f"by {required_rise} or more: {_yes(is_right)}")
    )
    print(
        f"reward: {statistics.fmean(first):.3f} over the first {count} steps (between steps "
        f"{statistics.stdev(first):.3f}), {statistics.fmean(last):.3f} over the last {count} "
        f"({statistics.stdev(last):.3f}): a rise of {rise:.3f}, give or take {error:.3f}; {judged}"
    )
    return is_right


def row_of(record: StepRecord) -> Row:
    """A step, once its version is committed."""
    version = record.ticket.wait()
    assert version is not None  # the publisher skips none
    low, high = torch.quantile(record.ratios, torch.tensor([0.01, 0.99])).tolist()
    batch = record.batch
    return Row(
        step=record.step,
        reward=batch.reward,
        staleness=statistics.fmean(batch.ages),
        max_staleness=max(batch.ages),
        dropped_count=batch.dropped_count,
        low_ratio=low,
        high_ratio=high,
        effective_share=effective_share(record.ratios),
        clipped_share=clipped_share(record.ratios),
        payload_bytes=version.payload_bytes,
        raw_bytes=version.raw_bytes,
        changed_share=version.changed_count / version.word_count,
        wait_s=batch.wait_s,
        step_s=record.step_s,
        publish_s=record.publish_s,
        digest=record.digest,
    )


def print_table(rows: Sequence[Row]) -> None:
    """A line for some steps together; the reward with its spread between them."""
    _print_cells(WIDTHS)
    size = max(2, math.ceil(len(rows) / _ROWS))
    for some in (rows[start : start + size] for start in range(0, len(rows), size)):
        rewards = [row.reward for row in some]
        _print_cells(
            (
                f"{some[0].step}-{some[-1].step}",
                f"{_mean(rewards):.3f} ±{statistics.pstdev(rewards):.3f}",
                f"{_mean(r.staleness for r in some):.1f}, {max(r.max_staleness for r in some)} max",
                str(sum(row.dropped_count for row in some)),
                f"{_mean(r.low_ratio for r in some):.2f} - {_mean(r.high_ratio for r in some):.2f}",
                f"{_mean(row.effective_share for row in some):.3f}",
                f"{_mean(row.clipped_share for row in some):.3f}",
                f"{_mean(row.payload_bytes for row in some):,.0f}",
                f"{some[0].raw_bytes:,}",
                f"{100 * _mean(row.changed_share for row in some):.1f} %",
            )
        )
    waited = 100 * sum(row.wait_s for row in rows) / sum(row.step_s for row in rows)
    print(
        f"a step took {statistics.median(row.step_s for row in rows):.2f} s, publish() "
        f"{statistics.median(row.publish_s for row in rows):.3f} s of them (medians); "
        f"{waited:.0f} % of the time the trainer waited for rollouts that are fresh enough"
    )


def plot(rows: Sequence[Row], settings: Settings) -> str:
    """Rewards and staleness over the steps, as SVG."""
    steps = [row.step for row in rows]
    tenth = max(1, len(rows) // 10)
    smooth = [_mean(r.reward for r in rows[max(0, n - tenth) : n + 1]) for n in range(len(rows))]
    x = Axis("step", [1, *(len(rows) * part // 4 for part in (1, 2, 3, 4))], is_log=False)
    oldest = max(settings.max_staleness, 1)

    def line(name: str, values: Iterable[float]) -> Series:
        return Series(name, list(zip(steps, values, strict=True)))

    return draw(
        "A word game over HTTP: GRPO on rollouts that are some versions old",
        f"{settings.concurrent_groups * settings.group_size} sessions at once, "
        f"{settings.groups * settings.group_size} for a step",
        [
            Panel(
                "Reward",
                x,
                Axis("reward", [0, 0.2, 0.4, 0.6, 0.8], is_log=False),
                [
                    line("a step's mean", (row.reward for row in rows)),
                    line(f"mean of the last {tenth + 1} steps", smooth),
                ],
            ),
            Panel(
                "How old the turns were, versions",
                x,
                Axis("versions", list(range(oldest + 1)), is_log=False),
                [
                    line("mean", (row.staleness for row in rows)),
                    line("oldest", (row.max_staleness for row in rows)),
                ],
            ),
        ],
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _yes(is_right: bool) -> str:
    return "yes" if is_right else "NO"


def _print_cells(cells: Iterable[str]) -> None:
    line: Iterator[str] = (cell.rjust(w) for cell, w in zip(cells, WIDTHS.values(), strict=True))
    print("  ".join(line), flush=True)
