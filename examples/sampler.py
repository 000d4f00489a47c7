"""The sampler: a process of its own that follows the stream and answers requests for rollouts.

    python examples/sampler.py URL FOLDER GROUP_SIZE SEED [--small]

A line of JSON on standard input is a request: `[batch, first question, questions]`. A line of JSON
on standard output is the answer. Before each batch the folder is brought to the newest version,
and whatever is new is loaded from it: between two updates it is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from digests import digest_of, load_folder
from policy import Policy, load_tokenizer, sample, with_model
from task import Sums

import thinwire

FIRST_VERSION_TIMEOUT_S = 120.0


class FollowedPolicy:
    """A policy that always has the weights of exactly one version."""

    def __init__(self, follower: thinwire.Follower, folder: Path, is_small: bool) -> None:
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()
        self._follower = follower
        self._folder = folder
        self.version = follower.wait_for(1, FIRST_VERSION_TIMEOUT_S, poll_s=0.05)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.policy: Policy = with_model(model, *load_tokenizer(folder, is_small), is_small)
        self.digest = digest_of(model.named_parameters())

    def refresh(self) -> None:
        """Go to the newest version; load it, if it is another one."""
        found = self._follower.catch_up()
        if found.version == self.version.version:
            return
        tensors = load_folder(self._folder)
        with torch.no_grad():
            for name, weight in self.policy.model.named_parameters():
                weight.copy_(tensors.pop(name))
        if tensors:
            raise ValueError(f"the version holds what the model has not: {sorted(tensors)}")
        # Of the weights that the next batch is sampled with, not of the file.
        self.digest = digest_of(self.policy.model.named_parameters())
        self.version = found


def rollouts(policy: Policy, task: Sums, entries: list[Any], group_size: int) -> list[Any]:
    """A dictionary for each question: its prompt, completions, log-probabilities and rewards."""
    groups = sample(policy, [policy.prompt_of(entry) for entry in entries], group_size)
    found = []
    for entry, group in zip(entries, groups, strict=True):
        texts = [
            policy.tokenizer.decode(tokens, skip_special_tokens=True)
            for tokens in group.completions
        ]
        rewards = [task.score(text, entry) for text in texts]
        found.append({**asdict(group), "rewards": rewards, "text": texts[0]})
    return found


def main(url: str, folder: Path, group_size: int, seed: int, is_small: bool) -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = Sums(seed)
    with thinwire.Follower(url, folder) as follower:
        followed = FollowedPolicy(follower, folder, is_small)
        for line in sys.stdin:
            batch, first, count = json.loads(line)
            start_s = time.monotonic()
            followed.refresh()
            refresh_s = time.monotonic() - start_s
            entries = [task.question(index) for index in range(first, first + count)]
            answer = {
                "batch": batch,
                "version": followed.version.version,
                "step": followed.version.step,
                "digest": followed.digest,
                "refresh_s": refresh_s,
                "groups": rollouts(followed.policy, task, entries, group_size),
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), "--small" in sys.argv)
