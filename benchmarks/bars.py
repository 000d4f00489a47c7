"""Every number of docs/benchmarks.md: sizes, speeds and memory, each beside the bar it is held to.

    python benchmarks/bars.py CORPUS [--json FILE] [--only PART,PART]

Parts: sizes, speed, threads, large, memory. CORPUS holds the three MiniLM runs (find_corpus.py).
Every payload is decoded and compared before its number counts. Speeds are medians of interleaved
repetitions: wall time against memcpy, CPU seconds against arc_v3 (the real package).
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thinwire import bench
from thinwire.bench.measure import check_round_trip
from thinwire.bench.ours import decode, decode_into, encode, load_checkpoint, make_our_row
from thinwire.bench.peers.arc import Arc
from thinwire.bench.tensors import Tensor
from thinwire.codec.delta import Delta
from thinwire.codec.write import Pair, write_delta

# arc_v3's payload, % of raw, mean over steps 8 to the end, its candidates all waited for.
ARC_V3_PERCENT = {"minilm-lr3e-7": 0.1294, "minilm-lr1e-6": 0.2540, "minilm-lr3e-6": 0.5793}
REPETITIONS = 9
Checkpoint = dict[str, Tensor]


class Bar(NamedTuple):
    """One measured number and the bound it must keep."""

    name: str
    value: float
    bound: float
    at_most: bool

    @property
    def holds(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def at_most(name: str, value: float, bound: float) -> Bar:
    return Bar(name, value, bound, at_most=True)


def at_least(name: str, value: float, bound: float) -> Bar:
    return Bar(name, value, bound, at_most=False)


def steps_of(corpus: Path, run: str) -> list[Path]:
    return sorted((corpus / run).glob("[0-9]*"))


def in_memory(path: Path) -> Checkpoint:
    """A checkpoint whose tensors lie in ordinary memory."""
    return {name: t._replace(words=t.words.copy()) for name, t in load_checkpoint(path).items()}


def checked(base: Checkpoint, new: Checkpoint) -> bytes:
    """The delta from base to new, after a round trip."""
    payload = encode(base, new)
    check_round_trip("thinwire", new, decode(base, payload))
    return payload


def raw_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.words.nbytes for tensor in checkpoint.values())


# -- sizes -------------------------------------------------------------------------------------


def sizes(corpus: Path) -> Iterator[Bar]:
    limits = {"minilm-lr3e-7": 0.24, "minilm-lr1e-6": 0.31, "minilm-lr3e-6": 0.40}
    bound_limits = {"minilm-lr1e-6": 1.08, "minilm-lr3e-6": 1.04}
    row = make_our_row()
    for run, limit in limits.items():
        steps = steps_of(corpus, run)[8:]
        file = sections = raw = bound = 0.0
        base = in_memory(steps[0])
        for step in steps[1:]:
            new = in_memory(step)
            payload = checked(base, new)
            file += len(payload)
            sections += row.section_bytes(payload)
            raw += raw_bytes(new)
            bound += bench.class_bound(base, new).payload_bytes
            base = new
        yield at_most(f"{run}: file / arc_v3", 100 * file / raw / ARC_V3_PERCENT[run], limit)
        if run in bound_limits:
            yield at_most(f"{run}: sections / bound", sections / bound, bound_limits[run])
    base, new = merged(corpus)
    ours = len(checked(base, new))
    yield at_most("14 steps merged: file / arc_v3", ours / arc_bytes(base, new), 0.41)
    noisy = dense(base)
    ours = len(checked(base, noisy))
    bound = bench.class_bound(base, noisy).payload_bytes
    # arc_v3 as it ships keeps what its candidates have ready in time; 0.46 was set against that.
    shipped = arc_bytes(base, noisy, wait=1.5)
    yield at_most("dense noise: file / arc_v3 as it ships", ours / shipped, 0.46)
    yield at_most("dense noise: file / arc_v3, waited for", ours / arc_bytes(base, noisy), 0.46)
    yield at_most("dense noise: bound / arc_v3, waited for", bound / arc_bytes(base, noisy), 0.46)
    rng = np.random.default_rng(0)
    random = {
        name: t._replace(words=rng.integers(0, 1 << 16, t.words.shape).astype(np.uint16))
        for name, t in base.items()
    }
    yield at_most("random bits: file / raw", len(checked(base, random)) / raw_bytes(base), 1.001)


def merged(corpus: Path) -> tuple[Checkpoint, Checkpoint]:
    steps = steps_of(corpus, "minilm-lr3e-6")
    return in_memory(steps[0]), in_memory(steps[14])


def dense(base: Checkpoint) -> Checkpoint:
    """Gaussian noise of 1e-4 on every weight, rounded back to BF16."""
    import ml_dtypes

    rng = np.random.default_rng(1)
    new = {}
    for name, tensor in base.items():
        weights = tensor.words.view(ml_dtypes.bfloat16).astype(np.float32)
        weights += rng.normal(0, 1e-4, weights.shape).astype(np.float32)
        new[name] = tensor._replace(words=weights.astype(ml_dtypes.bfloat16).view(np.uint16))
    return new


def arc_bytes(base: Checkpoint, new: Checkpoint, wait: float = 1000) -> int:
    """The payload bytes of arc_v3 over all tensors, checked by its own round trip.

    ``wait``: its candidates are given this many times what the first of them took.
    """
    arc = bench.PerTensor(Arc("arc_v3", wait))
    payload = arc.encode(base, new)
    check_round_trip("arc_v3", new, arc.decode(base, payload))
    return len(payload) - arc.framing_bytes(payload)


# -- speed -------------------------------------------------------------------------------------


def timed(action: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    action()
    return clock() - start


def speed(corpus: Path) -> Iterator[Bar]:
    steps = steps_of(corpus, "minilm-lr1e-6")
    base, new = in_memory(steps[12]), in_memory(steps[13])
    payload = checked(base, new)
    copies = {name: t.words.copy() for name, t in base.items()}
    wall: dict[str, list[float]] = {"memcpy": [], "encode": [], "decode": [], "decode_into": []}
    for _ in range(REPETITIONS):
        wall["memcpy"].append(timed(lambda: copy_all(copies, new), time.perf_counter))
        wall["encode"].append(timed(lambda: encode(base, new), time.perf_counter))
        wall["decode"].append(timed(lambda: decode(base, payload), time.perf_counter))
        target = {name: t._replace(words=t.words.copy()) for name, t in base.items()}
        wall["decode_into"].append(
            timed(lambda t=target: decode_into(t, payload), time.perf_counter)
        )
        check_round_trip("thinwire", new, target)
    median = {name: statistics.median(times) for name, times in wall.items()}
    yield at_least("encode / memcpy", median["memcpy"] / median["encode"], 0.20)
    yield at_least("decode_into / memcpy", median["memcpy"] / median["decode_into"], 0.33)
    yield at_least("decode / memcpy", median["memcpy"] / median["decode"], 0.25)
    yield from against_arc("lr 1e-6, 103 tensors", base, new, 25, 6)
    joined_base, joined_new = one_tensor(base), one_tensor(new)
    yield from against_arc("lr 1e-6, one tensor of 68 M", joined_base, joined_new, 8, 3.5)
    yield from against_arc("14 steps merged, 103 tensors", *merged(corpus), 9, 2.5)


def copy_all(copies: dict[str, np.ndarray], new: Checkpoint) -> None:
    for name, tensor in new.items():
        np.copyto(copies[name], tensor.words)


def one_tensor(checkpoint: Checkpoint, copies: int = 3) -> Checkpoint:
    words = np.concatenate([t.words.reshape(-1) for t in checkpoint.values()] * copies)
    return {"joined": Tensor("BF16", (words.size,), words)}


def against_arc(
    what: str, base: Checkpoint, new: Checkpoint, encode_bar: float, decode_bar: float
) -> Iterator[Bar]:
    """CPU seconds of arc_v3 over ours; arc_v3's threads count, as they do for its users."""
    arc = bench.make_peer("arc_v3")
    arc_payload, payload = arc.encode(base, new), checked(base, new)
    check_round_trip("arc_v3", new, arc.decode(base, arc_payload))
    cpu: dict[str, list[float]] = {name: [] for name in ("ae", "ad", "e", "d", "i")}
    for _ in range(3):
        cpu["ae"].append(timed(lambda: arc.encode(base, new), time.process_time))
        cpu["ad"].append(timed(lambda: arc.decode(base, arc_payload), time.process_time))
        for _ in range(3):
            cpu["e"].append(timed(lambda: encode(base, new), time.process_time))
            cpu["d"].append(timed(lambda: decode(base, payload), time.process_time))
            target = {name: t._replace(words=t.words.copy()) for name, t in base.items()}
            cpu["i"].append(timed(lambda t=target: decode_into(t, payload), time.process_time))
    median = {name: statistics.median(times) for name, times in cpu.items()}
    yield at_least(f"{what}: encode, times arc_v3", median["ae"] / median["e"], encode_bar)
    yield at_least(f"{what}: decode_into, times arc_v3", median["ad"] / median["i"], decode_bar)
    yield at_least(f"{what}: decode, times arc_v3", median["ad"] / median["d"], decode_bar)


