"""plan: what it prints, and what it refuses."""

from __future__ import annotations

import inspect
import json

import pytest

from thinwire.capacity import facts
from thinwire.cli import plan

from .conftest import Run, read_json

TRILLION = [
    "--params",
    "1e12",
    "--regions",
    4,
    "--replicas",
    1000,
    "--changed",
    0.02,
    "--versions",
    30,
]
SMALL = ["--params", "1e9", "--regions", 2, "--replicas", 20, "--changed", 0.01, "--versions", 30]


def test_tables(run: Run) -> None:
    result = run("plan", *TRILLION, "--ranks", 64)
    assert result.exit_code == 0
    assert result.stderr == ""
    for words in (
        "1,000,000,000,000",
        "time to all replicas",
        "requests at the bucket",
        "a version as a full checkpoint",
        "EXCEEDED: a version on a replica (",
        "note: ",
    ):
        assert words in result.stdout, words


def test_json(run: Run) -> None:
    arguments = [*TRILLION, "--ranks", 64, "--egress-price", 0.05, "--link", "10Gbit"]
    content = read_json(run("plan", *arguments, "--json"))
    assert content["scenario"]["params"] == 10**12
    assert content["scenario"]["link_bits_per_s"] == 10e9
    assert content["payload"]["delta"]["count"] == 64
    assert content["cost"]["egress"] == pytest.approx(content["traffic"]["cross"] / 1e9 * 0.05)
    assert content["day_cost"]["egress"] == pytest.approx(content["cost"]["egress"] * 720)
    assert content["timing"]["total_s"] > 0
    assert {"ok", "exceeded"} <= {limit["status"] for limit in content["limits"]}
    assert content["arc3_cost"]["egress"] > content["cost"]["egress"]


def test_every_option_arrives(run: Run) -> None:
    """tests/capacity/test_model.py says that each of them counts."""
    options: dict[str, tuple[object, str, object]] = {
        "--dtype": ("fp8", "dtype", "F8_E4M3"),
        "--tensors": (1000, "tensors", 1000),
        "--step-time": ("10m", "step_s", 600.0),
        "--ranks": (64, "ranks", 64),
        "--held": ("whole", "held", "whole"),
        "--bits-per-change": (5.0, "bits_per_change", 5.0),
        "--versions": (20, "versions", 20),
        "--joins-per-day": (7, "joins_per_day", 7.0),
        "--uplink": ("1Gbit", "uplink_bits_per_s", 1e9),
        "--link": ("100Mbit", "link_bits_per_s", 1e8),
        "--local-link": ("2Tbit", "local_bits_per_s", 2e12),
        "--rtt": ("10ms", "rtt_s", 0.01),
        "--no-relay": (None, "has_relay", False),
        "--relays": (2, "relays", 2),
        "--relay-speed": ("3GB", "relay_bytes_per_s", 3e9),
        "--unsigned": (None, "is_signed", False),
        "--no-hub": (None, "has_hub", False),
        "--poll": (3, "poll_s", 3.0),
        "--cpu": (2, "cpu", 2.0),
        "--encode-threads": (3, "encode_threads", 3),
        "--decode-threads": (5, "decode_threads", 5),
        "--maintain-threads": (3, "maintain_threads", 3),
        "--disk": ("1GB", "disk_bytes_per_s", 1e9),
        "--engine-ranks": (6, "engine_ranks", 6),
    }
    policy = ["--anchor-every", 5, "--merge-levels", "2,4", "--keep-versions", 9]
    prices = ["--put-price", 1, "--get-price", 2, "--storage-price", 3, "--egress-price", 4]
    given: list[object] = [*policy, "--keep-age", "1h", *prices]
    for name, (value, _, _) in options.items():
        given += [name] if value is None else [name, value]
    found = read_json(run("plan", *SMALL, *given, "--json"))["scenario"]
    for name, (_, field, wanted) in options.items():
        assert found[field] == pytest.approx(wanted), name
    assert list(found["prices"].values()) == [4, 1, 2, 3]
    assert found["policy"]["anchor_every"] == 5
    assert found["policy"]["merge_levels"] == [2, 4]
    assert (found["policy"]["keep_versions"], found["policy"]["keep_age_s"]) == (9, 3600)
    none = read_json(run("plan", *SMALL, "--merge-levels", "none", "--json"))
    assert none["scenario"]["policy"]["merge_levels"] == []


