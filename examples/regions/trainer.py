"""The trainer: GRPO on what the samplers of all regions answer; every step is published.

    python trainer.py SETTINGS.json

Its loss and its optimizer are those of `examples/grpo.py`. It knows the stream and a file of
sampler endpoints; who follows the stream, and how, it never learns. At each step it writes down, as
a line of JSON, a digest of its own BF16 weights: the record that every sampler is compared with.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from digests import digest_of
from policy import load_smollm2, load_tokenizer, make_small, with_model
from rollouts import Collector
from task import Sums

import grpo
from thinwire.engines.engine import label_of
from thinwire.follow import open_stream
from thinwire.report.notifier import HubNotifier
from thinwire.stream.version import Version
from thinwire.torch import Ticket, TorchPublisher

# Questions beyond a batch that may be open: one sampler that hangs must not hold up a step.
SPARE_QUESTIONS = 2


@dataclass(frozen=True)
class Run:
    """What it is told; see `run.py`.

    It makes so many `steps`, and goes on until there is a file `stop`.
    """

    url: str
    key: str
    model: str
    files: str
    folder: str
    endpoints: str
    record: str
    stop: str
    is_small: bool
    steps: int
    questions: int
    group_size: int
    learning_rate: float
    step_s: float
    max_staleness: int
    pretrain_steps: int
    seed: int
    hub: str
    hub_stream: str


class Story:
    """The record: one line of JSON for each thing that happened."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def tell(self, kind: str, **facts: Any) -> None:
        """Add a line."""
        with self._lock:
            print(json.dumps({"at_s": time.time(), "kind": kind, **facts}), file=self._file)
            self._file.flush()


class Commits:
    """Waits for each version and notes it, in a thread of its own."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._steps: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def follow(self, ticket: Ticket, step: int, digest: str) -> None:
        """Note the version once it exists."""
        thread = threading.Thread(target=self._wait, args=(ticket, step, digest))
        thread.start()
        self._threads.append(thread)

    def step_of(self, label: str) -> int | None:
        """The step of a version by its label; None: this trainer published no such version."""
        return self._steps.get(label)

    def close(self) -> None:
        """Wait for the last one."""
        for thread in self._threads:
            thread.join()

    def _wait(self, ticket: Ticket, step: int, digest: str) -> None:
        version = ticket.wait()
        if version is None:
            self._story.tell("lost", step=step, reason=str(ticket.error))
            return
        self._steps[label_of(version)] = step
        self._story.tell("commit", **facts_of(version, step, digest))


def facts_of(version: Version, step: int, digest: str) -> dict[str, Any]:
    """A version, for the record."""
    return {
        "version": version.version,
        "label": label_of(version),
        "lineage": version.lineage,
        "step": step,
        "digest": digest,
        "created_ms": version.created_ms,
        "payload_bytes": version.payload_bytes,
        "raw_bytes": version.raw_bytes,
        "changed_count": version.changed_count,
        "word_count": version.word_count,
    }


def make_policy(run: Run) -> Any:
    """The policy to be trained; its small files go into a folder, for the samplers."""
    models, files = Path(run.model), Path(run.files)
    tokenizer, end_token = load_tokenizer(models, run.is_small)
    if run.is_small:
        task = Sums(run.seed + 1)
        lessons = [task.question(index) for index in range(2000)]
        model = make_small(lessons, run.pretrain_steps, run.seed)
    else:
        model = load_smollm2(models)
        tokenizer.save_pretrained(files)
    model.config.save_pretrained(files)
    return with_model(model.train(), tokenizer, end_token, run.is_small)


def main(run: Run) -> None:
    """Train and publish."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    policy, story = make_policy(run), Story(Path(run.record))
    commits = Commits(story)
    options = grpo.Settings(
        run.is_small, run.steps, run.questions, run.group_size, run.learning_rate
    )
    learner = grpo.Trainer(policy.model, policy.end_token, options)
    stream = open_stream(run.url, signing_key=run.key)
    notifier = HubNotifier(run.hub, run.hub_stream, token=os.environ["REGIONS_PUBLISH_TOKEN"])
    with (
        notifier,
        TorchPublisher(
            policy.model,
            stream,
            folder=run.folder,
            files=Path(run.files),
            when_busy="block",
            maintain=False,
            observer=notifier,
        ) as publisher,
    ):

        def publish(step: int) -> float:
            digest = digest_of(policy.model.named_parameters())
            start_s = time.perf_counter()
            commits.follow(publisher.publish(step), step, digest)
            return time.perf_counter() - start_s

        publish(0)
        collector = Collector(
            Path(run.endpoints),
            policy,
            Sums(run.seed),
            run.group_size,
            os.environ["REGIONS_SAMPLER_TOKEN"],
            commits.step_of,
        )
        collector.ask(run.questions + SPARE_QUESTIONS)
        for step in itertools.count(1):
            if step > run.steps and Path(run.stop).exists():
                break
            start_s = time.monotonic()
            groups = collector.take(run.questions, step, run.max_staleness)
            waited_s = time.monotonic() - start_s
            ratio = learner.step(step, groups)
            time.sleep(max(0.0, run.step_s - (time.monotonic() - start_s)))
            publish_s = publish(step)
            story.tell(
                "step",
                step=step,
                reward=statistics.fmean(r for group in groups for r in group["rewards"]),
                ratio=ratio,
                staleness=[step - 1 - group["step"] for group in groups],
                samplers=[group["sampler"] for group in groups],
                waited_s=waited_s,
                step_s=time.monotonic() - start_s,
                publish_s=publish_s,
                text=groups[0]["text"],
            )
        commits.close()
    story.tell("end", dropped=collector.dropped, unknown=collector.unknown)


if __name__ == "__main__":
    main(Run(**json.loads(Path(sys.argv[1]).read_text())))
