"""How a session is written: as one text, in which a token is a letter.

The environment and the policy write it in turns, a line each:

    _____
    bread
    -Rea-
    crane
    ...

The end of a line is the token that ends the policy's answers.
"""

from __future__ import annotations

from collections.abc import Sequence

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-!\n"
END = "\n"
END_TOKEN = ALPHABET.index(END)
GUESS_TOKENS = 6


def encode(text: str) -> list[int]:
    """Letters to tokens."""
    return [ALPHABET.index(letter) for letter in text]


def decode(tokens: Sequence[int]) -> str:
    """Tokens to letters."""
    return "".join(ALPHABET[token] for token in tokens)
