"""Answers in OpenAI's form, each labelled with the version that it was sampled with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thinwire.engines.engine import label_of
from thinwire.engines.transformers.protocol import Asked
from thinwire.engines.transformers.sampling import Row, Token
from thinwire.engines.transformers.text import token_text
from thinwire.engines.transformers.worker import Job, Piece
from thinwire.stream.version import Version

Staleness = Callable[[Version], dict[str, Any]]


class Form(NamedTuple):
    """How one request is answered.

    Attributes:
        asked: The request.
        id: The answer's.
        model: The model's name.
        tokenizer: transformers', or None.
        staleness: How old a version is.
        created: Unix seconds.
    """

    asked: Asked
    id: str
    model: str
    tokenizer: Any
    staleness: Staleness
    created: int

    @classmethod
    def of(
        cls, asked: Asked, number: str, model: str, tokenizer: Any, staleness: Staleness
    ) -> Form:
        """An answer that begins now."""
        prefix = "cmpl" if asked.kind == "completion" else "chatcmpl"
        return cls(asked, f"{prefix}-{number}", model, tokenizer, staleness, int(time.time()))

    def whole(self, job: Job) -> dict[str, Any]:
        """All of a finished request."""
        kind = "text_completion" if self.asked.kind == "completion" else "chat.completion"
        choices = [self._choice(job, number) for number in range(len(job.rows))]
        spans = [span for row in job.rows for span in row.spans]
        return {**self._head(kind), "choices": choices, "usage": usage_of(job), **self._of(spans)}

    def piece(self, job: Job, piece: Piece) -> dict[str, Any]:
        """What is new, as an event of a stream."""
        row = job.rows[piece.number]
        choice: dict[str, Any] = {"index": piece.number, "finish_reason": piece.finish}
        tokens = row.tokens[piece.start : piece.stop]
        if self.asked.kind == "completion":
            choice["text"] = piece.text
        else:
            choice["delta"] = {"content": piece.text}
            if piece.start == 0:
                choice["delta"]["role"] = "assistant"
        choice["logprobs"] = self._logprobs(tokens, piece.start, row)
        if self._shows_ids:
            choice["token_ids"] = [token.token for token in tokens]
        if piece.finish is not None:
            choice["weight_spans"] = spans_of(row)
        kind = "text_completion" if self.asked.kind == "completion" else "chat.completion.chunk"
        last = [span for span in row.spans if span[1] < piece.stop]
        return {**self._head(kind), "choices": [choice], **self._of(last[-1:])}

    def usage(self, job: Job) -> dict[str, Any]:
        """The last event of a stream, where it was asked for."""
        kind = "text_completion" if self.asked.kind == "completion" else "chat.completion.chunk"
        spans = [span for row in job.rows for span in row.spans]
        return {**self._head(kind), "choices": [], "usage": usage_of(job), **self._of(spans)}

    @property
    def _shows_ids(self) -> bool:
        return self.asked.has_token_ids or self.tokenizer is None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _of(self, spans: Sequence[tuple[Version, int]]) -> dict[str, Any]:
        """The version of an answer; none, where there are several."""
        versions = [version for version, _ in spans]
        first = min(versions, key=lambda version: version.version)
        last = max(versions, key=lambda version: version.version)
        start, end = label_of(first), label_of(last)
        return {
            "weight_version": start if start == end else None,
            "weight_version_start": start,
            "weight_version_end": end,
            "weight_step": last.step,
            "staleness": self.staleness(last),
        }

    def _choice(self, job: Job, number: int) -> dict[str, Any]:
        row, text = job.rows[number], job.texts[number].text
        choice: dict[str, Any] = {"index": number, "finish_reason": row.finish}
        if self.asked.kind == "completion":
            choice["text"] = text
        else:
            choice["message"] = {"role": "assistant", "content": text}
        choice["logprobs"] = self._logprobs(row.tokens, 0, row)
        if self._shows_ids:
            choice["prompt_token_ids"] = row.prompt
            choice["token_ids"] = [token.token for token in row.tokens]
        choice["weight_spans"] = spans_of(row)
        return choice

    def _logprobs(self, tokens: Sequence[Token], start: int, row: Row) -> dict[str, Any] | None:
        if not self.asked.has_logprobs:
            return None
        texts = [self._text(token.token) for token in tokens]
        if self.asked.kind == "chat":
            return {
                "content": [self._content(t, text) for t, text in zip(tokens, texts, strict=True)]
            }
        at = sum(len(self._text(token.token)) for token in row.tokens[:start])
        offsets = []
        for text in texts:
            offsets.append(at)
            at += len(text)
        tops = [
            {self._text(top): logprob for top, logprob in token.tops} if token.tops else None
            for token in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def _content(self, token: Token, text: str) -> dict[str, Any]:
        return {
            **_named(text, token.logprob),
            "top_logprobs": [_named(self._text(top), logprob) for top, logprob in token.tops],
        }

    def _text(self, token: int) -> str:
        return token_text(self.tokenizer, token)


def spans_of(row: Row) -> list[dict[str, Any]]:
    """Which tokens were sampled under which version."""
    stops = [start for _, start in row.spans[1:]] + [len(row.tokens)]
    return [
        {"weight_version": label_of(version), "start": start, "stop": stop}
        for (version, start), stop in zip(row.spans, stops, strict=True)
    ]


def usage_of(job: Job) -> dict[str, int]:
    """How many tokens there were."""
    prompts = {id(row.prompt): len(row.prompt) for row in job.rows}
    prompt_count = sum(prompts.values())
    count = sum(len(row.tokens) for row in job.rows)
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": count,
        "total_tokens": prompt_count + count,
    }


def _named(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
