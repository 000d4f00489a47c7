"""Holds the capacity model against what it models, and tries 1 T weights where no data are needed.

    python benchmarks/capacity_check.py runs      # a real publisher, store and followers
    python benchmarks/capacity_check.py speeds    # the coder, by changed share
    python benchmarks/capacity_check.py limits    # names and shapes of 1 T weights, made up
    python benchmarks/capacity_check.py large     # a tensor of more than 2**32 weights

Tables are Markdown, as they stand in docs/scale.md. Speeds are of the machine it runs on.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from capacity_limits import large, limits
from thinwire.capacity.check import Row, Trial, move_for, run_throttled, run_trial, to_bf16
from thinwire.capacity.scenario import MAX_DECODE_THREADS, Scenario
from thinwire.codec.chunk import Spec, decode_changes, decode_chunk, encode_chunk
from thinwire.codec.digest import CHUNK_WORDS
from thinwire.codec.dtypes import dtype_named
from thinwire.codec.plan import Pair
from thinwire.codec.tables import fit_tables

MIB = 1 << 20


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["runs", "speeds", "limits", "large"])
    part = parser.parse_args().part
    {"runs": runs, "speeds": speeds, "limits": limits, "large": large}[part]()


# --- runs ---------------------------------------------------------------------------------------


def runs() -> None:
    """Predicted and measured, of three models and two links."""
    trials = {
        "8 M weights, 2 % changed": Scenario(params=8 * MIB, tensors=16, changed=0.02),
        "32 M, 2 %, shards of 8 MiB of weights": Scenario(
            params=32 * MIB, tensors=64, changed=0.02, shard_raw_bytes=8 * MIB
        ),
        "96 M, 25 %, ranges": Scenario(params=96 * MIB, tensors=24, changed=0.25),
    }
    for name, scenario in trials.items():
        with scratch() as folder:
            table(f"{name}; 2 versions, 2 followers", run_trial(Trial(scenario), folder))
    for name, bits_per_s, rtt_s, changed in (
        ("16 M, 2 %, over 10 Mbit/s and 50 ms", 10e6, 0.05, 0.02),
        ("16 M, 25 %, over 100 Mbit/s and 150 ms", 100e6, 0.15, 0.25),
    ):
        scenario = Scenario(
            params=16 * MIB,
            tensors=16,
            changed=changed,
            has_relay=False,
            has_hub=False,
            link_bits_per_s=bits_per_s,
            local_bits_per_s=bits_per_s,
            rtt_s=rtt_s,
            # As many as a follower takes by itself, on this machine.
            decode_threads=min(MAX_DECODE_THREADS, os.cpu_count() or 1),
        )
        with scratch() as folder:
            table(f"{name}; median of 5", run_throttled(Trial(scenario, versions=5), folder))


def table(title: str, rows: Sequence[Row]) -> None:
    """Print predicted, measured, ratio."""
    print(f"\n**{title}**\n\n| | predicted | measured | measured / predicted |")
    print("| --- | ---: | ---: | ---: |")
    for row in rows:
        unit = f" {row.unit}" if row.unit in ("s", "bits") else ""
        digits = 2 if unit else 0
        print(
            f"| {row.name} | {row.predicted:,.{digits}f}{unit} | {row.measured:,.{digits}f}{unit}"
            f" | {row.ratio:.3f} |",
            flush=True,
        )


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one run."""
    folder = Path(tempfile.mkdtemp(prefix="thinwire-capacity-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- speeds -------------------------------------------------------------------------------------


def speeds() -> None:
    """One thread, chunks of a large tensor: nanoseconds a word are a + b x changed share."""
    words = 16 * MIB
    random = np.random.default_rng(0)
    masters = random.normal(0, 0.02, words).astype(np.float32)
    base = to_bf16(masters)
    print("| changed % | bits | encode MB/s | find changes MB/s | decode MB/s |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    found: list[tuple[float, float, float]] = []
    for share in (0.0, 0.002, 0.01, 0.02, 0.05, 0.1, 0.2):
        move = np.float32(move_for(masters[:65536], share)) if share else np.float32(0)
        signs = random.integers(0, 2, words, dtype=np.int8) * 2 - 1
        new = to_bf16((masters + signs.astype(np.float32) * move).astype(np.float32))
        changed = int((base != new).sum())
        encode_s, changes_s, decode_s, size = coded(base.view(np.uint8), new.view(np.uint8))
        megabytes = 2 * words / 1e6
        print(
            f"| {100 * changed / words:.3f} | {8 * size / max(1, changed):.2f} | "
            f"{megabytes / encode_s:.0f} | {megabytes / changes_s:.0f} | "
            f"{megabytes / decode_s:.0f} |",
            flush=True,
        )
        found.append((changed / words, encode_s / words * 1e9, changes_s / words * 1e9))
    shares = np.array([[1.0, share] for share, _, _ in found[:5]])
    for name, at in (("encode", 1), ("find changes", 2)):
        fit = np.linalg.lstsq(shares, np.array([row[at] for row in found[:5]]), rcond=None)[0]
        print(f"{name}: {fit[0]:.2f} ns a word and {fit[1]:.0f} ns a change (up to 5 % changed)")


def coded(base: np.ndarray, new: np.ndarray) -> tuple[float, float, float, int]:
    """Seconds to encode, to find the changes again, and to decode; and bytes."""
    row = dtype_named("BF16")
    pair = Pair("w", "BF16", (base.size // 2,), base, new)
    tables = b"".join(fit_tables("BF16", [pair]))
    step = 2 * CHUNK_WORDS
    spans = [slice(at, at + step) for at in range(0, base.size, step)]
    best = [math.inf] * 3
    for _ in range(3):
        start_s = time.process_time()
        data = [encode_chunk(row, tables, base[s], new[s], Spec()).data for s in spans]
        best[0] = min(best[0], time.process_time() - start_s)
        sections = [np.frombuffer(one, np.uint8) for one in data]
        start_s = time.process_time()
        for s, section in zip(spans, sections, strict=True):
            decode_changes(row, tables, base[s], section)
        best[1] = min(best[1], time.process_time() - start_s)
        out = np.empty(step, np.uint8)
        start_s = time.process_time()
        for s, section in zip(spans, sections, strict=True):
            decode_chunk(row, tables, base[s], section, out)
        best[2] = min(best[2], time.process_time() - start_s)
    return best[0], best[1], best[2], sum(map(len, data))


if __name__ == "__main__":
    main()
