"""What the policies are rewarded for: sums of two digits, from reasoning-gym, by its own scorer.

The reward is 1 for the bare number, and for a longer answer that contains it, the number's share of
the length. So a model that can add, but talks, has much to gain in a few steps.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
COUNT = 20_000


class Sums:
    """Numbered questions; the same seed asks the same ones."""

    def __init__(self, seed: int) -> None:
        self._dataset = reasoning_gym.create_dataset("chain_sum", seed=seed, size=COUNT, **DIGITS)

    def question(self, index: int) -> dict[str, Any]:
        """The question of that number, as reasoning-gym gives it."""
        entry: dict[str, Any] = self._dataset[index % COUNT]
        return entry

    def score(self, completion: str, entry: dict[str, Any]) -> float:
        """The reward, from 0 to 1."""
        return float(self._dataset.score_answer(completion.strip(), entry))
