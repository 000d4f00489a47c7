"""The main job on real input: a real RL run, published and followed by processes of their own.

    python benchmarks/demo.py

A trainer publishes every checkpoint of the run into a store; two ``thinwire follow`` keep a folder
each at the newest version. One of them is killed with SIGKILL amid an update, and rejoins by
itself. Every version is compared with the trainer's checkpoint by SHA-256 of each file. Exits with
1 if anything is not bit-exact, or the stream is not whole in the end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from find_corpus import ROOT, find_corpus

THINWIRE = Path(sys.executable).with_name("thinwire")
WORK = ROOT / ".bench" / "demo"
URL = (WORK / "store").as_uri()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 60.0
COLUMNS = {
    "version": 7,
    "step": 4,
    "changed %": 9,
    "bytes": 10,
    "of full": 9,
    "of arc_v3": 9,
    "publish s": 9,
    "a: apply s": 10,
    "b: apply s": 10,
    "bit-exact": 9,
}


def trainer(url: str, folder: str) -> None:
    """The trainer's process: publishes each checkpoint whose path and step it is told."""
    from thinwire.publish import Publisher

    with Publisher(url, folder) as publisher:
        for line in sys.stdin:
            path, step = json.loads(line)
            start_s = time.perf_counter()
            version = publisher.publish(path, step=step)
            facts = {
                "publish_s": time.perf_counter() - start_s,
                "version": version.version,
                "kind": version.kind,
                "payload_bytes": version.payload_bytes,
                "raw_bytes": version.raw_bytes,
                "changed_percent": 100 * version.changed_count / version.word_count,
            }
            print(json.dumps(facts), flush=True)


def arc(*paths: str) -> None:
    """Print the payload of arc_v3 for each pair of paths, by the real package if it is here."""
    from thinwire.bench import MissingExtraError, make_peer
    from thinwire.bench.ours import load_checkpoint

    try:
        peer = make_peer("arc_v3")
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        return
    for base, new in zip(paths[::2], paths[1::2], strict=True):
        payload = peer.encode(load_checkpoint(Path(base)), load_checkpoint(Path(new)))
        # The header with names and checksums is left out, in its favour.
        print(json.dumps([new, len(payload) - peer.framing_bytes(payload)]), flush=True)


PROCESSES = {"trainer": trainer, "arc": arc}


def spawn(name: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """One of PROCESSES, in a process of its own."""
    command = [sys.executable, __file__, name, *map(str, arguments)]
    return subprocess.Popen(command, text=True, cwd=ROOT, env=ENVIRONMENT, **options)


def thinwire(*arguments: str | Path) -> bool:
    """Print a thinwire command as it would be typed, and run it; returns whether all was well."""
    print(f"\n$ thinwire {shlex.join(map(str, arguments))}", flush=True)
    found = subprocess.run([THINWIRE, *arguments], check=False, cwd=ROOT, env=ENVIRONMENT)
    return found.returncode == 0


class Trainer:
    """The trainer's process, told what to publish."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = spawn("trainer", URL, WORK / "trainer", **pipes)

    def begin(self, checkpoint: Path) -> None:
        line = json.dumps([str(checkpoint), int(checkpoint.name)])
        print(line, file=self._process.stdin, flush=True)

    def end(self) -> dict[str, Any]:
        """What it published."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the trainer failed")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)


class Side:
    """A follower: its process, its folder, and its log."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = WORK / f"follower-{name}"
        self._log = WORK / f"follower-{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [THINWIRE, "follow", URL, self.folder, "--poll", "0.02", "--json"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=log, env=ENVIRONMENT
            )

    def kill(self) -> None:
        """SIGKILL: it gets no chance to tidy up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def kill_amid_update(self, version: int) -> str:
        """Kill it while it writes a version into its folder; returns what it left."""
        redo = self.folder / ".thinwire-redo"
        while not redo.exists() and self.version() < version:
            self._check_running(version)
            time.sleep(0.0005)
        self.kill()
        is_amid = redo.exists() and self.version() < version
        left = f"half written, version {version} over" if is_amid else "at"
        return f"{left} version {self.version()}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def version(self) -> int:
        """What the mark in the folder says; it switches after the last byte is in place."""
        with suppress(FileNotFoundError, ValueError):
            return int(json.loads((self.folder / ".thinwire-mark").read_bytes())["version"])
        return 0

    def wait_for(self, version: int) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.version() < version:
            self._check_running(version)
            if time.monotonic() > deadline_s:
                sys.exit(f"follower {self.name} did not get to version {version}")
            time.sleep(0.002)

    def applied(self) -> list[dict[str, Any]]:
        """All that it did to its folder, from its log."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if event["event"] == "applied"]

    def apply_s(self, version: int) -> float:
        """How long it took to apply a version that it holds; its log may be a little late."""
        deadline_s = time.monotonic() + 1
        while time.monotonic() < deadline_s:
            for event in self.applied():
                if event["version"] == version:
                    return float(event["wall_s"])
            time.sleep(0.002)
        return float("nan")

    def _check_running(self, version: int) -> None:
        if self._process is None or self._process.poll() is not None:
            sys.exit(f"follower {self.name} ended before version {version}; see {self._log}")


def hashes_of(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by name: independent of thinwire's own digests."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }


def arc_bytes(steps: list[Path]) -> dict[str, int]:
    """arc_v3's payload of every step, two processes at a time; empty where the package is not."""
    pairs = [(str(base), str(new)) for base, new in itertools.pairwise(steps)]
    halves = [[path for pair in pairs[part::2] for path in pair] for part in (0, 1)]
    running = [spawn("arc", *half, stdout=subprocess.PIPE) for half in halves if half]
    lines = [line for process in running for line in process.communicate()[0].splitlines()]
    return dict(map(json.loads, lines))


