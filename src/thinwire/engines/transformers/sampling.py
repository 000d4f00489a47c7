"""Sampling from a model whose weights may change: token after token, several answers at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from thinwire.engines.transformers.protocol import Options
from thinwire.errors import EngineError
from thinwire.stream.version import Version

_MIN_TEMPERATURE = 1e-5

Reading = Callable[[], AbstractContextManager[Version]]


class Token(NamedTuple):
    """A sampled token.

    Attributes:
        token: Its id.
        logprob: The natural logarithm of its probability, before temperature and top_p.
        tops: The likeliest tokens and theirs.
    """

    token: int
    logprob: float
    tops: list[tuple[int, float]]


@dataclass(eq=False)
class Row:
    """One answer as it is sampled.

    Attributes:
        prompt: Token ids.
        options: How.
        tokens: What was sampled.
        spans: The versions that sampled it, each with the number of its first token.
        finish: Why it ended; None: it has not.
        is_cancelled: Nobody wants it any more. Set from any thread.
    """

    prompt: list[int]
    options: Options
    generator: torch.Generator
    tokens: list[Token] = field(default_factory=list)
    spans: list[tuple[Version, int]] = field(default_factory=list)
    finish: str | None = None
    is_cancelled: bool = False

    @property
    def ids(self) -> list[int]:
        """All token ids: those of the prompt and those that were sampled."""
        return self.prompt + [token.token for token in self.tokens]


class _Batch(NamedTuple):
    """What a model remembers of rows; without a cache, everything is read for every token."""

    rows: list[Row]
    cache: Any
    mask: torch.Tensor


class Sampler:
    """Samples answers from a causal language model of transformers.

    Args:
        model: The model; it is in evaluation mode.
        eos_ids: Tokens that end an answer.
    """

    def __init__(self, model: Any, eos_ids: frozenset[int]) -> None:
        self._model = model
        self._eos_ids = eos_ids
        self._accepts = set(inspect.signature(model.forward).parameters)
        # Recurrent states cannot be told which tokens are padding.
        self.can_pad = not getattr(model, "_is_stateful", False)

    @torch.inference_mode()
    def run(
        self,
        rows: Sequence[Row],
        reading: Reading,
        on_token: Callable[[Row], None],
        *,
        is_interruptible: bool,
        check: Callable[[Version], None] = lambda version: None,
    ) -> None:
        """Sample until every row has its end.

        Not interruptible, all of it is one reading: one version, for which updates wait. Otherwise
        each token is; after an update the keys and values of everything so far are computed anew,
        under the new weights.

        Args:
            rows: The answers.
            reading: Guards the model, and says which version it holds.
            on_token: Told of each new token; it may end the row.
            is_interruptible: Whether updates may come in between.
            check: Told of the version before anything is sampled; it may raise.
        """
        with ExitStack() as stack:
            version = None if is_interruptible else stack.enter_context(reading())
            batch: _Batch | None = None
            last: Version | None = None
            left = list(rows)
            if version is not None:
                check(version)
            left = [row for row in left if row.finish is None]
            while left:
                with reading() as version:
                    if last is None and is_interruptible:
                        check(version)
                        left = [row for row in left if row.finish is None]
                        if not left:
                            return
                    is_new = last is None or last.manifest != version.manifest
                    logits, batch = (
                        self._read(left) if is_new or batch is None else self._go_on(left, batch)
                    )
                    # What a device was asked to do must be done before an update may come.
                    logits = logits.float().cpu()
                last = version
                for row, scores in zip(left, logits, strict=True):
                    if is_new:
                        row.spans.append((version, len(row.tokens)))
                    self._pick(row, scores)
                    on_token(row)
                left = [row for row in left if row.finish is None and not row.is_cancelled]

    def _read(self, rows: list[Row]) -> tuple[torch.Tensor, _Batch]:
        """Everything so far at once, padded on the left to one length."""
        size = max(len(row.ids) for row in rows)
        ids = torch.zeros((len(rows), size), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            found = row.ids
            ids[number, size - len(found) :] = torch.tensor(found)
            mask[number, size - len(found) :] = 1
        return self._forward(rows, ids, mask, None)

    def _go_on(self, rows: list[Row], batch: _Batch) -> tuple[torch.Tensor, _Batch]:
        """One token more for each row that is left."""
        mask, cache = batch.mask, batch.cache
        # Recurrent states go on differently from release to release of transformers: not relied on.
        if cache is None or not self.can_pad:
            return self._read(rows)
        if len(rows) < len(batch.rows):
            kept = [number for number, row in enumerate(batch.rows) if row in rows]
            try:
                cache.batch_select_indices(torch.tensor(kept, device=self._model.device))
            except (AttributeError, NotImplementedError):
                # Caches, or layers of them, that cannot leave rows out: this one is given up.
                return self._read(rows)
            mask = mask[kept]
        ids = torch.tensor([[row.tokens[-1].token] for row in rows])
        mask = torch.cat([mask, torch.ones((len(rows), 1), dtype=mask.dtype)], dim=1)
        return self._forward(rows, ids, mask, cache)

    def _forward(
        self, rows: list[Row], ids: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, _Batch]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        device = self._model.device
        given = {name: t.to(device) for name, t in given.items() if name in self._accepts}
        if "logits_to_keep" in self._accepts:
            given["logits_to_keep"] = 1
        found = self._model(
            input_ids=ids.to(device), past_key_values=cache, use_cache=True, **given
        )
        cache = getattr(found, "past_key_values", None)
        return found.logits[:, -1], _Batch(list(rows), cache, mask)

    def _pick(self, row: Row, scores: torch.Tensor) -> None:
        if scores.isnan().any():
            raise EngineError("the model's scores are not numbers", hint="Look at its weights")
        logprobs = torch.log_softmax(scores, dim=-1)
        token = _sampled(scores, row.options, row.generator)
        count = min(row.options.top_count, scores.numel())
        tops = torch.topk(logprobs, count)
        row.tokens.append(
            Token(
                token,
                float(logprobs[token]),
                list(zip(tops.indices.tolist(), tops.values.tolist(), strict=True)),
            )
        )
        is_eos = token in self._eos_ids and not row.options.ignores_eos
        if is_eos or token in row.options.stop_ids:
            row.finish = "stop"
        elif len(row.tokens) >= row.options.max_tokens:
            row.finish = "length"


def _sampled(scores: torch.Tensor, options: Options, generator: torch.Generator) -> int:
    if options.temperature < _MIN_TEMPERATURE:
        return int(scores.argmax())
    shares = torch.softmax(scores / options.temperature, dim=-1)
    if options.top_p < 1:
        ranked, order = shares.sort(descending=True)
        # The first one always stays; of the others those before which less than top_p lies.
        ranked[ranked.cumsum(0) - ranked >= options.top_p] = 0
        shares = torch.zeros_like(shares).scatter(0, order, ranked)
    return int(torch.multinomial(shares, 1, generator=generator))


def generator_for(seed: int | None, number: int) -> torch.Generator:
    """Random numbers for an answer: the same for the same seed and number, whatever else runs."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed((seed * 1_000_003 + number) % 2**63)
    return generator
