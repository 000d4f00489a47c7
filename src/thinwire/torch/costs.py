"""What the ways of changing a running model cost, where it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.torch.scatter import Change, LiveModel
from thinwire.torch.stored import words_of

# Of words that are exchanged with themselves, to find out what one costs.
_MEASURED_SHARE = 0.01
_MEASURED_TIMES = 3
# Loading is chosen over exchanging words only where it is so many times quicker.
_LOAD_MARGIN = 4


class Costs(NamedTuple):
    """Seconds of a word that is exchanged, and of a byte that the engine's loader loads."""

    swap_s_per_word: float = 0.0
    load_s_per_byte: float = 0.0

    def is_loading_better(self, word_count: int, byte_count: int) -> bool:
        """Whether whole tensors of so many bytes are rather loaded than so many words exchanged."""
        # What can be undone is worth something.
        return word_count * self.swap_s_per_word > _LOAD_MARGIN * byte_count * self.load_s_per_byte


def measure_swap(live: LiveModel, copy: Checkpoint, synchronize: Callable[[], None]) -> float:
    """Seconds that exchanging a word takes: some are exchanged with themselves.

    Args:
        live: The model, which holds the copy.
        copy: The host's copy.
        synchronize: Waits for the device.
    """
    name = max(copy.tensors, key=live.index_map.held_count)
    words = words_of(copy.tensors[name])
    if not words.size:
        return 0.0
    count = max(1, int(words.size * _MEASURED_SHARE))
    at = np.unique(np.linspace(0, words.size - 1, count).astype(np.int64))
    swap = live.prepare([Change(name, at, words[at])])
    seconds = []
    for _ in range(_MEASURED_TIMES):
        start_s = time.perf_counter()
        swap.swap()
        synchronize()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds) / max(1, swap.word_count)
