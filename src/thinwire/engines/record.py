"""What an engine said of a rollout: tokens, log-probabilities, experts, and by which weights.

A trainer takes a rollout for a sample of one version's policy. :class:`Record` holds what that
claim rests on, token by token, in one shape for vLLM, SGLang and ``thinwire serve``; an
:class:`thinwire.engines.agreement.Agreement` compares it with what the trainer computes.

The answers come from another program: whatever is read from them is checked against named limits
first, and nothing but numbers and short text is taken.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from thinwire.errors import Corrupt, InvalidArgument, LimitExceeded

MAX_TOKENS = 1 << 20
"""The longest prompt, and the longest completion."""

MAX_SPANS = 1 << 12
"""The most spans of versions in one completion."""

MAX_VERSION_CHARS = 256
"""The longest label of a version."""

MAX_CHOICES = 1 << 12
"""The most completions in one answer."""

MAX_EXPERT_BYTES = 1 << 29
"""The most expert choices of one completion, in bytes."""

MAX_LAYERS = 1 << 12
"""The most layers that choose experts."""

MAX_TOP_K = 1 << 8
"""The most experts that a layer chooses for a token."""

LOWEST_LOG_PROB = -9999.0
"""What stands for a probability of zero: JSON has no infinity, and vLLM sends this number."""

UNKNOWN = ""
"""The version of tokens of which the engine does not say who sampled them."""

_ROUNDING = 1e-3  # a log-probability this far above zero is a rounded one, not a wrong one
_DTYPES = {"u1": 1, "<u2": 2, "<i4": 4}
_HEADER_BYTES = 1 << 10


class Span(msgspec.Struct, frozen=True):
    """The completion's tokens from ``start`` to before ``end`` were sampled under ``version``."""

    version: str
    start: int
    end: int


class Experts(msgspec.Struct, frozen=True):
    """Which experts each layer chose, packed: rows of ``layers`` times ``top_k`` numbers.

    A row belongs to the place whose output a token was sampled from, so the last row is the last
    token's. There may be more rows than tokens (the prompt's, before them) or one fewer.
    """

    rows: int
    layers: int
    top_k: int
    dtype: Literal["u1", "<u2", "<i4"]
    data: bytes

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            ValueError: As said.
        """
        if not (self.rows >= 0 and 0 < self.layers <= MAX_LAYERS and 0 < self.top_k <= MAX_TOP_K):
            raise ValueError(f"experts of {self.rows} x {self.layers} x {self.top_k}")
        if len(self.data) != self.rows * self.layers * self.top_k * _DTYPES[self.dtype]:
            raise ValueError("the experts' bytes are not as many as their shape says")

    def array(self) -> NDArray[Any]:
        """All rows, read-only: ``[rows, layers, top_k]``."""
        flat = np.frombuffer(self.data, np.dtype(self.dtype))
        return flat.reshape(self.rows, self.layers, self.top_k)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One completion.

    Attributes:
        request: The engine's name for the request.
        index: Which of the request's completions.
        prompt_count: Tokens of the prompt.
        prompt: Those tokens, where the answer holds them; else empty.
        tokens: The completion's.
        log_probs: Of each token, as the engine had it when it sampled. None: it gave none, or not
            a number. :data:`LOWEST_LOG_PROB`: it gave the token no chance at all.
        spans: Which version sampled which tokens, without gaps, in order.
        experts: Where the engine offers them.
        finish: Why it ended, in the engine's word.
    """

    request: str
    prompt_count: int
    tokens: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    spans: tuple[Span, ...]
    index: int = 0
    prompt: tuple[int, ...] = ()
    experts: Experts | None = None
    finish: str = ""

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            ValueError: As said.
        """
        count = len(self.tokens)
        if max(count, len(self.prompt)) > MAX_TOKENS or len(self.spans) > MAX_SPANS:
            raise ValueError("more tokens or spans than allowed")
        if len(self.log_probs) != count:
            raise ValueError(f"{len(self.log_probs)} log-probabilities for {count} tokens")
        if self.prompt and len(self.prompt) != self.prompt_count:
            raise ValueError(f"{len(self.prompt)} tokens of a prompt of {self.prompt_count}")
        if min(self.prompt_count, *self.prompt, *self.tokens, 0) < 0:
            raise ValueError("a token or a count is negative")
        for value in self.log_probs:
            if value is not None and not LOWEST_LOG_PROB <= value <= _ROUNDING:
                raise ValueError(f"{value} is no log-probability")
        at = 0
        for span in self.spans:
            if len(span.version) > MAX_VERSION_CHARS:
                raise ValueError(f"the label of a version has {len(span.version)} characters")
            if span.start != at or span.end < span.start:
                raise ValueError("the spans of versions have gaps or overlap")
            at = span.end
        if at != count:
            raise ValueError(f"the spans of versions cover {at} of {count} tokens")
        if self.experts is not None and self.experts.rows not in range(
            max(0, count - 1), self.prompt_count + count
        ):
            raise ValueError(f"{self.experts.rows} rows of experts for {count} tokens")

    @property
    def version(self) -> str | None:
        """The version that all tokens were sampled under; None: several, none or not known."""
        versions = {span.version for span in self.spans if span.end > span.start}
        return None if len(versions) != 1 or UNKNOWN in versions else versions.pop()

    def token_experts(self) -> NDArray[Any] | None:
        """Experts of the completion's tokens, ``[tokens, layers, top_k]``, read-only.

        Where the engine left the first token's out, there is one row fewer.
        """
        if self.experts is None:
            return None
        found = self.experts.array()
        return found[max(0, len(found) - len(self.tokens)) :]


def log_prob(value: float | None) -> float | None:
    """A log-probability as records hold it, whatever a program computed.

    Returns:
        None for NaN, and :data:`LOWEST_LOG_PROB` for whatever is below it.
    """
    if value is None or math.isnan(value):
        return None
    return max(value, LOWEST_LOG_PROB)


def spans_of(count: int, began: str | None, ended: str | None) -> tuple[Span, ...]:
    """The spans of a completion of which only the versions around it are known.

    Args:
        count: Its tokens.
        began: The engine's version before the request was sent; None: nobody asked.
        ended: The engine's version after the answer came; None: nobody asked.

    Returns:
        One span: of the version, if it was the same before and after. An engine that was updated in
        between may have sampled any of the tokens with either.
    """
    is_known = began is not None and began == ended
    return (Span(began if is_known and began is not None else UNKNOWN, 0, count),)


def append(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Add records to a file of JSON lines, in one write; several processes may do so at once."""
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while lines:
            lines = lines[os.write(descriptor, lines) :]
    finally:
        os.close(descriptor)