def replay(steps: list[Path], arcs: dict[str, int]) -> bool:
    """Publish every step; returns whether all that was compared was the same."""
    sides = [Side("a"), Side("b")]
    b = sides[1]
    # The version that b is killed at, and the one that it is started again at.
    kill_at = max(2, len(steps) * 2 // 5 + 1)
    back_at = kill_at + max(1, len(steps) // 5)
    exact, delta_bytes = True, 0
    print_row(*COLUMNS)
    print_row(*("-" * width for width in COLUMNS.values()))
    trainer = Trainer()
    for side in sides:
        side.start()
    try:
        for version, checkpoint in enumerate(steps, 1):
            trainer.begin(checkpoint)
            if version == kill_at:
                left = b.kill_amid_update(version)
                print(f"  >>> follower b killed with SIGKILL; its folder is left {left}")
            made = trainer.end()
            if version == back_at:
                print("  >>> follower b started again, with the folder as it was left")
                b.start()
            up = [side for side in sides if side.is_running]
            for side in up:
                side.wait_for(version)
            wanted = hashes_of(checkpoint)
            is_exact = all(hashes_of(side.folder) == wanted for side in up)
            exact = exact and is_exact
            delta_bytes += made["payload_bytes"] if made["kind"] == "delta" else 0
            show(made, checkpoint, arcs, sides, is_exact)
            if version == back_at:
                ways = [e for e in b.applied() if e["base"] and e["version"] >= kill_at]
                shown = ", ".join(f"{e['base']} to {e['version']} ({e['kind']})" for e in ways)
                print(f"  >>> follower b rejoined by itself: {shown}", flush=True)
    finally:
        for side in sides:
            side.kill()
        trainer.close()
    whole = made["raw_bytes"] * (len(steps) - 1)
    compared = f"{whole:,} as full weights ({whole / delta_bytes:,.0f} times more)"
    if arcs:
        compared += f", {sum(arcs.values()):,} as arc_v3 ({sum(arcs.values()) / delta_bytes:.1f})"
    print(f"\nAll deltas: {delta_bytes:,} bytes; {compared}")
    return exact


def show(
    made: dict[str, Any], checkpoint: Path, arcs: dict[str, int], sides: list[Side], is_exact: bool
) -> None:
    """One row of the table."""
    payload, version = made["payload_bytes"], made["version"]
    arc_payload = arcs.get(str(checkpoint))
    is_delta = made["kind"] == "delta"
    print_row(
        str(version),
        str(int(checkpoint.name)),
        f"{made['changed_percent']:.3f}" if is_delta else made["kind"],
        f"{payload:,}",
        f"1/{made['raw_bytes'] / payload:,.0f}",
        f"{payload / arc_payload:.2f}" if arc_payload else "-",
        f"{made['publish_s']:.3f}",
        *(f"{side.apply_s(version):.3f}" if side.is_running else "killed" for side in sides),
        "yes" if is_exact else "NO",
    )


def print_row(*cells: str) -> None:
    line = (cell.rjust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True))
    print("  ".join(line), flush=True)


def join_late(newest: Path) -> bool:
    """A machine that comes when all is over; returns whether it has the same bits."""
    folder = WORK / "follower-late"
    is_right = thinwire("follow", URL, folder, "--once", "--log-level", "warning")
    exact = is_right and hashes_of(folder) == hashes_of(newest)
    print(f"a late joiner, from nothing: bit-exact: {'yes' if exact else 'NO'}")
    return exact


def main() -> None:
    start_s = time.monotonic()
    corpus = ROOT / ".bench" / "corpus"
    print(f"Corpus: {find_corpus(corpus)}")
    runs = sorted(path for path in corpus.iterdir() if path.is_dir())
    run = next((r for r in runs if "lr1e-6" in r.name), runs[0])
    steps = sorted(run.glob("[0-9]*"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    print(f"Run: {run.name}, {len(steps)} checkpoints")
    print("Measuring what arc_v3 would send, by the real package ...", flush=True)
    arcs = arc_bytes(steps)
    print(f"... {len(arcs)} steps, {time.monotonic() - start_s:.0f} s\n")

    exact = replay(steps, arcs)
    exact = join_late(steps[-1]) and exact
    thinwire("log", URL, "-n", "5")
    is_whole = thinwire("fsck", URL, "--deep")
    print(
        f"\nbit-exact: {'yes' if exact else 'NO'} (SHA-256 of every file, at every version, in the "
        f"folder of every follower that ran); {time.monotonic() - start_s:.0f} s"
    )
    if not exact or not is_whole:
        sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        PROCESSES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
