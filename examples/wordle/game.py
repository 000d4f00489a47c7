"""The game: guess a word of five letters, told after each guess which letters are right.

A guess is answered letter by letter: a capital for one in its place, a small one for one that is
elsewhere in the word, "-" for any other; or with "!!!!!" where it is no word of the list. The
rewards of a session add up to 1 for the word at once, 0.1 less for each further guess, and without
the word to at most 0.4 for letters that were found; a guess that is no word costs 0.05.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_WORDS = """
bread water mouse light stone plane chair robot green field snake house
cloud money tiger paper ghost uncle smile horse dance river lemon plant
shirt queen world train knife juice ocean table crane wheat spoon month
storm glass heart brick fruit radio night sugar voice grape dream tower
"""
WORDS = tuple(_WORDS.split())
LETTERS = 5
MAX_GUESSES = 5
START = "_" * LETTERS
NO_WORD = "!" * LETTERS

_GUESS_COST = 0.1
_NO_WORD_COST = 0.05
_FOUND_WORTH = 0.4


class Outcome(NamedTuple):
    """What a guess leads to."""

    observation: str
    reward: float
    done: bool


class Game:
    """One session's game.

    Args:
        secret: The word to be found.
        words: Those that may be guessed.
    """

    def __init__(self, secret: str, words: Sequence[str]) -> None:
        self._secret = secret
        self._words = words
        self._guess_count = 0
        self._found = 0.0
        self.done = False

    def step(self, guess: str) -> Outcome:
        """Judge a guess, whatever text it is."""
        self._guess_count += 1
        self.done = guess == self._secret or self._guess_count == MAX_GUESSES
        if guess not in self._words:
            return Outcome(NO_WORD, -_NO_WORD_COST, self.done)
        marks = mark(guess, self._secret)
        placed = sum(letter.isupper() for letter in marks)
        elsewhere = sum(letter.islower() for letter in marks)
        found = max(self._found, _FOUND_WORTH * (placed + elsewhere / 2) / LETTERS)
        if guess == self._secret:
            found = 1 - _GUESS_COST * (self._guess_count - 1)
        reward, self._found = found - self._found, found
        return Outcome(marks, reward, self.done)


def secret_of(seed: int, words: Sequence[str]) -> str:
    """The secret word of a seed; the same everywhere."""
    return random.Random(f"secret {seed}").choice(words)


def mark(guess: str, secret: str) -> str:
    """The answer to a guess. A letter is told as often as the secret has it, in its place first."""
    pairs = list(zip(guess, secret, strict=True))
    left = Counter(wanted for given, wanted in pairs if given != wanted)
    marks = ""
    for given, wanted in pairs:
        if given == wanted:
            marks += given.upper()
        elif left[given] > 0:
            left[given] -= 1
            marks += given
        else:
            marks += "-"
    return marks