def read(path: str | os.PathLike[str], offset: int = 0) -> tuple[list[Record], int]:
    """The records of a file, and the offset to go on at; a line that is being written is left.

    Raises:
        Corrupt: A line is not a record.
    """
    with Path(path).open("rb") as file:
        file.seek(offset)
        whole, newline, _ = file.read().rpartition(b"\n")
    if not newline:
        return [], offset
    try:
        records = [msgspec.json.decode(line, type=Record) for line in whole.split(b"\n") if line]
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} holds a line that is no record: {error}", path=str(path)) from error
    return records, offset + len(whole) + 1


def checked_choices(choices: Sequence[Any]) -> None:
    """Refuse an answer of too many completions.

    Raises:
        LimitExceeded: As said.
    """
    if len(choices) > MAX_CHOICES:
        raise LimitExceeded(f"an answer holds {len(choices)} completions, limit {MAX_CHOICES}")


def npy_experts(text: str) -> Experts:
    """Experts from base64 of a ``.npy`` file, as vLLM sends them.

    Raises:
        LimitExceeded: More than :data:`MAX_EXPERT_BYTES`.
        Corrupt: It is not such a file, or not of three dimensions of small integers.
    """
    body = _decoded(text)
    try:
        return _npy(io.BytesIO(body))
    except (ValueError, EOFError) as error:
        raise Corrupt(f"the experts of a completion cannot be read: {error}") from error


def _npy(body: io.BytesIO) -> Experts:
    if np.lib.format.read_magic(body) != (1, 0):
        raise ValueError("not a file of NumPy's format 1.0")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(
        body, max_header_size=_HEADER_BYTES
    )
    name = "u1" if dtype == np.dtype("u1") else dtype.str
    if is_fortran or len(shape) != 3 or name not in _DTYPES:
        raise ValueError(f"an array of {dtype} and shape {shape}")
    rows, layers, top_k = shape
    return Experts(rows, layers, top_k, name, body.read())  # type: ignore[arg-type]


def raw_experts(text: str, layers: int, top_k: int) -> Experts:
    """Experts from base64 of bare int32 numbers, as SGLang sends them.

    Args:
        text: The base64.
        layers: Layers that choose experts; the answer does not say.
        top_k: How many each chooses; the answer does not say.

    Raises:
        InvalidArgument: No shape was given.
        LimitExceeded: More than :data:`MAX_EXPERT_BYTES`.
        Corrupt: It does not divide into rows of that shape.
    """
    if not (0 < layers <= MAX_LAYERS and 0 < top_k <= MAX_TOP_K):
        raise InvalidArgument(
            f"experts of {layers} layers and {top_k} choices",
            hint="The engine does not send their shape: give layers and top_k of the model",
        )
    body = _decoded(text)
    rows, rest = divmod(len(body), layers * top_k * 4)
    if rest:
        raise Corrupt(
            f"{len(body)} bytes of experts are no rows of {layers} layers and {top_k} choices"
        )
    return Experts(rows, layers, top_k, "<i4", body)


def _decoded(text: str) -> bytes:
    if len(text) > MAX_EXPERT_BYTES // 3 * 4 + _HEADER_BYTES:
        raise LimitExceeded(f"{len(text)} characters of experts, limit {MAX_EXPERT_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise Corrupt(f"the experts of a completion are no base64: {error}") from error
