"""What the trainer's own process checks, version by version: weights, labels, log-probabilities."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from digests import digest_of, load_folder
from torch import nn
from transformers import TrainerCallback

import thinwire
from thinwire.engines import record
from thinwire.engines.agreement import Agreement
from thinwire.engines.engine import label_of
from thinwire.engines.record import Record

WIDTHS = {
    "version": 7,
    "step": 4,
    "bytes": 11,
    "of full": 8,
    "served after": 12,
    "weights": 7,
    "reward": 6,
    "sampled": 7,
    "compared": 8,
    "mean |d|": 8,
    "max |d|": 7,
    "k3": 8,
}

# vLLM with the weights was at 0.01 to 0.05, one that took the labels alone at 0.14 or more.
LARGEST_MEAN_DIFFERENCE = 0.1
_ENOUGH_TOKENS = 20
_COMPARED = 8  # completions of a version: each costs the trainer a part of a forward pass
_POLL_S = 0.05


@dataclass
class Published:
    """A version, as the trainer saw it."""

    version: thinwire.Version
    label: str
    served_after_s: float
    is_equal: bool


@dataclass(frozen=True)
class Row:
    """A version in the closing table; counts are of tokens, the reward of the step before it."""

    version: int
    step: int | None
    payload_bytes: int
    raw_bytes: int
    served_after_s: float
    is_equal: bool
    reward: float
    sampled_count: int
    compared_count: int
    mean_difference: float
    max_difference: float
    k3: float


@dataclass
class Proof(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Waits for vLLM to serve a version, and compares what it serves with what the trainer has.

    Args:
        engine: vLLM's address.
        host_copy: The folder that vLLM's weights are taken from.
        records: The file of the rollout worker.
        timeout_s: How long vLLM may take for a version.
    """

    engine: str
    host_copy: Path
    records: Path
    timeout_s: float = 300.0
    published: list[Published] = field(default_factory=list)
    rewards: dict[int | None, float] = field(default_factory=dict)
    sampled: Counter[str] = field(default_factory=Counter)
    crossing_count: int = 0
    agreement: Agreement = field(default_factory=Agreement)
    model: nn.Module | None = None
    _offset: int = 0

    def serving(self, version: thinwire.Version) -> None:
        """Return once vLLM reports the version; TRL waits for this in each sync.

        Raises:
            TimeoutError: It does not.
        """
        start_s = time.monotonic()
        while self._label() != label_of(version):
            if time.monotonic() - start_s > self.timeout_s:
                raise TimeoutError(
                    f"vLLM does not serve version {version.version}: {self._label()}"
                )
            time.sleep(_POLL_S)
        served_after_s = time.monotonic() - start_s
        assert self.model is not None
        # With no help of thinwire: the module that trains, and the files that vLLM is fed from.
        is_equal = digest_of(self.model.named_parameters()) == digest_of(
            load_folder(self.host_copy).items()
        )
        self.published.append(Published(version, label_of(version), served_after_s, is_equal))
        print(
            f"version {version.version:2}  step {version.step:2}  "
            f"{version.payload_bytes:11,} bytes  served after {served_after_s:5.1f} s  "
            f"{'equal to the trainer' if is_equal else 'NOT EQUAL to the trainer'}",
            flush=True,
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are still those of the newest version: compare what it was sampled with."""
        self._take_records(is_compared=True)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the reward that TRL logs."""
        logs = kwargs["logs"]
        if "reward" in logs:
            self.rewards[state.global_step] = logs["reward"]
            print(
                f"            step {state.global_step:2}  reward {logs['reward']:.3f}  "
                f"sampled {logs['sample/staleness_mean']:.1f} versions ago  "
                f"ratio {logs['ratio']:.3f}  clipped {logs['clip_ratio/region_mean']:.3f}",
                flush=True,
            )

    def close(self) -> None:
        """Count the last records."""
        self._take_records(is_compared=False)

    def rows(self) -> list[Row]:
        """Of every version."""
        found = []
        for one in self.published:
            has_any = one.label in self.agreement.versions
            told = self.agreement.of(one.label) if has_any else None
            found.append(
                Row(
                    version=one.version.version,
                    step=one.version.step,
                    payload_bytes=one.version.payload_bytes,
                    raw_bytes=one.version.raw_bytes,
                    served_after_s=one.served_after_s,
                    is_equal=one.is_equal,
                    reward=self.rewards.get(one.version.step, math.nan),
                    sampled_count=self.sampled[one.label],
                    compared_count=0 if told is None else told.token_count,
                    mean_difference=math.nan if told is None else told.mean_difference,
                    max_difference=math.nan if told is None else told.max_difference,
                    k3=math.nan if told is None else told.k3,
                )
            )
        return found

    def told(self, rows: Sequence[Row]) -> bool:
        """Print the closing table; returns whether everything is as it should be."""
        print()
        _print_cells(WIDTHS)
        for row in rows:
            _print_cells(_cells(row))
        used = [row for row in rows if row.sampled_count]
        is_all_equal = bool(rows) and all(row.is_equal for row in rows)
        strangers = set(self.sampled) - {one.label for one in self.published}
        far = [
            row.version
            for row in rows
            if row.compared_count >= _ENOUGH_TOKENS
            and not row.mean_difference < LARGEST_MEAN_DIFFERENCE
        ]
        moved = [row.payload_bytes for row in rows[1:]]
        print(
            f"\nthe trainer's weights equal those that vLLM's are taken from: "
            f"{'yes' if is_all_equal else 'NO'} ({sum(row.is_equal for row in rows)} of "
            f"{len(rows)} versions, BLAKE3)\n"
            f"tokens were sampled with {len(used)} versions, of these published: "
            f"{'all' if not strangers else f'NOT {sorted(strangers)}'}; "
            f"{self.crossing_count} completions began with one version and ended with another\n"
            f"vLLM's log-probabilities are those of the version: "
            f"{f'NOT of {far}' if far else 'yes'}\n"
            f"a step moved {sum(moved) / max(1, len(moved)):,.0f} bytes on average, "
            f"1/{rows[0].raw_bytes * len(moved) / max(1, sum(moved)):.0f} of the weights",
            flush=True,
        )
        return is_all_equal and not strangers and not far and len(used) > 1

    def _take_records(self, *, is_compared: bool) -> None:
        if not self.records.exists():
            return
        found, self._offset = record.read(self.records, self._offset)
        for one in found:
            for span in one.spans:
                self.sampled[span.version] += span.end - span.start
            self.crossing_count += len(one.spans) > 1
        newest = self.published[-1].label
        whole = [one for one in found if one.version == newest]
        if is_compared and whole:
            self._compare(whole[:_COMPARED])

    @torch.no_grad()
    def _compare(self, records: list[Record]) -> None:
        """Under the weights that sampled them; in BF16, as vLLM computes."""
        model: Any = self.model
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")  # the trainer's own wants packed rows
        try:
            for one in records:
                self.agreement.compare(one, self._log_probs(model, one))
        finally:
            model.set_attn_implementation(attention)

    def _log_probs(self, model: Any, one: Record) -> list[float]:
        tokens = torch.tensor([[*one.prompt, *one.tokens]])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens).logits[0, -len(one.tokens) - 1 : -1]
        chosen = logits.float().log_softmax(-1).gather(-1, torch.tensor(one.tokens)[:, None])
        return chosen[:, 0].tolist()  # type: ignore[no-any-return, unused-ignore]

    def _label(self) -> str:
        with urllib.request.urlopen(f"{self.engine}/weight_info", timeout=30) as answer:
            return str(json.load(answer)["weight_version"])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.version),
        str(row.step),
        f"{row.payload_bytes:,}",
        f"1/{row.raw_bytes / row.payload_bytes:.0f}",
        f"{row.served_after_s:.1f} s",
        "equal" if row.is_equal else "NO",
        f"{row.reward:.3f}",
        str(row.sampled_count),
        str(row.compared_count),
        f"{row.mean_difference:.4f}",
        f"{row.max_difference:.3f}",
        f"{row.k3:.5f}",
    )


def _print_cells(cells: Iterable[str]) -> None:
    line = (cell.rjust(width) for cell, width in zip(cells, WIDTHS.values(), strict=True))
    print("  ".join(line))