def threads(corpus: Path) -> Iterator[Bar]:
    steps = steps_of(corpus, "minilm-lr1e-6")
    # Large enough that the fit of the tables, which runs on one thread, does not count.
    base, new = (one_tensor(in_memory(step), copies=12) for step in steps[12:14])
    bases = {"joined": base["joined"].words.view(np.uint8)}
    pairs = [
        Pair(
            "joined",
            "BF16",
            base["joined"].shape,
            bases["joined"],
            new["joined"].words.view(np.uint8),
        )
    ]
    out = np.empty_like(bases["joined"])

    def write(workers: int) -> bytes:
        file = io.BytesIO()
        write_delta(file, pairs, workers=workers)
        return file.getvalue()

    payload = write(1)
    if write(2) != payload:
        sys.exit("two threads wrote other bytes than one")

    def apply(workers: int) -> None:
        with Delta.open(payload) as delta:
            delta.apply(bases, lambda _: out, workers=workers)

    for name, action in (("encode", write), ("decode", apply)):
        one, two = [], []
        for _ in range(REPETITIONS):
            one.append(timed(lambda a=action: a(1), time.perf_counter))
            two.append(timed(lambda a=action: a(2), time.perf_counter))
        if not np.array_equal(out, pairs[0].new) and name == "decode":
            sys.exit("two threads decoded other bits than one")
        yield at_least(
            f"{name}: two threads / one", statistics.median(one) / statistics.median(two), 1.7
        )


