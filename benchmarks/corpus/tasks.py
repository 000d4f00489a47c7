"""What the policies are rewarded for: procedural questions with an exact scorer.

A question depends only on (seed, index), so a run asks the same ones every time.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Protocol

LETTERS = "abcdefghijklmnop"
WORD_LENGTH = 6
# Separate streams of questions: pre-training must not see what RL asks.
PRETRAIN_STREAM, RL_STREAM = "pretrain", "rl"


@dataclass(frozen=True)
class Question:
    """`prompt` is what the policy reads; `answer` the reference text; `entry` the task's own
    record of it, where the scorer needs more than the answer."""

    prompt: str
    answer: str
    entry: Any = None


class Task(Protocol):
    @property
    def name(self) -> str: ...

    def question(self, index: int, stream: str = RL_STREAM) -> Question: ...

    def score(self, completion: str, question: Question) -> float:
        """Reward from 0 to 1."""
        ...


class SortLetters:
    """`dacbaa>` is to be completed as `aaabcd.`; the reward is the share of right places."""

    name = "sort_letters"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def question(self, index: int, stream: str = RL_STREAM) -> Question:
        # A string seeds the same generator on every Python version and machine.
        rng = random.Random(f"{self.name}/{stream}/{self.seed}/{index}")
        word = "".join(rng.choice(LETTERS) for _ in range(WORD_LENGTH))
        return Question(prompt=word + ">", answer="".join(sorted(word)))

    def score(self, completion: str, question: Question) -> float:
        answer = question.answer
        right = sum(got == wanted for got, wanted in zip(completion, answer, strict=False))
        # Letters past the end count against it, or rambling would cost nothing.
        return right / max(len(answer), len(completion))


class Products:
    """`products` of reasoning-gym, one digit by one digit, with its scorer.

    The 135M model answers in a sentence more often than not, so the last whole number of the
    completion is what the scorer sees.
    """

    name = "products"
    QUESTION_COUNT = 10_000

    def __init__(self, seed: int) -> None:
        # Imported here: the decoder policy does not need reasoning-gym.
        import reasoning_gym  # type: ignore[import-untyped]

        self.dataset = reasoning_gym.create_dataset(
            "products", seed=seed, size=self.QUESTION_COUNT, min_digits=1, max_digits=1
        )

    def question(self, index: int, stream: str = RL_STREAM) -> Question:
        if stream != RL_STREAM:
            raise ValueError(f"Products has no stream {stream!r}: its policy comes pre-trained")
        entry = self.dataset[index % self.QUESTION_COUNT]
        return Question(prompt=entry["question"], answer=entry["answer"], entry=entry)

    def score(self, completion: str, question: Question) -> float:
        numbers = re.findall(r"\d+", completion)
        if not numbers:
            return 0.0
        return float(self.dataset.score_answer(numbers[-1], question.entry))
