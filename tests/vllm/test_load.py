"""Updates in a row under constant load: no request fails, and none is answered by a mixed model.

``THINWIRE_UPDATES`` says how many, 20 where it is not set; the bar is 200.
"""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import psutil

from thinwire.engines.engine import label_of

from .checking import check_served, check_serves, largest_difference
from .following import (
    Generated,
    Rollout,
    complete_body,
    completed_of,
    generate_body,
    generated_of,
)
from .fresh import FreshLoads, Output
from .server import VllmServer

_UPDATES = int(os.environ.get("THINWIRE_UPDATES", "20"))
_CLIENTS = 8
_TOKENS = 16
# Each version changes this much of every tensor: a single tensor left at the version before shifts
# an answer's log-probabilities by 0.03 at least, and answers of one rank have no noise at all.
_SHARE = 0.05
# Updates after which memory must not grow any more, and by how much it may all the same. The words
# that an update exchanges are 0.1 MiB here, a copy of the model is 0.7 MiB: of 12 updates either
# would be seen if it stayed.
_WARM_UP = 8
_SLACK_BYTES = 1 << 20


@dataclass
class Answer:
    """What a client was answered, and the versions that may have been served meanwhile."""

    prompt: list[int]
    output: Output
    spans: list[tuple[int, int, str]] | None
    first: int
    last: int


@dataclass
class Clients:
    """Eight that never stop asking, in turns for completions and for generations with spans."""

    server: VllmServer
    begun: int = 0
    done: int = 0
    """Updates that were begun, and that were done: what is served lies between."""
    answers: list[Answer] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        randomness = random.Random(seed)
        try:
            while not self.is_over.is_set():
                self._ask(randomness)
        except BaseException as error:
            self.failures.append(error)

    def _ask(self, randomness: random.Random) -> None:
        prompt = [randomness.randrange(2, 500) for _ in range(randomness.randrange(3, 30))]
        first = self.done
        if randomness.random() < 0.5:
            answer: Any = self.server.post("/v1/completions", complete_body(prompt, _TOKENS))
            output, spans = completed_of(answer), None
        else:
            answer = self.server.post("/inference/v1/generate", generate_body(prompt, _TOKENS))
            generated: Generated = generated_of(answer)
            output, spans = generated.output, generated.spans
        assert len(output.tokens) == _TOKENS, "an answer was cut short"
        self.answers.append(Answer(prompt, output, spans, first, self.begun))


def test_updates_under_load(server: VllmServer, rollout: Rollout, fresh: FreshLoads) -> None:
    clients = Clients(server)
    threads = [threading.Thread(target=clients.run, args=(seed,)) for seed in range(_CLIENTS)]
    pauses: list[float] = []
    sizes: list[int] = []
    with rollout.driver(server) as driver:
        versions = [driver.follower.catch_up()]
        driver.bring_to(versions[0])
        for thread in threads:
            thread.start()
        try:
            for _ in range(_UPDATES):
                versions.append(rollout.change(_SHARE))
                driver.follower.catch_up()
                clients.begun += 1
                served = driver.bring_to(versions[-1])
                clients.done += 1
                check_served(served, versions[-1], way="changes", is_proved=True)
                assert served is not None
                pauses.append(served.pause_s)
                sizes.append(private_bytes(server))
                assert not clients.failures
        finally:
            clients.is_over.set()
            for thread in threads:
                thread.join()
        assert not clients.failures
        check_serves(server, rollout, fresh, versions[-1])
        # Other tests begin with the model that the server was started from.
        rollout.publish(server.model)
        driver.bring_to(driver.follower.catch_up())
    assert len(clients.answers) > 2 * _UPDATES
    split = check_answers(clients.answers, [label_of(at) for at in versions], rollout, fresh)
    growth = sizes[-1] - max(sizes[:_WARM_UP])
    print(
        f"{_UPDATES} updates, {len(clients.answers)} answers, {split} of them under two versions; "
        f"pauses: median {1000 * sorted(pauses)[len(pauses) // 2]:.1f} ms, longest "
        f"{1000 * max(pauses):.1f} ms; the engine grew by {growth >> 10} KiB"
    )
    assert growth <= _SLACK_BYTES


def private_bytes(server: VllmServer) -> int:
    """Memory of the engine's own, not of files that it maps."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in server.worker_pids)


def check_answers(
    answers: list[Answer], labels: list[str], rollout: Rollout, fresh: FreshLoads
) -> int:
    """Compare every token's log-probability with a fresh load's; the number of split answers."""
    wanted: dict[int, list[int]] = defaultdict(list)
    for number, answer in enumerate(answers):
        for version in range(answer.first, answer.last + 1):
            wanted[version].append(number)
    expected: dict[tuple[int, str], list[float]] = {}
    for version, numbers in sorted(wanted.items()):
        texts = [[*answers[n].prompt, *answers[n].output.tokens] for n in numbers]
        scores = fresh.scores(rollout.models[labels[version]], texts)
        for number, found in zip(numbers, scores, strict=True):
            expected[number, labels[version]] = found[len(answers[number].prompt) - 1 :]
    split = 0
    for number, answer in enumerate(answers):
        possible = labels[answer.first : answer.last + 1]
        spans = answer.spans
        if spans is None:
            spans = told_by_values(answer, [(at, expected[number, at]) for at in possible])
        assert spans[0][0] == 0
        assert spans[-1][1] == _TOKENS
        assert [label for *_, label in spans] == [at for at in possible if at in str(spans)]
        for start, end, label in spans:
            difference = largest_difference(
                answer.output.logprobs[start:end], expected[number, label][start:end]
            )
            assert difference == 0, (answer, label, difference)
        split += len(spans) > 1
    return split


def told_by_values(
    answer: Answer, expected: list[tuple[str, list[float]]]
) -> list[tuple[int, int, str]]:
    """Spans of an answer without labels: each token is of one version, and none goes back."""
    spans: list[tuple[int, int, str]] = []
    start = 0
    for label, values in expected:
        end = start
        while end < _TOKENS and answer.output.logprobs[end] == values[end]:
            end += 1
        if end > start:
            spans.append((start, end, label))
        start = end
    assert start == _TOKENS, f"token {start} is of none of the versions served: {answer}"
    return spans
