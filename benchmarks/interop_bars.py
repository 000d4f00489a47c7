"""Our ARC writers beside Fireworks' own package, on the corpus: sizes and speeds, in one run.

    OMP_NUM_THREADS=1 python benchmarks/interop_bars.py CORPUS [--json FILE] [--steps N]
    OMP_NUM_THREADS=1 python benchmarks/interop_bars.py CORPUS --threads 1 2 [--json FILE]

CORPUS holds runs of consecutive checkpoints (find_corpus.py). arc_v3 of the package waits for all
of its candidates and keeps the smallest. Speeds are CPU seconds of the process, medians of
interleaved repetitions over all tensors of a step; each side decodes what the other wrote, and the
result is compared, before a number counts. Exits with 1 where a bar is missed.

With --threads something else is measured: how long writing a version takes, in every format that a
mirror or a conversion writes, on so many threads. Times are wall clock; medians of interleaved
repetitions. Before a number counts, what was written is the same bytes for each number of threads,
and is read back, tensor by tensor, and compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.bench.corpus import find_runs, steady_steps
from thinwire.bench.framing import pack
from thinwire.bench.peer import Encoded, MissingExtraError
from thinwire.bench.peers.arc import Arc, OwnArc
from thinwire.bench.tensors import Checkpoint, Tensor, as_checkpoint, raw_bytes
from thinwire.checkpoint import Checkpoint as OpenedCheckpoint
from thinwire.checkpoint import SafetensorsFile
from thinwire.interop.change import CheckpointChange
from thinwire.interop.formats import format_named

FORMATS = ("arc_v1", "arc_v2", "arc_v3")
# How much faster than the package we are at least, in CPU time. arc_v1 has no bar: it is zlib's.
BARS = {"arc_v1": None, "arc_v2": 1.0, "arc_v3": 3.0}

# What is written with --threads: the format, and what its writer is asked for.
WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("slime", {}),
    ("skyrl", {}),
    ("trl", {}),
    ("grail", {}),
    *(("fireworks", {"compression_format": name}) for name in FORMATS),
]
MADE_TENSORS, MADE_WORDS, MADE_CHANGED = 32, 2 << 20, 0.02


class Side(NamedTuple):
    """One side's numbers for one run of the corpus: bytes of all steps, medians of CPU seconds."""

    payload_bytes: int
    encode_s: float
    decode_s: float


def load(path: Path) -> Checkpoint:
    file = SafetensorsFile.open(path / "model.safetensors")
    return as_checkpoint({name: tuple(tensor) for name, tensor in file.tensors.items()})


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start_s = time.process_time()
    result = call()
    return result, time.process_time() - start_s


def encode_all(peer: Any, base: Checkpoint, new: Checkpoint) -> dict[str, Encoded]:
    return {name: peer.encode(base[name], tensor) for name, tensor in new.items()}


def decode_all(peer: Any, base: Checkpoint, encoded: dict[str, Encoded]) -> dict[str, Any]:
    return {name: peer.decode(base[name], one) for name, one in encoded.items()}


def check(new: Checkpoint, words: dict[str, Any], what: str) -> None:
    for name, tensor in new.items():
        if not np.array_equal(tensor.words, words[name]):
            sys.exit(f"{what}: tensor {name} came back with other bits")


def measure_run(name: str, steps: list[Path], repetition_count: int) -> dict[str, Any]:
    """Both sides over all steps of a run, with what is larger tensor by tensor."""
    peers = {"real": Arc(name), "ours": OwnArc(name)}
    times: dict[str, list[float]] = {}
    sizes = dict.fromkeys(peers, 0)
    totals = {f"{side}_{what}": 0.0 for side in peers for what in ("encode", "decode")}
    larger_count = tensor_count = raw = 0
    base = load(steps[0])
    for step in steps[1:]:
        new = load(step)
        raw += raw_bytes(new)
        times = {key: [] for key in totals}
        payloads: dict[str, dict[str, Encoded]] = {}
        for _ in range(repetition_count):
            for side, peer in peers.items():
                payloads[side], spent_s = timed(partial(encode_all, peer, base, new))
                times[f"{side}_encode"].append(spent_s)
            for side, other in (("ours", "real"), ("real", "ours")):
                words, spent_s = timed(partial(decode_all, peers[side], base, payloads[other]))
                times[f"{side}_decode"].append(spent_s)
                check(new, words, f"{name}: {side} reads {other}")
        for key, spent in times.items():
            totals[key] += statistics.median(spent)
        for tensor, mine in payloads["ours"].items():
            tensor_count += 1
            larger_count += len(mine.payload) > len(payloads["real"][tensor].payload)
        for side in peers:
            sizes[side] += sum(len(one.payload) for one in payloads[side].values())
        base = new
    sides = {
        side: Side(sizes[side], totals[f"{side}_encode"], totals[f"{side}_decode"])._asdict()
        for side in peers
    }
    return {
        "format": name,
        "raw_bytes": raw,
        "tensor_count": tensor_count,
        "larger_count": larger_count,
        "times_encode": totals["real_encode"] / totals["ours_encode"],
        "times_decode": totals["real_decode"] / totals["ours_decode"],
        **sides,
    }


