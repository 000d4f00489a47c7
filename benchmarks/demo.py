"""The main job on real input, through the command line as a user would run it.

    python benchmarks/demo.py

Two checkpoints of a real RL run go in, a delta comes out, and the new checkpoint comes back bit for
bit. Ends with the bench table over the run's last steps.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from find_corpus import ROOT, find_corpus

THINWIRE = Path(sys.executable).with_name("thinwire")
WORK = ROOT / ".bench" / "demo"


def run(*arguments: str | Path) -> None:
    """Print a thinwire command as it would be typed, and run it."""
    shown = [str(a.relative_to(ROOT)) if isinstance(a, Path) else a for a in arguments]
    print(f"\n$ thinwire {shlex.join(shown)}", flush=True)
    subprocess.run([THINWIRE, *arguments], check=True, cwd=ROOT)


def digest_of(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by name: independent of thinwire's own digests."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def main() -> None:
    corpus = ROOT / ".bench" / "corpus"
    print(f"Corpus: {find_corpus(corpus)}")
    runs = sorted(path for path in corpus.iterdir() if path.is_dir())
    steps = sorted(next((r for r in runs if "lr1e-6" in r.name), runs[0]).glob("[0-9]*"))
    base, new = steps[-2:]
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    delta, out = WORK / "step.tw", WORK / "applied"

    run("diff", base, new, "-o", delta)
    run("inspect", delta)
    run("verify", delta, "--base", base)
    run("apply", base, delta, "-o", out)
    exact = digest_of(out) == digest_of(new)
    whole = sum(path.stat().st_size for path in new.iterdir())
    print(
        f"\n{delta.stat().st_size:,} bytes instead of {whole:,} "
        f"({whole / delta.stat().st_size:,.0f} times less); "
        f"bit-exact: {'yes' if exact else 'NO'} (SHA-256 of every file)"
    )
    if not exact:
        sys.exit(1)
    run("bench", *steps[-4:])


if __name__ == "__main__":
    main()
