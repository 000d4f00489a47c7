"""Runs the tests of other systems' formats and writes the table of docs/interop.md from them.

    python benchmarks/interop_table.py [--check]

A cell stands only for tests that ran and passed here. With ``--check`` nothing is written and no
test runs: the table is compared with the claims of the tests that are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "interop.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADINGS = ("format", "read", "write", "what it cannot carry", "tested against")


class Row(NamedTuple):
    """One row: the name that claims use, what the reader sees, and what is lost in this format."""

    name: str
    title: str
    lacks: str


_ARC = "which version, which base; a digest of the base; tensors that come, go or change shape"
ROWS = (
    Row("arc_v1", "Fireworks `arc_v1`, `xor_one_to_one_zlib`", _ARC),
    Row("arc_v2", "Fireworks `arc_v2`, `xor_one_to_one_zstd`", _ARC),
    Row("arc_v3", "Fireworks `arc_v3`", _ARC),
    Row(
        "hot-load",
        "Fireworks hot load (API and bucket)",
        "metadata of a version; a proof of what is served beyond Adler-32",
    ),
    Row(
        "coreweave",
        "CoreWeave hot load (fields of its API)",
        "the same; more than 128 deltas in a chain",
    ),
    Row(
        "slime",
        "slime and miles `weight_v` (xor, overwrite)",
        "dtype, shape, a digest of the base; tensors that come, go or change shape; config and "
        "tokenizer in deltas; who wrote it",
    ),
    Row(
        "trl-v1",
        "TRL delta sync, first layout",
        "the same, and any checksum, and the base's version; dtypes but BF16",
    ),
    Row(
        "trl-v2",
        "TRL delta sync, second layout (`raw`, `gap_delta`)",
        "as the first; `nvcomp_cascaded` is refused",
    ),
    Row(
        "skyrl",
        "SkyRL delta checkpoints",
        "full versions; a digest of the base; tensors that come, go or change shape",
    ),
    Row(
        "grail",
        "grail (PULSE 2, 3, 3.1)",
        "dtypes but BF16, F16, F32; a digest of the base; its signature is not checked",
    ),
    Row("nemo", "NeMo-RL sparse refit", "FP8; late joiners; a digest of the base"),
    Row("hf", "Hugging Face checkpoints", "deltas"),
)


def claims(run: bool) -> list[dict[str, Any]]:
    """The claims of the tests, with their outcomes if they are run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "claims.json"
        command = [sys.executable, "-m", "pytest", "tests/interop", "--claims", str(path)]
        command += [] if run else ["--collect-only"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
        rows: list[dict[str, Any]] = json.loads(path.read_text())
    for row in rows:
        # Every one must have run: a skipped proof is none.
        if run and (not row["outcomes"] or set(row["outcomes"]) != {"passed"}):
            raise SystemExit(f"not proved here: {row}")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    unknown = {row["format"] for row in rows} - {row.name for row in ROWS}
    if unknown:
        raise SystemExit(f"claims of formats without a row: {sorted(unknown)}")
    for row in ROWS:
        found = [claim for claim in rows if claim["format"] == row.name]
        cells = [row.title]
        cells += ["yes" if _has(found, verb) else "no" for verb in ("read", "write")]
        against = [
            f"{verb}: {'; '.join(claim['against'] for claim in found if claim['verb'] == verb)}"
            for verb in ("read", "write", "refuse")
            if _has(found, verb)
        ]
        lines.append(f"| {' | '.join([*cells, row.lacks, '. '.join(against)])} |")
    return "\n".join(lines)


def _has(found: list[dict[str, Any]], verb: str) -> bool:
    return any(claim["verb"] == verb for claim in found)


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    new = f"{head}{BEGIN}\n{table(claims(run=not options.check))}\n{END}{tail}"
    if options.check:
        if new != text:
            print("docs/interop.md is not what the tests claim: run `make interop-table`")
            return 1
        return 0
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
