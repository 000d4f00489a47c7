"""`make bench-1000` on a run of three steps: what it prints, and that no two runs ever mix."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from thinwire.bench import PEER_NAMES, Report, Row, as_tensor, available_peers
from thinwire.bench.framing import pack
from thinwire.bench.report import BoundParts

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_1000.py"
MISSING = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(
        f"{' and '.join(MISSING)} missing: the run is trained with them",
        allow_module_level=True,
    )

sys.path.insert(0, str(PROGRAM.parent))  # a program, not an installed package

import bench_1000  # noqa: E402

SETTINGS = {**bench_1000.SETTINGS, "steps": 3, "pretrain_steps": 2}
STEPS = ["0000", "0001", "0002", "0003"]


class Printed(NamedTuple):
    """A first, whole call: its folder, and what it wrote to stdout, stderr and the JSON file."""

    out: Path
    stdout: str
    stderr: str
    content: dict[str, Any]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Printed]:
    folder = tmp_path_factory.mktemp("bench_1000")
    out, json_path = folder / "out", folder / "made" / "report.json"
    # What a recording leaves that was killed at step 9.
    (out / "part" / "decoder-adamw-lr1e-6" / "0009").mkdir(parents=True)
    command = [sys.executable, str(PROGRAM), "--out", str(out), "--json", str(json_path)]
    command += ["--steps", "3", "--pretrain-steps", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    yield Printed(out, done.stdout, done.stderr, json.loads(json_path.read_text()))
    shutil.rmtree(folder)


def test_tables(printed: Printed) -> None:
    names = [peer.name for peer in available_peers()[0]]
    rows = {row["name"]: row for row in printed.content["rows"]}
    assert list(rows) == ["class-conditional bound", "thinwire", *names, "memcpy"]
    assert set(printed.content["skipped"]) == set(PEER_NAMES) - set(names)
    assert all(len(rows[name]["step_payload_bytes"]) == 3 for name in ("thinwire", *names))
    assert printed.content["run"]["settings"] == SETTINGS

    table, by_period, by_octave, totals = printed.stdout.strip().split("\n\n| ")
    assert "Mean over 3 steps of 29 tensors, 4.4 MB raw" in table
    assert by_period.startswith("steps | changed %")
    assert by_period.splitlines()[2].startswith("| 1 to 3 |")
    assert by_octave.startswith("size of the weight | ")
    raw_bytes = 3 * printed.content["raw_bytes"]
    full, *parts = totals.splitlines()[2:]
    assert full == f"| 3 full checkpoints | {raw_bytes / 1e6:.2f} | - | 1.0 |"
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in parts}
    assert list(cells) == ["class-conditional bound", "thinwire", *names]
    for name in ("thinwire", *names):
        payload_bytes = sum(rows[name]["step_payload_bytes"])
        file_bytes = rows[name]["file_percent"] / 100 * raw_bytes
        assert cells[name] == [
            f"{payload_bytes / 1e6:.2f}",
            f"{file_bytes / 1e6:.2f}",
            f"{raw_bytes / payload_bytes:.1f}",
        ]
    assert "measuring of 3, " in printed.stderr
    assert "recording of 3, " not in printed.stderr  # no step of three is the twentieth


def test_a_killed_recording_begins_again(printed: Printed) -> None:
    assert "was never finished" in printed.stderr
    assert not (printed.out / "part").exists()
    assert sorted(path.name for path in (printed.out / "run").glob("0*")) == STEPS


def test_a_whole_run_is_kept(printed: Printed) -> None:
    before = (printed.out / "run" / "run.json").stat().st_mtime_ns
    run = bench_1000.record(printed.out, SETTINGS)
    assert run == printed.out / "run"
    assert (run / "run.json").stat().st_mtime_ns == before


def test_other_settings_are_refused(printed: Printed) -> None:
    with pytest.raises(SystemExit, match="run of other settings"):
        bench_1000.record(printed.out, {**SETTINGS, "seed": 1})
    assert (printed.out / "run" / "run.json").exists()


def test_two_do_not_record_at_once(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another process records"):
            bench_1000.record(tmp_path, SETTINGS)
    assert part.exists()


def test_a_failed_recording_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"make_corpus\.py failed"):
        bench_1000.record(tmp_path, {**SETTINGS, "steps": 0})
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_run_is_found(printed: Printed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(printed.out / "run", run)
    shutil.copy(run / "0001" / "model.safetensors", run / "0002" / "model.safetensors")
    steps = printed.content["run"]["steps"]
    with pytest.raises(SystemExit, match=r"run\.json has .* % changed, its checkpoints"):
        bench_1000.check_shares(steps, bench_1000.measure(run))
    shutil.rmtree(run / "0003")
    with pytest.raises(SystemExit, match=r"tells of 3 steps, 2 were"):
        bench_1000.check_shares(steps, bench_1000.measure(run))


def test_changes_by_the_size_of_the_weight(tmp_path: Path) -> None:
    words = {
        # 1.0 and its neighbour, 2^-9 twice, 2^-20: the outermost octaves take what lies outside.
        "0000": [0x3F80, 0x3B00, 0x3B00, 0x3580],
        "0001": [0x3F81, 0x3B01, 0x3B00, 0x3580],
        "0002": [0x3F81, 0x3B01, 0x3B00, 0x3582],
    }
    for step, bits in words.items():
        (tmp_path / "run" / step).mkdir(parents=True)
        weights = {"w": as_tensor("BF16", (4,), np.array(bits, np.uint16))}
        (tmp_path / "run" / step / "model.safetensors").write_bytes(pack(weights, {}))
    heading, _, *lines = bench_1000.by_octave(tmp_path / "run", 2.0**-16).splitlines()
    assert "changed %, first 2 steps | changed %, last 2 | x spacing / lr" in heading
    assert len(lines) == len(bench_1000.OCTAVES)
    assert lines[0] == "| below 2^-12 | 25.00 | 50.000 | 50.000 | - | 33.33 |"
    # One of four changed, times 2^-16 over a rate of as much.
    assert lines[4] == "| 2^-9 to 2^-8 | 50.00 | 25.000 | 25.000 | 0.250 | 33.33 |"
    assert lines[-1] == "| from 2^-5 | 25.00 | 50.000 | 50.000 | - | 33.33 |"
    assert all(line.endswith("| 0.00 | 0.000 | 0.000 | 0.000 | 0.00 |") for line in lines[5:-1])


def test_means_of_every_hundred() -> None:
    sizes = tuple(100 * (1 + step // 100) for step in range(250))
    report = Report(
        rows=(Row("thinwire", step_payload_bytes=sizes), Row("pulse", step_payload_bytes=sizes)),
        bound=BoundParts(0, 0, 0),
        step_count=250,
        tensor_count=1,
        raw_bytes=10_000,
        changed_percent=1,
        repetition_count=1,
        machine={},
    )
    steps = [{"changed_share": 0.01 + step // 100 / 100, "reward": 0.5} for step in range(250)]
    assert bench_1000.periods(steps, report).splitlines() == [
        "| steps | changed % | thinwire % | reward |",
        "| --- | ---: | ---: | ---: |",
        "| 1 to 100 | 1.000 | 1.0000 | 0.500 |",
        "| 101 to 200 | 2.000 | 2.0000 | 0.500 |",
        "| 201 to 250 | 3.000 | 3.0000 | 0.500 |",
    ]
