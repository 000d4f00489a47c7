"""diff, apply, inspect and verify on sound input: what they print and what they leave."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from thinwire import __version__, encode

from .conftest import Pair, Run, read_files, read_json


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"thinwire {__version__}\n"


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    result = run()
    assert result.exit_code == 2
    assert "inspect" in result.output


@pytest.mark.parametrize("command", ["diff", "apply", "inspect", "verify", "bench"])
def test_help(command: str, run: Run) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_diff(pair: Pair, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.tw"
    result = run("diff", pair.base, pair.new, "-o", out, "--workers", 2)
    assert result.exit_code == 0
    assert out.read_bytes() == pair.delta.read_bytes()
    assert result.stdout.count("\n") == 1
    assert f"{out.stat().st_size:,} bytes" in result.stdout
    assert result.stderr == ""


def test_diff_json(pair: Pair, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.tw"
    content = read_json(run("diff", pair.base, pair.new, "-o", out, "--json"))
    assert list(content) == [
        *["base", "new", "delta", "file_bytes", "raw_bytes"],
        *["changed_count", "tensor_count", "wall_s"],
    ]
    assert content["file_bytes"] == out.stat().st_size
    assert content["delta"] == str(out)
    assert content["tensor_count"] == 6


def test_diff_overwrites_only_when_asked(pair: Pair, run: Run) -> None:
    pair.delta.write_bytes(b"precious")
    assert run("diff", pair.base, pair.new, "-o", pair.delta).exit_code == 5
    assert pair.delta.read_bytes() == b"precious"
    assert run("diff", pair.base, pair.new, "-o", pair.delta, "--overwrite").exit_code == 0
    assert pair.delta.read_bytes() != b"precious"


def test_diff_zstd_level_is_used(pair: Pair, tmp_path: Path, run: Run) -> None:
    text = np.random.default_rng(0).integers(0, 16, 60_000).astype(np.uint8).tobytes()
    (pair.new / "tokenizer.json").write_bytes(text * 3)
    sizes = []
    for level in (1, 19):
        out = tmp_path / f"{level}.tw"
        assert run("diff", pair.base, pair.new, "-o", out, "--zstd-level", level).exit_code == 0
        sizes.append(out.stat().st_size)
    assert sizes[0] > sizes[1]


def test_apply(pair: Pair, tmp_path: Path, run: Run) -> None:
    before = read_files(pair.base)
    result = run("apply", pair.base, pair.delta, "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert read_files(tmp_path / "out") == read_files(pair.new)
    assert read_files(pair.base) == before
    assert "holds the new checkpoint" in result.stdout


def test_apply_json(pair: Pair, tmp_path: Path, run: Run) -> None:
    result = run("apply", pair.base, pair.delta, "-o", tmp_path / "out", "--json")
    content = read_json(result)
    assert list(content) == [
        *["base", "delta", "out", "in_place", "file_bytes", "raw_bytes"],
        *["changed_count", "tensor_count", "wall_s"],
    ]
    assert content["in_place"] is False
    assert content["out"] == str(tmp_path / "out")
    assert content["tensor_count"] == 5


def test_apply_in_place(pair: Pair, run: Run) -> None:
    content = read_json(run("apply", pair.base, pair.delta, "--in-place", "--json"))
    assert content["in_place"] is True
    assert content["out"] == str(pair.base)
    assert read_files(pair.base) == read_files(pair.new)
    again = run("apply", pair.base, pair.delta, "--in-place")
    assert again.exit_code == 0
    assert "is now the new checkpoint" in again.stdout


def test_apply_wants_one_target(pair: Pair, tmp_path: Path, run: Run) -> None:
    for targets in ([], ["--in-place", "-o", tmp_path / "out"]):
        result = run("apply", pair.base, pair.delta, *targets)
        assert result.exit_code == 2
        assert "-o OUT or --in-place" in result.stderr
    assert not (tmp_path / "out").exists()


def test_inspect_json(pair: Pair, run: Run) -> None:
    content = read_json(run("inspect", pair.delta, "--json"))
    assert list(content) == [
        *["delta", "format_version", "file_bytes", "raw_bytes", "index_bytes", "changed_count"],
        *["word_count", "changed_percent", "bits_per_change", "tensors", "groups", "steps"],
        *["attachments", "tables"],
    ]
    tensors = {tensor["name"]: tensor for tensor in content["tensors"]}
    assert {name: tensor["kind"] for name, tensor in tensors.items()} == {
        **{"large": "delta", "small": "delta", "still": "same"},
        **{"scale": "delta", "added": "full", "gone": "removed"},
    }
    large = tensors["large"]
    assert list(large) == [
        *["name", "kind", "dtype", "shape", "raw_bytes", "word_count", "changed_count"],
        *["changed_percent", "payload_bytes", "bits_per_change", "methods", "group"],
        *["base_digest", "new_digest"],
    ]
    assert large["shape"] == [300, 250]
    assert large["word_count"] == 75_000
    assert large["changed_percent"] == pytest.approx(1.0, abs=0.2)
    assert re.fullmatch("[0-9a-f]{16}", large["base_digest"])
    assert tensors["gone"]["new_digest"] is None
    group = content["groups"][tensors["small"]["group"]]
    assert tensors["small"]["payload_bytes"] is None
    assert group == {**group, "dtype": "BF16", "tensor_count": 2}
    assert group["changed_count"] == tensors["small"]["changed_count"]
    assert sum(map(sum, content["steps"].values())) == content["changed_count"]
    stored = {a["name"]: a["stored_bytes"] is not None for a in content["attachments"]}
    assert stored == {"model.safetensors": True, "config.json": True, "vocab.txt": False}
    assert len(content["tables"][0]["rate_codes"]) == 32
    sections = sum(tensor["payload_bytes"] or 0 for tensor in content["tensors"])
    sections += sum(group["payload_bytes"] for group in content["groups"])
    sections += sum(a["stored_bytes"] or 0 for a in content["attachments"])
    assert content["index_bytes"] + sections + 8 == content["file_bytes"]


def test_inspect_with_base_counts_steps_per_tensor(pair: Pair, run: Run) -> None:
    content = read_json(run("inspect", pair.delta, "--base", pair.base, "--json"))
    tensors = {tensor["name"]: tensor for tensor in content["tensors"]}
    for tensor in tensors.values():
        assert sum(map(sum, tensor["steps"].values())) == tensor["changed_count"]
    for direction in ("down", "up"):
        summed = sum(sum(tensor["steps"][direction]) for tensor in tensors.values())
        assert summed == sum(content["steps"][direction])
    assert tensors["still"]["steps"] == {"down": [], "up": []}


def test_inspect_text(pair: Pair, run: Run) -> None:
    plain = run("inspect", pair.delta)
    assert plain.exit_code == 0
    lines = plain.stdout.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("tensor"))
    table = lines[heading : lines.index("", heading)]
    assert table[-1].startswith("total: 6 tensors")
    assert len({len(line) for line in table}) == 1
    assert re.search(r"^large +delta +BF16 +300x250 +class +\d", plain.stdout, re.MULTILINE)
    assert "(group 0: 2 tensors)" in plain.stdout
    assert "1 step %" not in plain.stdout
    assert "\x1b" not in plain.stdout
    assert "1 step %" in run("inspect", pair.delta, "--base", pair.base).stdout


def test_inspect_top(pair: Pair, run: Run) -> None:
    def table(*arguments: object) -> list[str]:
        lines = run("inspect", pair.delta, *arguments).stdout.splitlines()
        heading = next(number for number, line in enumerate(lines) if line.startswith("tensor "))
        return lines[heading + 1 : lines.index("", heading)]

    whole = table()
    order = ["large", "added", "small", "still", "scale", "gone"]
    assert [row.split()[0] for row in whole[:6]] != order
    rest = {0: "... and 6 more tensors", 2: "... and 4 more tensors", 5: "... and 1 more tensor"}
    for top in (0, 2, 5, 6, 100):
        rows = table("--top", top)
        # Members of groups have no bytes of their own; the lines of groups are always there.
        assert [row.split()[0] for row in rows[:top][:6]] == order[:top]
        assert rows[min(top, 6) : -3] == ([rest[top]] if top in rest else [])
        assert [row.split()[-1] for row in rows[-3:]] == [row.split()[-1] for row in whole[-3:]]
    everything = run("inspect", pair.delta, "--json").stdout
    assert run("inspect", pair.delta, "--json", "--top", 1).stdout == everything
    assert "4 and more %" in run("inspect", pair.delta, "--base", pair.base, "--top", 1).stdout


def test_inspect_of_a_single_array(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(1)
    base, new = rng.integers(0, 1 << 16, (2, 70_000)).astype(np.uint16)
    delta = tmp_path / "array.tw"
    delta.write_bytes(encode(base, new, dtype="BF16"))
    result = run("inspect", delta)
    assert result.exit_code == 0
    assert "(the array)" in result.stdout
    # Random bits: the class coder gives up, and yet every change is counted.
    document = read_json(run("inspect", delta, "--json"))
    assert sum(map(sum, document["steps"].values())) == int((base != new).sum())


def test_inspect_of_an_empty_delta(tmp_path: Path, run: Run) -> None:
    delta = tmp_path / "empty.tw"
    delta.write_bytes(encode(np.empty(0, np.uint16), np.empty(0, np.uint16), dtype="BF16"))
    assert run("inspect", delta).exit_code == 0
    assert read_json(run("inspect", delta, "--json"))["bits_per_change"] is None


def test_verify(pair: Pair, run: Run) -> None:
    alone = run("verify", pair.delta)
    assert alone.exit_code == 0
    assert "are what their digests say" in alone.stdout
    for workers in ([], ["--workers", 2]):
        fitting = run("verify", pair.delta, "--base", pair.base, *workers)
        assert fitting.exit_code == 0
        assert "5 of 6 tensors rebuilt" in fitting.stdout


def test_verify_json(pair: Pair, run: Run) -> None:
    keys = ["delta", "base", "is_sound", "fits_base", "file_bytes", "tensor_count"]
    content = read_json(run("verify", pair.delta, "--base", pair.base, "--json"))
    assert list(content) == [*keys, "rebuilt_tensor_count"]
    assert (content["is_sound"], content["fits_base"]) == (True, True)
    assert content["rebuilt_tensor_count"] == 5
    assert read_json(run("verify", pair.delta, "--json"))["fits_base"] is None
