"""Records from engines' answers: vLLM's and SGLang's, and those of ``thinwire serve``.

Each takes an answer as bytes or as parsed JSON, and returns a record for each completion in it.
Streamed answers are not read: ask for whole ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from thinwire.engines.record import (
    MAX_TOKENS,
    Record,
    Span,
    checked_choices,
    log_prob,
    npy_experts,
    raw_experts,
    spans_of,
)
from thinwire.errors import Corrupt, LimitExceeded

Answer = bytes | str | Mapping[str, Any]
"""An engine's answer: its bytes, its text, or what a JSON parser made of it."""


class _Entry(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None


class _LogProbs(msgspec.Struct):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _OwnSpan(msgspec.Struct):
    weight_version: str
    start: int
    stop: int


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None
    weight_versions: list[Span] | None = None  # vLLM's
    weight_spans: list[_OwnSpan] | None = None  # thinwire's
    finish_reason: str | None = None


class _OpenAiAnswer(msgspec.Struct):
    choices: list[_Choice]
    id: str = ""
    request_id: str = ""
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


def from_vllm(
    answer: Answer, *, began: str | None = None, ended: str | None = None
) -> list[Record]:
    """Records from vLLM.

    ``/inference/v1/generate`` (``--enable-scale-out``) says which version sampled which token;
    ask it with ``"logprobs": 0`` in the sampling parameters. ``/v1/completions`` and
    ``/v1/chat/completions`` do not say: ask them with ``return_token_ids`` and log-probabilities,
    and ask ``/weight_info`` before and after.

    Args:
        answer: The answer.
        began: The engine's version before the request was sent, where the answer does not say.
        ended: The same after the answer came.

    Raises:
        Corrupt: The answer contradicts itself, or holds no tokens.
        LimitExceeded: More than a named limit allows.
    """
    return _openai(answer, began, ended)


def from_thinwire(answer: Answer) -> list[Record]:
    """Records from ``thinwire serve``, asked with ``return_token_ids`` and log-probabilities.

    Args:
        answer: The answer.

    Raises:
        Corrupt: The answer contradicts itself, or holds no tokens.
        LimitExceeded: More than a named limit allows.
    """
    return _openai(answer, None, None)


def _openai(answer: Answer, began: str | None, ended: str | None) -> list[Record]:
    found = _parsed(answer, _OpenAiAnswer)
    checked_choices(found.choices)
    records = []
    for choice in found.choices:
        if choice.token_ids is None:
            raise Corrupt(
                "the answer holds no token ids",
                hint="Ask with return_token_ids: text does not say which tokens it was made of",
            )
        _checked_count(choice.token_ids)
        spans, experts = choice.weight_versions, choice.routed_experts
        if choice.weight_spans is not None:
            spans = [Span(one.weight_version, one.start, one.stop) for one in choice.weight_spans]
        prompt = choice.prompt_token_ids or found.prompt_token_ids or []
        _checked_count(prompt)
        records.append(
            _record(
                request=found.request_id or found.id,
                index=choice.index,
                prompt_count=len(prompt) or _asked(found.usage),
                prompt=tuple(prompt),
                tokens=choice.token_ids,
                log_probs=_log_probs(choice),
                spans=spans_of(len(choice.token_ids), began, ended) if spans is None else spans,
                experts=None if experts is None else npy_experts(experts),
                finish=choice.finish_reason,
            )
        )
    return records


class _Meta(msgspec.Struct):
    id: str = ""
    prompt_tokens: int = 0
    finish_reason: Any = None
    weight_version: str | int | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[list[Any]] | None = None
    routed_experts: str | None = None


class _SglangAnswer(msgspec.Struct):
    meta_info: _Meta
    index: int = 0
    output_ids: list[int] | None = None


def from_sglang(
    answer: Answer | Sequence[Any],
    *,
    began: str | None = None,
    layers: int = 0,
    top_k: int = 0,
) -> list[Record]:
    """Records from SGLang's ``/generate``, asked with ``return_logprob``.

    SGLang's answers hold the version that was there when they were made, not the one that each
    token was sampled under. So the tokens count as that version's only if ``began`` is the same.
    Builds that send ``weight_versions`` with the spans need no ``began``.

    Args:
        answer: The answer; a list where several completions were asked for.
        began: The engine's version (``/model_info``) before the request was sent.
        layers: The model's layers that choose experts, where ``return_routed_experts`` was asked.
        top_k: How many experts each chooses.

    Raises:
        Corrupt: The answer contradicts itself, or holds no tokens.
        LimitExceeded: More than a named limit allows.
        InvalidArgument: The answer holds experts, and ``layers`` or ``top_k`` is not given.
    """
    found = _sglang_answers(answer)
    checked_choices(found)
    records = []
    for index, one in enumerate(found):
        meta = one.meta_info
        tokens, log_probs = _sglang_tokens(one)
        ended = None if meta.weight_version is None else str(meta.weight_version)
        spans = meta.weight_versions
        experts, reason = meta.routed_experts, meta.finish_reason
        records.append(
            _record(
                request=meta.id,
                index=index,
                prompt_count=meta.prompt_tokens,
                tokens=tokens,
                log_probs=log_probs,
                spans=spans_of(len(tokens), began, ended) if spans is None else spans,
                experts=None if experts is None else raw_experts(experts, layers, top_k),
                finish=reason.get("type") if isinstance(reason, dict) else reason,
            )
        )
    return records


def _sglang_answers(answer: Answer | Sequence[Any]) -> list[_SglangAnswer]:
    if isinstance(answer, Mapping):
        return [_parsed(answer, _SglangAnswer)]
    if isinstance(answer, bytes | str):
        found = _parsed(answer, list[_SglangAnswer] | _SglangAnswer)
        return found if isinstance(found, list) else [found]
    return [_parsed(one, _SglangAnswer) for one in answer]


def _sglang_tokens(answer: _SglangAnswer) -> tuple[list[int], list[float | None]]:
    """Tokens, and a log-probability or None for each."""
    entries, tokens = answer.meta_info.output_token_logprobs, answer.output_ids
    if entries is None:
        if tokens is None:
            raise Corrupt("the answer holds no tokens", hint="Ask with return_logprob")
        _checked_count(tokens)
        return tokens, [None] * len(tokens)
    _checked_count(entries)
    # [log-probability, token, text or null]; some leave the text out.
    pairs = _converted([entry[:2] for entry in entries], list[tuple[float | None, int]])
    found = [token for _, token in pairs]
    if tokens is not None and tokens != found:
        raise Corrupt("the answer's output_ids are not those of its log-probabilities")
    return found, [log_prob(value) for value, _ in pairs]


def _parsed(answer: Any, kind: Any) -> Any:
    if not isinstance(answer, bytes | str):
        return _converted(answer, kind)
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the engine's answer is not as it should be: {error}") from error


def _converted(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the engine's answer is not as it should be: {error}") from error


def _record(
    *, tokens: Sequence[int], log_probs: Sequence[float | None], spans: Sequence[Span], **rest: Any
) -> Record:
    finish = rest.pop("finish")
    try:
        return Record(
            tokens=tuple(tokens),
            log_probs=tuple(log_probs),
            spans=tuple(spans),
            finish=finish if isinstance(finish, str) else "",
            **rest,
        )
    except ValueError as error:
        raise Corrupt(f"the engine's answer contradicts itself: {error}") from error


def _checked_count(tokens: Sequence[Any]) -> None:
    if len(tokens) > MAX_TOKENS:
        raise LimitExceeded(f"{len(tokens)} tokens, limit {MAX_TOKENS}")


def _asked(usage: _Usage | None) -> int:
    return 0 if usage is None else usage.prompt_tokens


def _log_probs(choice: _Choice) -> list[float | None]:
    """A choice's log-probabilities, in either of the two forms."""
    tokens = choice.token_ids or []
    found = choice.logprobs
    if found is None or (found.content is None and found.token_logprobs is None):
        return [None] * len(tokens)
    if found.content is None:
        return [log_prob(value) for value in found.token_logprobs or []]
    named = [entry.token_id for entry in found.content]
    if any(name is not None and name != token for name, token in zip(named, tokens, strict=False)):
        raise Corrupt("the answer's log-probabilities are of other tokens than its token ids")
    return [log_prob(entry.logprob) for entry in found.content]
