"""What publishing takes of memory, and what importing it imports: in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

MIB = 1 << 20
WORDS = 24 * MIB
LIMIT_BYTES = 16 * MIB
# Beside the baseline and the captured changes: a few chunks on their way, and torch's own.
WORKING_BYTES = 64 * MIB

MEASURE = """
import json, os, sys, threading, time, tracemalloc
os.fsync = lambda fd: None
import torch
from thinwire.torch import TorchPublisher

folder, words, limit, baseline = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
weights = torch.empty(words, dtype=torch.bfloat16).normal_(0, 0.02)
bits = weights.view(torch.int16)

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

peak = [0]

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

def sparse():
    bits[::100] ^= 1

def dense():  # nothing of it can be compressed
    for part in bits.split(1 << 20):
        part ^= torch.randint(-(1 << 15), 1 << 15, part.shape, dtype=torch.int16)

before = anonymous()
threading.Thread(target=watch, daemon=True).start()
tracemalloc.start()
found = {}
with TorchPublisher(
    lambda: {"a": weights[: words // 2], "b": weights[words // 2 :]},
    folder + "/stream",
    folder=folder + "/own",
    maintain=False,
    baseline=baseline,
    memory_limit_bytes=limit,
) as publisher:
    for name, change in (("first", lambda: None), ("sparse", sparse), ("dense", dense)):
        if baseline == "disk" and name == "dense":
            continue
        change()
        peak[0] = anonymous()
        tracemalloc.reset_peak()
        ticket = publisher.publish(0)
        assert ticket.wait(300) is not None
        found[name] = {
            "anonymous": peak[0] - before,
            "traced": tracemalloc.get_traced_memory()[1],
            "payload": ticket.payload_bytes,
            "changed": ticket.changed_count,
        }
    found["baseline"] = publisher.baseline_bytes
print(json.dumps(found))
"""


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
class TestMemory:
    def measured(self, folder: Path, baseline: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(MEASURE, folder, WORDS, LIMIT_BYTES, baseline))
        return found

    def test_the_baseline_and_a_constant(self, tmp_path: Path) -> None:
        """Also where every word changed: neither captured changes nor coded ones pile up."""
        found = self.measured(tmp_path, "memory")
        assert found["baseline"] == 2 * WORDS
        assert found["sparse"]["changed"] == -(-WORDS // 100)
        assert found["dense"]["payload"] > 1.5 * WORDS, "it was the hardest case"
        for step in ("first", "sparse", "dense"):
            limit = found["baseline"] + LIMIT_BYTES + WORKING_BYTES
            assert found[step]["traced"] < limit, (step, found)
            assert found[step]["anonymous"] < limit, (step, found)

    def test_a_baseline_on_disk_takes_none(self, tmp_path: Path) -> None:
        found = self.measured(tmp_path, "disk")
        for step in ("first", "sparse"):
            assert found[step]["anonymous"] < LIMIT_BYTES + WORKING_BYTES, (step, found)


IMPORTS = """
import sys
import thinwire, thinwire.publish.rank_publisher
assert "torch" not in sys.modules
names = ("triton", "transformers", "trl", "peft", "vllm", "safetensors")
assert not [name for name in names if name in sys.modules]
import torch
before = set(sys.modules)
import thinwire.torch
assert thinwire.torch.TorchPublisher and thinwire.torch.Ticket
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & set(names), new
"""


def test_nothing_is_imported_that_was_not_asked_for() -> None:
    run(IMPORTS)