# -- large models ------------------------------------------------------------------------------


def large(corpus: Path) -> Iterator[Bar]:
    """A billion weights in tensors of the size of large models', with MiniLM's statistics."""
    steps = steps_of(corpus, "minilm-lr1e-6")
    base, new = in_memory(steps[12]), in_memory(steps[13])
    rows = [
        np.concatenate([t.words.reshape(-1)[: 1 << 22] for t in c.values()]) for c in (base, new)
    ]
    width = rows[0].size
    pairs = [
        Pair(
            f"model.layers.{i}.weight",
            "BF16",
            (width,),
            rows[0].view(np.uint8),
            rows[1].view(np.uint8),
        )
        for i in range(-(-(1 << 30) // width))
    ]
    file = io.BytesIO()
    write_delta(file, pairs, workers=2)
    with Delta.open(file.getvalue()) as delta:
        sections = sum(e.payload_bytes for e in delta.tensors.values()) + sum(delta.group_bytes)
        share = 1 - sections / delta.file_bytes
    yield at_most(
        f"{len(pairs) * width / 1e9:.2f} G weights, {len(pairs)} tensors: index, digests, %",
        100 * share,
        1.0,
    )


MEMORY_CHILD = """
import sys, threading, time
from thinwire.checkpoint import apply_checkpoint, diff_checkpoint
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024
before, peak, done = anonymous(), 0.0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
base, new, delta, out = sys.argv[2:6]
if sys.argv[1] == "diff":
    diff_checkpoint(base, new, delta, workers=2)
else:
    apply_checkpoint(base, delta, out, workers=2)
done = True
thread.join()
print(peak - before)
"""


def memory(corpus: Path) -> Iterator[Bar]:
    """Anonymous memory beyond the mapped files while 1 GiB is diffed and applied."""
    from safetensors.numpy import save_file

    steps = steps_of(corpus, "minilm-lr1e-6")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        paths = [
            Path(folder) / name
            for name in ("base.safetensors", "new.safetensors", "delta.tw", "out.safetensors")
        ]
        for path, step in zip(paths, steps[12:14], strict=False):
            words = one_tensor(in_memory(step))["joined"].words.view(np.int16)
            save_file({f"layer.{i}": words for i in range(8)}, path)
        for job in ("diff", "apply"):
            command = [sys.executable, "-c", MEMORY_CHILD, job, *map(str, paths)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            yield at_most(f"{job} of 1 GiB: extra MiB", float(done.stdout), 128)
        if paths[1].read_bytes() != paths[3].read_bytes():
            sys.exit("the applied checkpoint differs")


PARTS: dict[str, Callable[[Path], Iterator[Bar]]] = {
    "sizes": sizes,
    "speed": speed,
    "threads": threads,
    "large": large,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    bars = []
    print("| measure | value | bar | |\n|---|---|---|---|")
    for part in options.only.split(","):
        for bar in PARTS[part](options.corpus):
            bars.append({**bar._asdict(), "holds": bar.holds})
            sign, mark = "<=" if bar.at_most else ">=", "yes" if bar.holds else "NO"
            print(
                f"| {bar.name} | {bar.value:.4g} | {sign} {bar.bound:g} | {mark} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(bars, indent=1))


if __name__ == "__main__":
    main()
