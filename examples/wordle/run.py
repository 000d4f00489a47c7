"""Asynchronous GRPO on a word game over HTTP: 256 sessions at once, and weights by a stream alone.

    python examples/wordle/run.py            # `make wordle`
    python examples/wordle/run.py --quick    # 64 sessions at once, half a minute

Four processes: the environment, `thinwire serve`, which follows the stream and samples, the
rollouts, which play, and the trainer, which is this one. It ends with a report, and with 1 unless
the reward rose (--quick is too short for that), all sessions were open at once, and the sampler had
the trainer's weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))

import torch  # noqa: E402
from closing import closing_report  # noqa: E402
from game import WORDS  # noqa: E402
from player import make_player, save_files  # noqa: E402
from processes import free_port, process, wait_until_up  # noqa: E402
from trainer import Rollouts, Settings, StepRecord, publish, train  # noqa: E402

from thinwire.torch import TorchPublisher  # noqa: E402

FULL = Settings(
    word_count=32,
    steps=100,
    groups=16,
    group_size=8,
    concurrent_groups=32,
    learning_rate=2e-3,
    teach_steps=700,
    max_staleness=4,
    required_rise=0.1,
)
# Too few steps to tell whether the reward rises.
QUICK = replace(
    FULL,
    word_count=12,
    steps=5,
    groups=4,
    concurrent_groups=8,
    teach_steps=100,
    required_rise=None,
)
MODEL_NAME = "player"
UP_WITHIN_S = 120.0


@contextmanager
def environment(word_count: int, log: Path) -> Iterator[str]:
    """The environment's process; yields its address."""
    port = free_port()
    command = [sys.executable, str(HERE / "environment.py"), str(port), str(word_count)]
    with process(command, log, {"PYTHONPATH": str(HERE.parent)}) as started:
        wait_until_up(f"http://127.0.0.1:{port}", started, log, UP_WITHIN_S)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def sampler(url: str, folder: Path, sessions: int, log: Path) -> Iterator[str]:
    """`thinwire serve`, which follows the stream; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "thinwire", "serve", f"--follow={url}", f"--port={port}"]
    command += [f"--folder={folder}", f"--name={MODEL_NAME}", "--poll=0.1", "--prove"]
    # In FP32, as the trainer computes: what is left of the difference is how old a version is.
    command += ["--dtype=float32", f"--max-rows={sessions}", f"--max-requests={2 * sessions}"]
    with process(command, log, {"OMP_NUM_THREADS": "1"}) as started:
        wait_until_up(f"http://127.0.0.1:{port}", started, log, UP_WITHIN_S)
        yield f"http://127.0.0.1:{port}"


def stats_of(address: str) -> dict[str, Any]:
    """What the environment counted."""
    with urllib.request.urlopen(f"{address}/stats", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def run(url: str, work: Path, settings: Settings) -> tuple[Any, list[StepRecord], dict[str, Any]]:
    """The run: returns the policy, a record of each step, and what the environment counted."""
    sessions = settings.concurrent_groups * settings.group_size
    model = make_player(WORDS[: settings.word_count], settings.teach_steps, settings.seed)
    save_files(model, work / "files")
    with ExitStack() as stack:
        publisher = stack.enter_context(
            TorchPublisher(
                model, url, folder=work / "trainer", files=work / "files", when_busy="block"
            )
        )
        first = publish(publisher, model, 0)
        first.ticket.wait()
        game = stack.enter_context(environment(settings.word_count, work / "environment.log"))
        endpoint = stack.enter_context(
            sampler(url, work / "served", sessions, work / "sampler.log")
        )
        print(f"the stream is {url}; {sessions} sessions at once", flush=True)
        rollouts = Rollouts(game, endpoint, MODEL_NAME, settings, work / "rollouts.log")
        stack.callback(rollouts.close)
        records = train(model, publisher, rollouts, first, settings)
        return model, records, stats_of(game)


def main() -> None:
    """The run, then the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 sessions, and 5 steps")
    parser.add_argument("--steps", type=int, help="how many")
    parser.add_argument("--max-staleness", type=int, help="versions; older turns are dropped")
    parser.add_argument("--url", help="the stream; a folder in --work unless given; must be new")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench" / "wordle")
    options = parser.parse_args()
    # Ended from outside, it ends what it started all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)  # the sampler has the other core
    start_s = time.monotonic()
    settings = QUICK if options.quick else FULL
    given = {"steps": options.steps, "max_staleness": options.max_staleness}
    settings = replace(settings, **{name: n for name, n in given.items() if n is not None})
    work = options.work / "run"
    shutil.rmtree(work, ignore_errors=True)
    (work / "files").mkdir(parents=True)
    url = options.url or (work / "store").as_uri()
    model, records, stats = run(url, work, settings)
    trained_s = time.monotonic() - start_s
    is_right = closing_report(model, records, stats, url, work, settings)
    print(f"{time.monotonic() - start_s:.0f} s, {trained_s:.0f} s of them before the report")
    if not is_right:
        sys.exit(1)


if __name__ == "__main__":
    main()
