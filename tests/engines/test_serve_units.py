"""The server's parts by themselves: bodies of any kind, text that is cut, sampling in batches."""

from __future__ import annotations

import importlib.util
import json
import time
import warnings
from contextlib import contextmanager
from typing import Any

import pytest

if not all(
    importlib.util.find_spec(name)
    for name in ("torch", "transformers", "starlette", "uvicorn", "httpx")
):
    warnings.warn("thinwire[serve] is not importable: it was NOT tested", stacklevel=1)
    pytest.skip("thinwire[serve] is not importable", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.engines.transformers.following import Newest
from thinwire.engines.transformers.protocol import (
    ApiError,
    Asked,
    Limits,
    Options,
    read_chat,
    read_completion,
)
from thinwire.engines.transformers.sampling import Row, Sampler, generator_for
from thinwire.engines.transformers.text import TextOf
from thinwire.stream.events import Applied, Fetched
from thinwire.stream.version import Version

from .serving import llama, nudge

LIMITS = Limits()

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_FIELDS = [
    *("prompt", "messages", "model", "n", "max_tokens", "temperature", "top_p", "seed", "stop"),
    *("stream", "logprobs", "top_logprobs", "min_version", "exact_version", "version_timeout_s"),
    *("stop_token_ids", "logit_bias", "tools", "response_format", "stream_options", "other"),
]
_SOUND = {
    "prompt": [1, 2],
    "messages": [{"role": "user", "content": "a"}],
}


def answer(read: Any, body: bytes) -> Asked | ApiError:
    try:
        found: Asked = read(body, LIMITS, "m")
    except ApiError as error:
        return error
    return found


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4), st.booleans())
def test_any_body_is_read_or_refused(fields: dict[str, Any], is_chat: bool) -> None:
    read = read_chat if is_chat else read_completion
    for body in (fields, {**_SOUND, **fields}, {**fields, **_SOUND}):
        asked = answer(read, json.dumps(body).encode())
        if isinstance(asked, ApiError):
            assert 400 <= asked.status < 500
            assert json.dumps(asked.body())
        else:
            assert 1 <= asked.answer_count * len(asked.prompts) <= LIMITS.rows
            assert 1 <= abs(asked.options.max_tokens) <= LIMITS.max_tokens
            assert 0 <= asked.options.temperature <= 2


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused(body: bytes) -> None:
    for read in (read_chat, read_completion):
        with pytest.raises(ApiError) as caught:
            read(body, LIMITS, "m")
        assert caught.value.status == 400


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", "replace")


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="abé€😀\n", max_size=20),
    stops=st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=3),
    streams=st.booleans(),
)
def test_text_grows_by_whole_letters_and_ends_before_a_stop(
    text: str, stops: list[str], streams: bool
) -> None:
    grown = TextOf(Bytes(), stops)
    pieces = []
    for token in text.encode():
        grown.add(token)
        if grown.is_stopped:
            break
        if streams:
            pieces.append(grown.take(is_last=False))
    grown.end()
    pieces.append(grown.take(is_last=True))
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    # A stop text counts once it is complete: the one that ends first.
    complete = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        first = min(complete)
        wanted = min(text.find(s) for s in stops if s in text and s in text[:first])
        assert "".join(pieces) == text[:wanted]
        assert grown.is_stopped
    else:
        assert "".join(pieces) == text
    assert "".join(pieces) == grown.text


def test_what_stays_incomplete_is_shown_at_the_end() -> None:
    grown = TextOf(Bytes(), [])
    for token in "a€".encode()[:-1]:
        grown.add(token)
    assert grown.take(is_last=False) == "a"
    grown.end()
    assert grown.take(is_last=True) == "\ufffd"


def options(**given_options: Any) -> Options:
    facts: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": None,
        "top_count": 0,
        "stops": (),
        "stop_ids": frozenset(),
        "ignores_eos": False,
    }
    return Options(**{**facts, **given_options})


def version(number: int) -> Version:
    return Version(
        version=number,
        step=None,
        lineage="l",
        kind="delta",
        manifest=f"{number:064x}",
        weights="",
        layout="",
        payload_bytes=0,
        raw_bytes=0,
        word_count=0,
        changed_count=0,
        created_ms=0,
    )


class Held:
    """A model that is at a version."""

    def __init__(self) -> None:
        self.number = 1

    @contextmanager
    def reading(self) -> Any:
        yield version(self.number)


def sampled(model: Any, rows: list[Row], on_token: Any = lambda row: None, **how: Any) -> None:
    held = how.pop("held", Held())
    eos = how.pop("eos", frozenset())
    how = {"is_interruptible": False, **how}
    Sampler(model, eos).run(rows, held.reading, on_token, **how)


