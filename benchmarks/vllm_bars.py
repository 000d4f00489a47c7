"""The rollout side's numbers in docs/benchmarks.md: what an update costs inside vLLM's pause.

    python benchmarks/vllm_bars.py MODEL CHECKPOINT [CHECKPOINT ...] [--json OUT]
    python benchmarks/vllm_bars.py --made --tensor-parallel 2 [--json OUT]

Run it in the environment of ``make test-engines``. MODEL is what vLLM starts from, the CHECKPOINTs
what it is brought to, one after the other. With --made, a Llama with random weights is taken, of
which one word in 333 changes by a bit at each step: SmolLM2's nine heads cannot be halved.

Each step is taken by the index map, by the engine's loader from memory and by vLLM's own patches,
and each must leave the same bits: every parameter is compared with those of vLLM's own loader, and
the log-probabilities of a prompt must change, before any number counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
)

ROUNDS = 9
PROMPT = [1841, 314, 260, 3575, 282, 4649, 47]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="*")
    parser.add_argument("--made", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if len(asked.checkpoints) < 2 and not asked.made:
        parser.error("give a model and a checkpoint, or --made")
    with tempfile.TemporaryDirectory() as scratch:
        folders = make_model(Path(scratch)) if asked.made else asked.checkpoints
        run(folders, Path(scratch), asked)


def run(folders: list[Path], scratch: Path, asked: argparse.Namespace) -> None:
    """Start vLLM from the first folder and measure the ways to the others."""
    from vllm import LLM

    llm = LLM(
        str(folders[0]),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=asked.tensor_parallel,
        weight_transfer_config={"backend": "thinwire"},
        num_gpu_blocks_override=256,
        **({"distributed_executor_backend": "uni"} if asked.tensor_parallel == 1 else {}),
    )
    before = _probe(llm)
    paths = [str(path) for path in folders]
    found = llm.apply_model(partial(_measure, folders=paths, scratch=str(scratch)))
    after = _probe(llm)
    if before == after:
        sys.exit("the log-probabilities did not change: nothing was measured")
    for rank, facts in enumerate(found):
        _report(rank, facts)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"ranks": found, "probe": after}, indent=1) + "\n")


def make_model(folder: Path) -> list[Path]:
    """A Llama of 100 M random weights, and two steps of it."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    folders = [folder / f"step-{number}" for number in range(3)]
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folders[0])
    for old, new in pairwise(folders):
        shutil.copytree(old, new)
        tensors = load_file(new / "model.safetensors")
        for tensor in tensors.values():
            words = tensor.view(torch.int16).view(-1)
            words[torch.randperm(words.numel())[: max(1, words.numel() // 333)]] ^= 1
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    return folders


def _probe(llm: Any) -> list[float]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=16, temperature=0, logprobs=1, detokenize=False)
    prompt = {"prompt_token_ids": PROMPT}
    (answer,) = llm.generate([prompt], params, use_tqdm=False)
    found = answer.outputs[0]
    return [
        step[token].logprob for token, step in zip(found.token_ids, found.logprobs, strict=True)
    ]


def _measure(model: Any, folders: list[str], scratch: str) -> dict[str, Any]:
    """Runs in the worker, on its model."""
    import torch

    from thinwire.checkpoint import Checkpoint
    from thinwire.engines.vllm.loading import loader_of
    from thinwire.torch.attached import AttachedModel
    from thinwire.torch.live import named_tensors

    loader = loader_of(model, None, 0)
    tensors = named_tensors(model)
    buffers = [name for name, _ in model.named_buffers()]
    copies = [Checkpoint.open(path, ignore_subfolders=True) for path in folders]
    by_way: dict[str, AttachedModel] = {}
    facts: dict[str, Any] = {}
    rank = f"rank-{os.getpid()}"
    for way in ("dense", "patches", "map"):
        attached = AttachedModel(tensors, loader, Path(scratch) / rank, [way], buffers=buffers)
        found = attached.attach(copies[0])
        by_way[way] = attached
        if way == "map":
            facts["map"] = {
                "runs": found.run_count,
                "bytes": found.map_bytes,
                "probe_s": found.probe_s,
                "refused": dict(found.refused),
            }
    names = list(copies[0].tensors)
    raw_bytes = sum(copies[0].tensors[name].data.size for name in names)
    facts["model_bytes"] = sum(t.numel() * t.element_size() for t in tensors.values())
    facts["map"]["share"] = facts["map"]["bytes"] / facts["model_bytes"]
    steps = []
    for old, new in pairwise(copies):
        places = {name: _changed(old, new, name) for name in names}
        places = {name: at for name, at in places.items() if at.size}
        count = sum(int(at.size) for at in places.values())
        seconds: dict[str, list[float]] = {"map": [], "dense": [], "patches": [], "stage": []}
        digests = set()
        # Taking turns: what else the machine does falls on all of them.
        for _ in range(ROUNDS):
            for way, attached in by_way.items():
                by_way["dense"].apply(by_way["dense"].stage(old, None), old)
                stage_s, staged = _timed(partial(attached.stage, new, places))
                apply_s, _ = _timed(partial(attached.apply, staged, new))
                seconds[way].append(apply_s)
                if way == "map":
                    seconds["stage"].append(stage_s)
                digests.add(_digest(tensors))
        if len(digests) != 1:
            raise AssertionError("the ways did not lead to the same bits")
        steps.append(
            {
                "changed_count": count,
                "changed_share": count / (raw_bytes / 2),
                **{f"{name}_s": statistics.median(values) for name, values in seconds.items()},
                "map_to_dense": statistics.median(
                    a / b for a, b in zip(seconds["map"], seconds["dense"], strict=True)
                ),
                "map_to_patches": statistics.median(
                    a / b for a, b in zip(seconds["map"], seconds["patches"], strict=True)
                ),
            }
        )
    facts["steps"] = steps
    dense_s = statistics.median(step["dense_s"] for step in steps)
    facts["map"]["bar_s"] = 6 * dense_s + 4
    assert isinstance(model, torch.nn.Module)
    return facts


def _changed(old: Any, new: Any, name: str) -> Any:
    import numpy as np

    a, b = (copy.tensors[name].data for copy in (old, new))
    if a.ctypes.data % 2 or b.ctypes.data % 2:
        a, b = a.copy(), b.copy()
    return np.flatnonzero(a.view("<u2") != b.view("<u2")).astype(np.int64)


def _timed(do: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.perf_counter()
    found = do()
    return time.perf_counter() - start_s, found


def _digest(tensors: Any) -> str:
    import blake3
    import torch

    hasher = blake3.blake3()
    for tensor in tensors.values():
        data = tensor.detach().contiguous().view(-1)
        hasher.update(data.view(torch.uint8).cpu().numpy().data)
    return hasher.hexdigest()


def _report(rank: int, facts: dict[str, Any]) -> None:
    found = facts["map"]
    print(
        f"rank {rank}: the map has {found['runs']} runs, {found['bytes']:,} bytes, "
        f"{100 * found['share']:.4f} % of the parameters' {facts['model_bytes']:,}; found in "
        f"{found['probe_s']:.2f} s (bar {found['bar_s']:.2f} s)"
    )
    for step in facts["steps"]:
        print(
            f"  {step['changed_count']:,} words changed ({100 * step['changed_share']:.3f} %): map "
            f"{1000 * step['map_s']:.2f} ms, dense {1000 * step['dense_s']:.1f} ms, patches "
            f"{1000 * step['patches_s']:.0f} ms; map/dense {step['map_to_dense']:.3f} (bar 0.25), "
            f"map/patches {step['map_to_patches']:.4f} (bar 0.05); staged beside in "
            f"{1000 * step['stage_s']:.0f} ms"
        )


if __name__ == "__main__":
    main()
