"""The report of examples/regions says what was written down: ages, traffic, wrong weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> None:
    """In a process of its own, since the example's modules have names that others have, too."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "examples" / "regions",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_ages_are_counted_by_the_time_that_they_last() -> None:
    run("""
from records import Age, ages_of, quantile, stays_of, without

commits = [{"version": n + 1, "step": n, "at_s": 10.0 * n} for n in range(4)]
served = [
    {"kind": "Served", "version": 1, "digest": "a", "at_s": 2.0},
    {"kind": "Fetched", "version": 2, "at_s": 11.0},
    {"kind": "Served", "version": 2, "digest": "b", "at_s": 12.0},
    {"kind": "Served", "version": 4, "digest": "d", "at_s": 35.0},
]
stays = stays_of(served, 40.0)
assert [(s.version, s.start_s, s.stop_s) for s in stays] == [(1, 2, 12), (2, 12, 35), (4, 35, 40)]
ages = ages_of(stays, commits)
assert [(a.steps, a.seconds) for a in ages] == [(0, 8), (1, 2), (0, 8), (1, 10), (2, 5), (0, 5)]
assert quantile(ages, 0.5) == 0
assert quantile(ages, 0.6) == 1
assert quantile(ages, 0.95) == 2
assert quantile([], 0.5) is None
kept = without(ages, 25.0, 36.0)
assert sum(age.seconds for age in kept) == 38.0 - 11.0
assert max(age.steps for age in kept) == 1
assert without([Age(3, 1.0, 2.0)], 0.0, 5.0) == []
""")


FACTS = """
from bars import cut_of, judge, traffic_of, wrong_of
from records import Facts, Fetched, Mark

def mark(name, at_s, s3, hub):
    routes = {"s3": {"up": 0, "down": s3}, "hub": {"up": hub, "down": 0}}
    routes["sampler-1"] = {"up": 7 * s3, "down": 0}
    return Mark(name, at_s, {"asia": routes}, {"asia": None}, {})

def facts(digests=("a", "b", "c"), s3=1500, stale_s=1.0, is_right=True):
    commits = [
        {"kind": "commit", "version": n + 1, "step": n, "digest": d, "at_s": 10.0 * n,
         "payload_bytes": 1000 * n}
        for n, d in enumerate("abc")
    ]
    served = [
        {"kind": "Served", "version": n + 1, "digest": d, "at_s": 10.0 * n + stale_s}
        for n, d in enumerate(digests)
    ]
    found = Facts("made up", "a model", False, "a test", remote="asia")
    found.regions = {"asia-1": "asia"}
    found.engines = {"asia-1": "serve"}
    found.samplers = {"asia-1": served}
    found.ends = {"asia-1": 30.0}
    found.trainer = [*commits, {"kind": "end", "unknown": []}]
    found.events = [(15.0, "cut asia off"), (16.0, "restored asia")]
    found.marks = {
        "start": mark("start", 0.0, 0, 0),
        "ready": mark("ready", 2.0, 100_000, 0),
        "end": mark("end", 30.0, 100_000 + s3, 300),
    }
    found.fetched = [
        Fetched("asia", "full", (2, 3), 200_000, 4.0, is_right),
        Fetched("asia", "arc_v3", (3,), 3_000, 1.0, True),
    ]
    return found

def verdicts(found):
    return [bar.is_met for bar in judge(found)]
"""


def test_traffic_is_of_a_step_and_of_the_whole_run() -> None:
    run(
        FACTS
        + """
traffic = traffic_of(facts(), "asia")
assert traffic.first_bytes == 100_000 and traffic.versions == 2
assert traffic.step_bytes == 900 and traffic.full_bytes == 100_000 and traffic.arc_bytes == 3000
assert traffic.same_bytes == 2000
assert abs(traffic.saved_share - 0.991) < 1e-9
assert abs(traffic.run_saved_share - (1 - 101_800 / 300_000)) < 1e-9
assert traffic.rollout_bytes == 7 * 1500
"""
    )


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        ("", [True, True, True]),
        ("s3=1_800", [False, True, True]),
        ("digests=('a', 'x', 'c')", [True, True, False]),
        ("digests=()", [True, False, False]),
        ("is_right=False", [True, True, False]),
    ],
)
def test_each_bar_can_fail(change: str, verdicts: list[bool]) -> None:
    run(f"{FACTS}\nassert verdicts(facts({change})) == {verdicts}, judge(facts({change}))")


def test_a_sampler_that_lags_fails_unless_it_is_cut_off() -> None:
    run(
        FACTS
        + """
found = facts()
found.trainer[:3] = [
    {"kind": "commit", "version": n + 1, "step": n, "digest": "abc"[min(n, 2)], "at_s": 1.0 * n,
     "payload_bytes": 1}
    for n in range(6)
]
found.samplers["asia-1"] = found.samplers["asia-1"][:1]
assert verdicts(found)[1] is False
found.events = [(3.0, "cut asia off"), (40.0, "restored asia")]
assert verdicts(found)[1] is True
# It never comes back to the newest version: that is no cut any more.
found.events = [(3.0, "cut asia off"), (4.0, "restored asia")]
assert verdicts(found)[1] is False
caught_up = {"kind": "Served", "version": 6, "digest": "c", "at_s": 20.0}
found.samplers["asia-1"].append(caught_up)
assert cut_of(found, "asia-1") == (3.0, 20.0)
assert verdicts(found)[1] is True
"""
    )


def test_a_version_that_the_trainer_never_published_is_told() -> None:
    run(
        FACTS
        + """
found = facts()
found.trainer[-1]["unknown"] = ["asia-1: 9-abc"]
assert verdicts(found) == [True, True, False]
found = facts()
found.samplers["asia-1"].append({"kind": "Served", "version": 9, "digest": "a", "at_s": 29.0})
assert verdicts(found) == [True, True, False]
assert wrong_of(found) == (4, ["asia-1: version 9"])
"""
    )


def test_fused_weights_of_a_llama_are_taken_apart() -> None:
    pytest.importorskip("torch", reason="torch is not installed: NOT RUN")
    run("""
import sys
sys.path.append("..")
import torch
from types import SimpleNamespace
from canonical import unfused

config = SimpleNamespace(
    num_attention_heads=4, num_key_value_heads=2, head_dim=None, hidden_size=8, vocab_size=5
)
fused = {
    "model.embed_tokens.weight": torch.arange(48.0).reshape(6, 8),
    "model.layers.0.self_attn.qkv_proj.weight": torch.arange(128.0).reshape(16, 8),
    "model.layers.0.mlp.gate_up_proj.weight": torch.arange(96.0).reshape(12, 8),
    "model.norm.weight": torch.ones(8),
}
found = dict(unfused(fused.items(), config))
layer = "model.layers.0"
rows = {n: len(found[f"{layer}.self_attn.{n}_proj.weight"]) for n in "qkv"}
assert rows == {"q": 8, "k": 4, "v": 4}
assert found[f"{layer}.self_attn.k_proj.weight"][0, 0] == 64
assert found[f"{layer}.mlp.up_proj.weight"][0, 0] == 48
assert len(found["model.embed_tokens.weight"]) == 5
assert len(found) == 7
""")
