"""Whether an engine answers as a fresh load of the version that it reports."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.engines.engine import label_of
from thinwire.engines.walk import Served
from thinwire.stream.version import Version

from .following import PROMPTS, TOKENS, Generated, Rollout, complete, generate
from .fresh import FreshLoads, Output
from .server import VllmServer

# One rank answers exactly as a fresh load, in whatever batch. Two add up halves of sums in BF16,
# which shifts log-probabilities against the oracle's single rank. What the ranks hold is compared
# bit by bit besides, with vLLM's own checksums after a reload.
_TOLERANCE = {1: 0.0, 2: 0.05}


def check_serves(
    server: VllmServer, rollout: Rollout, fresh: FreshLoads, version: Version | str
) -> None:
    """The engine reports this version, and every answer is a fresh load's and labelled so."""
    label = version if isinstance(version, str) else label_of(version)
    assert server.get("/weight_info") == {"weight_version": label}
    assert server.get("/is_paused") == {"is_paused": False}
    for prompt in PROMPTS:
        generated = generate(server, prompt)
        assert generated.spans == [(0, TOKENS, label)]
        check_output(server, rollout, fresh, label, prompt, generated.output)
        check_output(server, rollout, fresh, label, prompt, complete(server, prompt))


def check_output(
    server: VllmServer,
    rollout: Rollout,
    fresh: FreshLoads,
    label: str,
    prompt: Sequence[int],
    output: Output,
) -> None:
    (scores,) = fresh.scores(rollout.models[label], [[*prompt, *output.tokens]])
    difference = largest_difference(output.logprobs, scores[len(prompt) - 1 :])
    assert difference <= _TOLERANCE[server.ranks], f"{difference} from a fresh load of {label}"


def check_spans(
    rollout: Rollout, fresh: FreshLoads, prompt: Sequence[int], generated: Generated
) -> list[float]:
    """How far each span is from a fresh load of its version, given all tokens before it."""
    text = [*prompt, *generated.output.tokens]
    found = []
    for start, end, label in generated.spans:
        (scores,) = fresh.scores(rollout.models[label], [text])
        expected = scores[len(prompt) - 1 :][start:end]
        found.append(largest_difference(generated.output.logprobs[start:end], expected))
    return found


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def check_served(
    served: Served | None, version: Version, *, way: str, is_proved: bool | None
) -> None:
    assert served is not None
    assert (served.version, served.label) == (version, label_of(version))
    assert (served.way, served.is_proved) == (way, is_proved)