def test_a_batch_is_what_its_rows_are_alone() -> None:
    """Of any lengths, ending at different times: padding and dropping change nothing."""
    model = llama(3)
    prompts = [[1], list(range(30)), [5, 6, 7], [8] * 12]
    lengths = [9, 3, 6, 1]
    together = [
        Row(prompt, options(max_tokens=length, seed=n), generator_for(n, 0))
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    sampled(model, together)
    for number, row in enumerate(together):
        alone = Row(row.prompt, row.options, generator_for(number, 0))
        sampled(model, [alone])
        assert [t.token for t in alone.tokens] == [t.token for t in row.tokens]
        for one, other in zip(alone.tokens, row.tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert row.finish == "length"


def _models() -> dict[str, Any]:
    """Positions by table, by rotation and by bias; windows, experts, and recurrent states."""
    import transformers as tf

    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
    layers = ["sliding_attention", "full_attention"]
    end = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    gpt2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, **end}
    bloom = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2, **end}
    return {
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**gpt2, initializer_range=0.3)),
        "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(**bloom, initializer_range=0.3)),
        "gemma3": lambda: tf.Gemma3ForCausalLM(
            tf.Gemma3TextConfig(
                **shape, **heads, **end, head_dim=16, sliding_window=8, layer_types=layers
            )
        ),
        "mixtral": lambda: tf.MixtralForCausalLM(
            tf.MixtralConfig(**shape, **heads, num_local_experts=4)
        ),
        "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(**shape, **end, state_size=8)),
    }


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma3", "mixtral", "mamba"])
def test_models_of_other_kinds(name: str) -> None:
    """Sampled in a batch, each answer has the log-probabilities of one pass over it alone."""
    torch.manual_seed(0)
    model = _models()[name]().eval()
    can_pad = Sampler(model, frozenset()).can_pad
    assert can_pad == (name != "mamba")
    prompts = [[1], list(range(30)), [5, 6, 7]] if can_pad else [[1, 2], [3, 4], [5, 6]]
    rows = [
        Row(prompt, options(max_tokens=length), generator_for(length, 0))
        for prompt, length in zip(prompts, (9, 2, 6), strict=True)
    ]
    sampled(model, rows)
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row.ids])).logits[0, len(row.prompt) - 1 : -1]
        fresh = logits.float().log_softmax(-1)
        for number, token in enumerate(row.tokens):
            assert token.logprob == pytest.approx(float(fresh[number, token.token]), abs=1e-4)


def test_without_a_cache_everything_is_read_again() -> None:
    model = llama(3)
    forward = model.forward

    class Plain(torch.nn.Module):
        """A model that takes ids and a mask only, and remembers nothing."""

        device = torch.device("cpu")

        def forward(
            self, input_ids: Any, attention_mask: Any, past_key_values: Any, use_cache: bool
        ) -> Any:
            assert past_key_values is None
            positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
            found = forward(input_ids, attention_mask, positions, use_cache=False)
            found.past_key_values = None
            return found

    rows = [Row(p, options(seed=1), generator_for(1, 0)) for p in ([1, 2, 3], [4])]
    sampled(model, rows)
    plain = [Row(r.prompt, r.options, generator_for(1, 0)) for r in rows]
    sampled(Plain(), plain)
    for one, other in zip(rows, plain, strict=True):
        assert [t.token for t in one.tokens] == [t.token for t in other.tokens]


@pytest.mark.parametrize("is_interruptible", [False, True])
def test_an_update_between_tokens(is_interruptible: bool) -> None:
    """Keys and values are computed anew, so that each token is wholly of its version."""
    model, other = llama(3), llama(3)
    nudge(other, 1)
    states = {1: dict(llama(3).state_dict()), 2: dict(other.state_dict())}
    held = Held()

    def on_token(row: Row) -> None:
        if len(row.tokens) == 4 and is_interruptible:
            held.number = 2
            model.load_state_dict(states[2])

    row = Row([1, 2, 3], options(seed=1), generator_for(1, 0))
    sampled(model, [row], on_token, held=held, is_interruptible=is_interruptible)
    spans = [(found.version, start) for found, start in row.spans]
    assert spans == ([(1, 0), (2, 4)] if is_interruptible else [(1, 0)])
    for number, token in enumerate(row.tokens):
        fresh = llama(3)
        fresh.load_state_dict(states[2 if is_interruptible and number >= 4 else 1])
        with torch.no_grad():
            logits = fresh(torch.tensor([row.ids[: 3 + number]])).logits[0, -1]
        assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[token.token]), abs=1e-4)


def test_the_models_own_end() -> None:
    everything = frozenset(range(64))
    for ignores, count in ((False, 1), (True, 8)):
        row = Row([1], options(ignores_eos=ignores), generator_for(None, 0))
        sampled(llama(3), [row], eos=everything)
        assert len(row.tokens) == count
        assert row.finish == ("length" if ignores else "stop")


def test_top_p_and_temperature() -> None:
    from thinwire.engines.transformers.sampling import _sampled

    scores = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = generator_for(1, 0)
    for top_p, allowed in (
        (0.4, {0}),
        (0.5, {0}),
        (0.6, {0, 1}),
        (0.9, {0, 1, 2}),
        (1, {0, 1, 2, 3}),
    ):
        found = {_sampled(scores, options(top_p=top_p), generator) for _ in range(300)}
        assert found == allowed
    assert {_sampled(scores, options(temperature=0.0), generator) for _ in range(9)} == {0}
    hot = [_sampled(scores, options(temperature=2.0), generator) for _ in range(2000)]
    wanted = torch.softmax(scores / 2, dim=-1)
    for token in range(4):
        assert hot.count(token) / 2000 == pytest.approx(float(wanted[token]), abs=0.05)


def test_how_far_behind() -> None:
    newest = Newest()

    def applied(number: int) -> None:
        facts: dict[str, Any] = {"url": "u", "lineage": "l", "version": number, "kind": "delta"}
        newest.on_event(Applied(**facts, base=None, wall_s=0, age_s=0))

    def fetched(number: int) -> None:
        facts: dict[str, Any] = {"url": "u", "lineage": "l", "version": number, "kind": "delta"}
        newest.on_event(Fetched(**facts, payload_bytes=0, cached_bytes=0, wall_s=0))

    applied(3)
    assert newest.behind(3) == (0, 0.0)
    fetched(4)
    fetched(5)
    time.sleep(0.02)
    count, seconds = newest.behind(3)
    assert (count, seconds >= 0.02) == (2, True)
    applied(4)
    assert newest.behind(4)[0] == 1
    applied(5)
    assert newest.behind(5) == (0, 0.0)
    # The stream was set back.
    applied(2)
    assert newest.behind(2) == (0, 0.0)