def made_step(folder: Path) -> list[Path]:
    """Two checkpoints of 32 equal tensors of BF16, 128 MiB, 2 % of whose words moved by a step."""
    rng = np.random.default_rng(0)
    steps = []
    states: dict[str, dict[str, Tensor]] = {"old": {}, "new": {}}
    shape = (1024, MADE_WORDS // 1024)
    for number in range(MADE_TENSORS):
        old = (rng.standard_normal(MADE_WORDS, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        moved = (rng.random(MADE_WORDS) < MADE_CHANGED).astype(np.uint16)
        for side, words in (("old", old), ("new", old + moved)):
            states[side][f"layers.{number}.weight"] = Tensor("BF16", shape, words)
    for side, tensors in states.items():
        steps.append(folder / side)
        steps[-1].mkdir()
        (steps[-1] / "model.safetensors").write_bytes(pack(tensors, {"format": "pt"}))
    return steps


def write_version(
    change: CheckpointChange, name: str, options: dict[str, Any], workers: int
) -> tuple[dict[str, bytes], float]:
    """The files of the version by their keys, once they were read back; wall seconds of writing."""
    row = format_named(name)
    with tempfile.TemporaryDirectory() as folder:
        out, chain = Path(folder) / "out", Path(folder) / "chain"
        out.mkdir()
        start_s = time.perf_counter()
        files = row.write_delta(change, out, version=1, base_version=0, workers=workers, **options)
        spent_s = time.perf_counter() - start_s
        for file in files:
            (chain / file.key).parent.mkdir(parents=True, exist_ok=True)
            file.path.rename(chain / file.key)
        path = chain / files[0].key
        with row.open_delta(path.parent if row.has_folders else path) as delta:
            for tensor, new in change.new.tensors.items():
                old = change.base.tensors[tensor]
                found = delta.new_tensor(tensor, old) if tensor in delta.tensors else old
                if not np.array_equal(found.data, new.data):
                    sys.exit(f"{name}: tensor {tensor} came back with other bits")
        return {file.key: (chain / file.key).read_bytes() for file in files}, spent_s


def measure_threads(
    run: str, steps: list[Path], counts: list[int], repetition_count: int
) -> list[dict[str, Any]]:
    """Every format, each number of threads."""
    paths = [step / "model.safetensors" for step in steps]
    change = CheckpointChange(*(OpenedCheckpoint.open(path) for path in paths))
    raw = sum(tensor.data.size for tensor in change.new.tensors.values())
    rows = []
    for name, options in WRITTEN:
        spent: dict[int, list[float]] = {count: [] for count in counts}
        first: dict[str, bytes] | None = None
        for _ in range(repetition_count):
            for count in counts:
                files, spent_s = write_version(change, name, options, count)
                first = first or files
                if files != first:
                    sys.exit(f"{name}: other bytes on {count} threads")
                spent[count].append(spent_s)
        medians = {count: statistics.median(times) for count, times in spent.items()}
        label = options.get("compression_format", name)
        rows.append({"run": run, "format": label, "raw_bytes": raw, "wall_s": medians})
        speeds = "  ".join(f"{raw / 1e6 / s:7.0f} MB/s" for s in medians.values())
        print(f"{run:16} {label:8} {speeds}  {medians[counts[0]] / medians[counts[-1]]:5.2f}x")
    return rows


def compare_threads(corpus: Path, counts: list[int], repetition_count: int) -> list[dict[str, Any]]:
    """One step of the corpus, of 103 unequal tensors, and one of equal ones."""
    print("run              format  " + "".join(f"{count:9} threads" for count in counts))
    run, steps = next(iter(find_runs(corpus).items()))
    rows = measure_threads(run, steady_steps(steps)[:2], counts, repetition_count)
    with tempfile.TemporaryDirectory() as folder:
        rows += measure_threads("made", made_step(Path(folder)), counts, repetition_count)
    return rows


def is_met(row: dict[str, Any]) -> bool:
    bar = BARS[row["format"]]
    return row["larger_count"] == 0 and (bar is None or row["times_encode"] >= bar)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=2, help="steps of each run")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", help="compare these numbers of threads")
    args = parser.parse_args()
    if args.threads:
        rows = compare_threads(args.corpus, args.threads, args.repetitions)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")
        return 0
    try:
        Arc("arc_v3")
    except MissingExtraError as error:
        sys.exit(f"nothing to compare with: {error}")
    rows = []
    print("run              format  payload real  payload ours  larger  encode  decode  bar")
    for run, all_steps in find_runs(args.corpus).items():
        steps = steady_steps(all_steps)[: args.steps + 1]
        for name in FORMATS:
            row = {"run": run} | measure_run(name, steps, args.repetitions)
            row["is_met"] = is_met(row)
            rows.append(row)
            print(
                f"{run:16} {name:7} {row['real']['payload_bytes']:12} "
                f"{row['ours']['payload_bytes']:13} {row['larger_count']:7} "
                f"{row['times_encode']:6.2f}x {row['times_decode']:6.2f}x  "
                f"{'met' if row['is_met'] else 'MISSED'}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["is_met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
