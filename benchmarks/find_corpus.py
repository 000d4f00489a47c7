"""Put consecutive checkpoints of real RL runs into a folder: the project's corpus, else our own.

    python benchmarks/find_corpus.py OUT

Does nothing where OUT holds runs already. The project's corpus lies beside the checkout, in
../shared/corpus; other clones train the quick policy of benchmarks/corpus, which needs torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "corpus" / "unpack.py"
QUICK = ROOT / "benchmarks" / "corpus" / "make_corpus.py"


def find_corpus(out: Path) -> str:
    """Fill ``out`` with runs where it has none; returns what they are, in words."""
    if any(out.glob("*/*/model.safetensors")):
        return f"the corpus in {out}"
    out.mkdir(parents=True, exist_ok=True)
    if SHARED.exists():
        subprocess.run([sys.executable, str(SHARED), str(out)], check=True, stdout=sys.stderr)
        return "MiniLM, 22.7 M weights, three GRPO runs (../shared/corpus)"
    print("no ../shared/corpus here: training the quick policy instead", file=sys.stderr)
    command = [sys.executable, str(QUICK), "--out", str(out)]
    subprocess.run(
        command,
        check=True,
        stdout=sys.stderr,
        cwd=QUICK.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return "a 2.2 M weight decoder, one GRPO run (benchmarks/corpus)"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(find_corpus(Path(sys.argv[1]).resolve()), file=sys.stderr)
