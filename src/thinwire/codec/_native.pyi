"""Types of the compiled kernels; see native/binding/module.cpp."""

import numpy as np

class Codec:
    """Codes chunks of one dtype with a set of packed tables."""

    def __init__(
        self,
        word_bytes: int,
        field_shift: int,
        field_mask: int,
        ordered: bool,
        tables: np.ndarray,
        instructions: str = "",
    ) -> None: ...
    def encode(
        self, base: np.ndarray, new: np.ndarray, capacity: int
    ) -> tuple[bytes | None, int, int, int, list[int], list[int]]: ...
    def decode(
        self, base: np.ndarray, out: np.ndarray, data: np.ndarray
    ) -> tuple[int, int] | None: ...
    def changes(
        self, base: np.ndarray, data: np.ndarray
    ) -> tuple[bool, int, bytearray, bytearray]: ...
    def sample(
        self, base: np.ndarray, new: np.ndarray, first: int, stride: int, counts: np.ndarray
    ) -> None: ...

def find_changes(
    base: np.ndarray,
    new: np.ndarray,
    word_bytes: int,
    positions: np.ndarray,
    words: np.ndarray,
    instructions: str = "",
) -> int: ...
def find_rounded_changes(
    base: np.ndarray,
    new: np.ndarray,
    positions: np.ndarray,
    words: np.ndarray,
    instructions: str = "",
) -> int | None: ...
def swap_words(items: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]]) -> None: ...
def fit(counts: np.ndarray, total_words: int) -> bytes: ...
def xxh3_64(data: np.ndarray) -> int: ...
def instruction_sets() -> list[str]: ...
