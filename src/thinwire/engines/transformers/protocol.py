"""Requests as OpenAI's clients send them: read, checked against limits, refused with a reason."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from thinwire.stream.version import Version

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256


class ApiError(Exception):
    """A request that is refused, or failed.

    Attributes:
        status: The HTTP status.
        code: A word for programs.
        param: The field that is at fault, if one is.
        facts: What else the body says.
    """

    def __init__(
        self, status: int, message: str, code: str, *, param: str | None = None, **facts: Any
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.facts = facts

    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        facts = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**facts, **self.facts}}


class Limits(NamedTuple):
    """What a request may ask for; checked before memory is taken.

    Attributes:
        body_bytes: Bytes of a request's body.
        context_tokens: Tokens of a prompt and its answer together.
        max_tokens: Tokens of an answer.
        rows: Answers that are sampled at once: prompts times ``n`` of one request, and of a batch.
        requests: Requests that are open at once.
        version_timeout_s: How long a request may wait for a version.
    """

    body_bytes: int = 1 << 20
    context_tokens: int = 4096
    max_tokens: int = 2048
    rows: int = 64
    requests: int = 64
    version_timeout_s: float = 600.0


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Sampled(msgspec.Struct, kw_only=True):
    """What both kinds of requests have."""

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    min_version: int | None = None
    exact_version: int | None = None
    version_timeout_s: float = 0.0
    # Taken only as what changes nothing: to leave something out silently would be a wrong answer.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(_Sampled, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(_Sampled, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


Body = TypeVar("Body", bound=_Sampled)


class Wanted(NamedTuple):
    """Which versions may answer a request."""

    min_version: int | None
    exact_version: int | None
    timeout_s: float

    def allows(self, version: Version) -> bool:
        """Whether this one may."""
        if self.exact_version is not None:
            return version.version == self.exact_version
        return self.min_version is None or version.version >= self.min_version

    def is_past(self, version: Version) -> bool:
        """Whether waiting is of no use."""
        return self.exact_version is not None and version.version > self.exact_version


class Options(NamedTuple):
    """How an answer is sampled.

    Attributes:
        max_tokens: The most tokens.
        temperature: 0: the likeliest token.
        top_p: Of the likeliest tokens, those with this probability together.
        seed: Makes it repeatable; None: it is not.
        top_count: Of how many likeliest tokens log-probabilities are kept.
        stops: Texts that end an answer.
        stop_ids: Tokens that end it.
        ignores_eos: The model's own end does not end it.
    """

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    top_count: int
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignores_eos: bool


class Asked(NamedTuple):
    """A request that is sound.

    Attributes:
        kind: Of which route.
        prompts: Texts or tokens; of a chat, its messages.
        answer_count: Answers to each.
        options: How they are sampled.
        has_logprobs: Whether the answer shows log-probabilities.
        wanted: Which versions may answer.
        streams: Whether the answer comes piece by piece.
        has_usage: Whether its last piece says how many tokens there were.
        has_token_ids: Whether the answer shows token ids.
    """

    kind: Literal["completion", "chat"]
    prompts: list[str | list[int] | list[dict[str, str]]]
    answer_count: int
    options: Options
    has_logprobs: bool
    wanted: Wanted
    streams: bool
    has_usage: bool
    has_token_ids: bool


def read_completion(body: bytes, limits: Limits, model: str) -> Asked:
    """A body of /v1/completions.

    Raises:
        ApiError: It is not JSON, or asks for what cannot be done.
    """
    asked = _decoded(body, CompletionRequest)
    if asked.echo or asked.suffix or asked.best_of not in (None, 1, asked.n):
        raise _refused("echo, suffix and best_of are not supported", "unsupported_parameter")
    top_count = _in_range(asked.logprobs, "logprobs", 0, MAX_TOP_LOGPROBS)
    prompts = _prompts(asked.prompt)
    return _asked("completion", asked, limits, model, prompts, top_count, 16)


def read_chat(body: bytes, limits: Limits, model: str) -> Asked:
    """A body of /v1/chat/completions.

    Raises:
        ApiError: It is not JSON, or asks for what cannot be done.
    """
    asked = _decoded(body, ChatRequest)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise _refused("top_logprobs needs logprobs: true", "invalid_value", "top_logprobs")
    top_count = _in_range(asked.top_logprobs or 0, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not asked.messages:
        raise _refused("there are no messages", "invalid_value", "messages")
    if asked.max_completion_tokens is not None:
        asked.max_tokens = asked.max_completion_tokens
    messages = [{"role": m.role, "content": _text_of(m)} for m in asked.messages]
    return _asked(
        "chat", asked, limits, model, [messages], top_count if asked.logprobs else None, None
    )


def _decoded(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        param = where.strip("`").removeprefix("$").lstrip(".") or None
        raise _refused(message, "invalid_type", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"the body is not JSON: {str(error)[:200]}", "invalid_json") from None


def _asked(
    kind: Literal["completion", "chat"],
    asked: _Sampled,
    limits: Limits,
    model: str,
    prompts: list[Any],
    top_count: int | None,
    default_tokens: int | None,
) -> Asked:
    _check_unsupported(asked)
    if asked.model is not None and asked.model != model:
        raise ApiError(
            404,
            f"the model {asked.model[:100]!r} does not exist; here is {model!r}",
            "model_not_found",
            param="model",
        )
    if asked.n < 1 or asked.n * len(prompts) > limits.rows:
        raise _refused(
            f"n is {asked.n} for {len(prompts)} prompt(s); at most {limits.rows} answers are "
            "sampled at once",
            "invalid_value",
            "n",
        )
    max_tokens = asked.max_tokens
    if max_tokens is None:
        max_tokens = limits.max_tokens if default_tokens is None else default_tokens
        # To be cut to what the prompt leaves.
        max_tokens = -min(max_tokens, limits.max_tokens)
    elif not 1 <= max_tokens <= limits.max_tokens:
        raise _refused(
            f"max_tokens is {max_tokens}; from 1 to {limits.max_tokens} is possible",
            "invalid_value",
            "max_tokens",
        )
    options = Options(
        max_tokens,
        _in_range(1.0 if asked.temperature is None else asked.temperature, "temperature", 0, 2),
        _in_range(1.0 if asked.top_p is None else asked.top_p, "top_p", 1e-6, 1),
        _in_range(asked.seed, "seed", -(2**63), 2**63 - 1),
        top_count or 0,
        _stops(asked.stop),
        frozenset(asked.stop_token_ids or ()),
        asked.ignore_eos,
    )
    return Asked(
        kind,
        prompts,
        asked.n,
        options,
        top_count is not None,
        _wanted(asked, limits),
        bool(asked.stream),
        asked.stream_options is not None and asked.stream_options.include_usage,
        asked.return_token_ids,
    )


def _check_unsupported(asked: _Sampled) -> None:
    neutral: dict[str, tuple[Any, ...]] = {
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "repetition_penalty": (None, 1),
        "min_p": (None, 0),
        "top_k": (None, 0, -1),
        "logit_bias": (None, {}),
        "tools": (None, []),
        "functions": (None, []),
        "response_format": (None, {"type": "text"}),
    }
    for name, values in neutral.items():
        if getattr(asked, name) not in values:
            raise _refused(f"{name} is not supported", "unsupported_parameter", name)


def _wanted(asked: _Sampled, limits: Limits) -> Wanted:
    if asked.min_version is not None and asked.exact_version is not None:
        raise _refused("give one of min_version and exact_version", "invalid_value", "min_version")
    for name in ("min_version", "exact_version"):
        _in_range(getattr(asked, name), name, 1, 2**53)
    timeout_s = _in_range(asked.version_timeout_s, "version_timeout_s", 0, limits.version_timeout_s)
    return Wanted(asked.min_version, asked.exact_version, timeout_s)


def _prompts(prompt: str | list[Any]) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(part, str) for part in prompt):
        return list(prompt)
    if prompt and all(_is_tokens(part) for part in prompt):
        return list(prompt)
    if _is_tokens(prompt):
        return [prompt]
    raise _refused(
        "a prompt is a text, a list of token ids, or a list of these; none may be empty",
        "invalid_type",
        "prompt",
    )


def _is_tokens(part: Any) -> bool:
    # type(), because True is an int to isinstance.
    return isinstance(part, list) and bool(part) and all(type(token) is int for token in part)


def _text_of(message: Message) -> str:
    if isinstance(message.content, list):
        parts = [part.get("text") for part in message.content if part.get("type") == "text"]
        if len(parts) < len(message.content) or not all(isinstance(p, str) for p in parts):
            raise _refused("only text is supported in messages", "invalid_value", "messages")
        return "".join(str(part) for part in parts)
    return message.content or ""


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise _refused(
            f"stop takes up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters",
            "invalid_value",
            "stop",
        )
    return stops


def _in_range(value: Any, name: str, low: float, high: float) -> Any:
    # A NaN is in no range.
    if value is not None and not low <= value <= high:
        raise _refused(
            f"{name} is {value}; from {low} to {high} is possible", "invalid_value", name
        )
    return value


def _refused(message: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, code, param=param)
