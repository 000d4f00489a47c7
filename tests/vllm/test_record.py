"""Records of what a real vLLM answers, and how they agree with a fresh load of their version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.engines import record
from thinwire.engines.agreement import Agreement
from thinwire.engines.answers import from_vllm
from thinwire.engines.engine import label_of
from thinwire.engines.record import Record, npy_experts

from .following import PROMPTS, TOKENS, Rollout, complete_body, generate_body
from .fresh import FreshLoads
from .server import VllmServer


def generated(server: VllmServer, prompt: list[int], **sampling: Any) -> Record:
    body = {**generate_body(prompt), "return_token_ids": True}
    body["sampling_params"] = {**body["sampling_params"], **sampling}
    (found,) = from_vllm(server.post("/inference/v1/generate", body))
    return found


def compared(agreement: Agreement, fresh: FreshLoads, model: Path, one: Record) -> None:
    """Against what a vLLM that loaded the model from its folder would say of the same tokens."""
    (scores,) = fresh.scores(model, [[*one.prompt, *one.tokens]])
    agreement.compare(one, scores[one.prompt_count - 1 :])


def test_each_version_agrees_with_its_own_weights_and_no_others(
    server: VllmServer, rollout: Rollout, fresh: FreshLoads, tmp_path: Path
) -> None:
    right, wrong = Agreement(), Agreement()
    path = tmp_path / "records.jsonl"
    labels = []
    with rollout.driver(server) as driver:
        before = ""
        for _ in range(2):
            version = driver.follower.catch_up()
            driver.bring_to(version)
            labels.append(label_of(version))
            for number, prompt in enumerate(PROMPTS):
                one = generated(server, prompt, temperature=1.0, seed=number)
                assert (list(one.prompt), one.prompt_count) == (prompt, len(prompt))
                assert (len(one.tokens), one.version) == (TOKENS, label_of(version))
                record.append(path, [one])
                if before:
                    compared(wrong, fresh, rollout.models[before], one)
            before = label_of(version)
            rollout.change(share=0.05)
    found, _ = record.read(path)
    for one in found:
        assert one.version is not None
        compared(right, fresh, rollout.models[one.version], one)
    assert right.versions == tuple(labels)
    for label in labels:
        told = right.of(label)
        assert (told.token_count, told.missing_count) == (len(PROMPTS) * TOKENS, 0)
        # The same program with the same weights: the floor is zero here.
        assert told.max_difference == 0
        assert told.ratio_quantiles == {0.01: 1.0, 0.5: 1.0, 0.99: 1.0}
    stale = wrong.of(labels[1])
    assert stale.mean_difference > 0.01
    assert stale.k3 > 0


def test_every_route_tells_the_same_tokens(server: VllmServer) -> None:
    server.post("/update_weight_version", {"new_version": "7-routes"})
    one = generated(server, PROMPTS[0])
    before = server.get("/weight_info")["weight_version"]
    answer = server.post("/v1/completions", complete_body(PROMPTS[0]))
    after = server.get("/weight_info")["weight_version"]
    (completed,) = from_vllm(answer, began=before, ended=after)
    assert one.version == completed.version == "7-routes"
    assert one.tokens == completed.tokens
    assert one.log_probs == completed.log_probs
    assert one.prompt == completed.prompt
    (unknown,) = from_vllm(answer)
    assert unknown.version is None
    chat = {
        "model": "model",
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": TOKENS,
        "logprobs": True,
        "return_token_ids": True,
        "n": 2,
        "temperature": 1.0,
    }
    first, second = from_vllm(server.post("/v1/chat/completions", chat), began="7", ended="7")
    assert (first.index, second.index) == (0, 1)
    assert first.prompt_count == len(first.prompt) > 0
    for one in (first, second):
        assert one.version == "7"
        assert len(one.tokens) == len(one.log_probs) > 0
        assert None not in one.log_probs


def test_log_probabilities_are_those_before_the_temperature(server: VllmServer) -> None:
    """What the guide says of vLLM's default: a trainer compares at temperature one."""
    greedy = generated(server, PROMPTS[1], temperature=0, max_tokens=1)
    for seed in range(200):
        cold = generated(server, PROMPTS[1], temperature=0.2, seed=seed, max_tokens=1)
        if cold.tokens == greedy.tokens:
            assert cold.log_probs == greedy.log_probs
            return
    pytest.fail("the likeliest token never came")


def test_experts_are_packed_as_this_vllm_packs_them(fresh: FreshLoads) -> None:
    """Its own encoder; a CPU build cannot capture them (it needs Triton)."""
    for text in fresh.packed_experts():
        assert npy_experts(text).array().ravel().tolist() == list(range(30))