def test_simulation(run: Run) -> None:
    arguments = [*SMALL, "--simulate", 10, "--cut", "1:2m:5m", "--crash", 0.5, "--seed", 3]
    result = run("plan", *arguments)
    assert result.exit_code == 0
    assert "simulated, 10 versions" in result.stdout
    assert "region 1" in result.stdout
    content = read_json(run("plan", *arguments, "--json"))
    again = json.loads(run("plan", *arguments, "--json").stdout)
    assert content["simulation"] == again["simulation"]
    assert [region["region"] for region in content["simulation"]["regions"]] == [0, 1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--changed", 2], "--changed is 2"),
        (["--link", "0Gbit"], "--link is 0"),
        (["--local-link", "0Gbit"], "--local-link is 0"),
        (["--uplink", "0Gbit"], "--uplink is 0"),
        (["--step-time", "0s"], "--step-time is 0"),
        (["--disk", "0GB"], "--disk is 0"),
        (["--relay-speed", "0GB"], "--relay-speed is 0"),
        (["--poll", 0], "--poll is 0"),
        (["--cpu", -1], "--cpu is -1"),
        (["--decode-threads", 0], "--decode-threads is 0"),
        (["--bits-per-change", "nan"], "--bits-per-change is nan"),
        (["--egress-price", -1], "--egress-price is -1"),
        (["--put-price", "nan"], "--put-price is nan"),
        (["--get-price", "inf"], "--get-price is inf"),
        (["--storage-price", -1], "--storage-price is -1"),
        (["--regions", 21], "--regions is 21 hint: Count those with replicas"),
        (["--simulate", 5, "--crash", 2], "--crash is 2"),
        (["--simulate", 5, "--crash", "nan"], "--crash is nan"),
        (["--crash", "nan"], "belong to a simulation"),
        (["--params", "1.5"], "not a whole number"),
        (["--params", "nan"], "not a whole number"),
        (["--params", "many"], "not a number"),
        (["--link", "5GB"], "not a rate"),
        (["--rtt", "soon"], "not a time"),
        (["--dtype", "bf17"], "bf17"),
        (["--held", "half"], "parts or whole"),
        (["--merge-levels", "4,x"], "not a list"),
        (["--merge-levels", "4,6"], "multiple"),
        (["--cut", "0:1m:2m"], "belong to a simulation"),
        (["--simulate", 5, "--cut", "7:1m:2m"], "REGION:FROM:TO"),
        (["--simulate", 5, "--cut", "0:2m:1m"], "ends before"),
        (["--simulate", 10**6], "at most"),
    ],
)
def test_refused(more: list[object], words: str, run: Run) -> None:
    result = run("plan", *SMALL, *more)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_refusal_for_machines(run: Run) -> None:
    result = run("plan", *SMALL, "--put-price", "nan", "--json")
    assert json.loads(result.stdout)["error"]["context"] == {"option": "--put-price"}


def test_every_name_of_an_option_is_one() -> None:
    parameters = inspect.signature(plan.plan).parameters
    for option in plan._OPTIONS.values():
        assert option.removeprefix("--").replace("-", "_") in parameters
    assert parameters["relay_speed"].default == "1GB"
    assert plan.parse_disk("1GB") == facts.RELAY_BYTES_PER_S.value


def test_help_says_how_it_ends(run: Run) -> None:
    words = " ".join(run("plan", "--help").stdout.split())
    assert "Limits that are exceeded are no error" in words
    assert "exit code is 0" in words
