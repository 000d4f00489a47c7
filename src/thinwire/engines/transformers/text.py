"""Tokens as text, one after another: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"


class TextOf:
    """The text of one answer, as it grows.

    Args:
        tokenizer: transformers' tokenizer; None: tokens have no text.
        stops: Texts that end the answer; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []
        self._from = 0  # tokens before this one do not change the text of those to come
        self._shown = 0  # tokens whose text is in `text`
        self.text = ""
        self._given = 0
        self.is_stopped = False

    def add(self, token: int) -> None:
        """The next token; sets ``is_stopped`` where a stop text is complete."""
        if self._tokenizer is None:
            return
        self._tokens.append(token)
        before = self._decoded(self._from, self._shown)
        now = self._decoded(self._from, len(self._tokens))
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return
        self._grow(now[len(before) :])
        self._from, self._shown = self._shown, len(self._tokens)

    def end(self) -> None:
        """No token follows: what was held back as incomplete is shown as it is."""
        if self._tokenizer is not None and not self.is_stopped:
            before = self._decoded(self._from, self._shown)
            self._grow(self._decoded(self._from, len(self._tokens))[len(before) :])

    def take(self, *, is_last: bool) -> str:
        """What is new and cannot become part of a stop text."""
        stop = len(self.text)
        if not is_last and not self.is_stopped:
            stop -= self._held_back()
        new = self.text[self._given : stop]
        self._given = max(self._given, stop)
        return new

    def _grow(self, new: str) -> None:
        # A stop text may have begun in what was there before.
        longest = max((len(stop) for stop in self._stops), default=0)
        start = max(0, len(self.text) - longest)
        self.text += new
        found = [at for at in (self.text.find(s, start) for s in self._stops) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def _held_back(self) -> int:
        for size in range(max((len(s) for s in self._stops), default=1) - 1, 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops if size < len(stop)):
                return min(size, len(self.text))
        return 0

    def _decoded(self, start: int, stop: int) -> str:
        return str(self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True))


def token_text(tokenizer: Any, token: int) -> str:
    """One token as log-probabilities name it."""
    if tokenizer is None:
        return f"token_id:{token}"
    return str(tokenizer.decode([token], skip_special_tokens=False))
