"""Records of rollouts: read from engines' answers, kept in files, compared with a trainer."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.engines import agreement, record
from thinwire.engines.agreement import Agreement
from thinwire.engines.answers import from_sglang, from_thinwire, from_vllm
from thinwire.engines.record import LOWEST_LOG_PROB, UNKNOWN, Experts, Record, Span, spans_of
from thinwire.errors import Corrupt, InvalidArgument, LimitExceeded

ROOT = Path(__file__).resolve().parents[2]
# As vLLM 0.32 answered /inference/v1/generate, with an update between two tokens.
GENERATED: dict[str, Any] = {
    "request_id": "generate-tokens-ac9ba6ee",
    "usage": {"prompt_tokens": 4, "total_tokens": 7, "completion_tokens": 3},
    "prompt_token_ids": None,
    "output_mode": "tokens",
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [6181, 28, 260],
            "routed_experts": None,
            "weight_versions": [
                {"version": "7-0123456789ab", "start": 0, "end": 2},
                {"version": "8-ba9876543210", "start": 2, "end": 3},
            ],
            "logprobs": {
                "content": [
                    {"token_id": 6181, "logprob": -8.58984661102295, "rank": 317},
                    {"token_id": 28, "logprob": -0.0673297569155693, "rank": 1},
                    {"token_id": 260, "logprob": -1.782434344291687, "rank": 1},
                ]
            },
        }
    ],
}
# As it answered /v1/completions.
COMPLETED: dict[str, Any] = {
    "id": "cmpl-aa37125632e9e2e5",
    "object": "text_completion",
    "choices": [
        {
            "index": 0,
            "text": "\n\n",
            "logprobs": {"token_logprobs": [-1.46484, -0.43872], "tokens": ["\n", "\n"]},
            "finish_reason": "stop",
            "token_ids": [198, 198],
            "prompt_token_ids": [1, 5, 9, 30],
            "routed_experts": None,
        }
    ],
    "usage": {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2},
}
# As SGLang's /generate answers; read in its source, not run.
SGLANG: dict[str, Any] = {
    "text": " 12",
    "output_ids": [216, 33],
    "meta_info": {
        "id": "f00",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "weight_version": "5-abcdefabcdef",
        "output_token_logprobs": [[-0.5, 216, None], [-1.5, 33, None]],
        "completion_tokens": 2,
    },
}


def copied(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(answer))
    return found


def npy(array: np.ndarray[Any, Any]) -> str:
    """As vLLM packs experts."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


def made(log_probs: list[float | None], versions: list[str] | None = None, **rest: Any) -> Record:
    count = len(log_probs)
    spans = spans_of(count, "v", "v")
    if versions is not None:
        spans = tuple(Span(version, at, at + 1) for at, version in enumerate(versions))
    return Record(
        request="r",
        prompt_count=2,
        tokens=tuple(range(count)),
        log_probs=tuple(log_probs),
        spans=spans,
        **rest,
    )


def test_vllm_says_which_version_sampled_which_token() -> None:
    (found,) = from_vllm(json.dumps(GENERATED).encode())
    assert found.request == "generate-tokens-ac9ba6ee"
    assert (found.prompt_count, found.finish) == (4, "length")
    assert found.tokens == (6181, 28, 260)
    assert found.log_probs == (-8.58984661102295, -0.0673297569155693, -1.782434344291687)
    assert found.spans == (Span("7-0123456789ab", 0, 2), Span("8-ba9876543210", 2, 3))
    assert found.version is None
    assert from_vllm(GENERATED) == [found]


def test_completions_have_the_version_that_was_there_before_and_after() -> None:
    (found,) = from_vllm(COMPLETED, began="7-a", ended="7-a")
    assert (found.version, found.prompt_count, found.finish) == ("7-a", 4, "stop")
    assert found.log_probs == (-1.46484, -0.43872)
    for around in [{}, {"began": "7-a"}, {"ended": "7-a"}, {"began": "7-a", "ended": "8-a"}]:
        (found,) = from_vllm(COMPLETED, **around)
        assert found.version is None
        assert found.spans == (Span(UNKNOWN, 0, 2),)


def test_chats_and_several_choices_are_read() -> None:
    answer = copied(GENERATED)
    answer["choices"].append({**copied(COMPLETED)["choices"][0], "index": 1})
    answer["prompt_token_ids"] = [1, 2]
    first, second = from_vllm(answer)
    assert (first.index, second.index) == (0, 1)
    assert (first.prompt_count, second.prompt_count) == (2, 4)
    assert (first.prompt, second.prompt) == ((1, 2), (1, 5, 9, 30))


def test_sglang_counts_only_if_the_version_was_there_before() -> None:
    (found,) = from_sglang(SGLANG, began="5-abcdefabcdef")
    assert found.version == "5-abcdefabcdef"
    assert (found.tokens, found.log_probs) == ((216, 33), (-0.5, -1.5))
    assert (found.request, found.prompt_count, found.finish) == ("f00", 3, "length")
    assert from_sglang(json.dumps([SGLANG]), began="5-abcdefabcdef") == [found]
    assert from_sglang([SGLANG, SGLANG], began="4")[1].index == 1
    for began in (None, "4-abcdefabcdef"):
        assert from_sglang(SGLANG, began=began)[0].version is None
    spanned = copied(SGLANG)
    spanned["meta_info"]["weight_versions"] = [{"version": "6", "start": 0, "end": 2}]
    assert from_sglang(spanned)[0].version == "6"


def test_our_own_server_says_which_version_sampled_which_token() -> None:
    answer = copied(COMPLETED)
    answer["choices"][0]["weight_spans"] = [
        {"weight_version": "7-a", "start": 0, "stop": 1},
        {"weight_version": "8-a", "start": 1, "stop": 2},
    ]
    (found,) = from_thinwire(answer)
    assert found.spans == (Span("7-a", 0, 1), Span("8-a", 1, 2))
    assert found.log_probs == (-1.46484, -0.43872)
    answer["choices"][0]["weight_spans"].pop()
    with pytest.raises(Corrupt):
        from_thinwire(answer)


def test_tokens_without_log_probabilities_stay_without() -> None:
    answer = copied(GENERATED)
    del answer["choices"][0]["logprobs"]
    assert from_vllm(answer)[0].log_probs == (None, None, None)
    answer = copied(SGLANG)
    del answer["meta_info"]["output_token_logprobs"]
    assert from_sglang(answer)[0].log_probs == (None, None)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (math.nan, None),
        (-math.inf, LOWEST_LOG_PROB),
        (-12_345.0, LOWEST_LOG_PROB),
        (-9999.0, LOWEST_LOG_PROB),
        (0.0, 0.0),
        (-0.25, -0.25),
    ],
)
def test_what_is_no_number_is_none_and_no_chance_has_a_number(
    value: float | None, kept: float | None
) -> None:
    answer = copied(COMPLETED)
    answer["choices"][0]["logprobs"]["token_logprobs"][1] = value
    assert from_vllm(answer)[0].log_probs[1] == kept


def changed(at: str, value: Any) -> dict[str, Any]:
    answer = copied(GENERATED)
    part: Any = answer
    *way, last = [int(step) if step.isdigit() else step for step in at.split(".")]
    for step in way:
        part = part[step]
    part[last] = value
    return answer


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("choices", None),
        ("choices", "x"),
        ("choices.0.token_ids", None),
        ("choices.0.token_ids", [6181, 28]),
        ("choices.0.token_ids", [6181, 28, 261]),
        ("choices.0.token_ids", [6181, 28, 260, 1]),
        ("choices.0.token_ids", [6181, 28, "260"]),
        ("choices.0.token_ids.0", -1),
        ("choices.0.logprobs.content.0.logprob", 0.5),
        ("choices.0.logprobs.content.0.logprob", math.inf),
        ("choices.0.logprobs.content.0.logprob", "-1"),
        ("choices.0.logprobs.content.0.logprob", True),
        ("choices.0.weight_versions", []),
        ("choices.0.weight_versions.1.start", 1),
        ("choices.0.weight_versions.1.end", 4),
        ("choices.0.weight_versions.0.start", -1),
        ("choices.0.weight_versions.0.version", 7),
        ("choices.0.weight_versions.0.version", "x" * 257),
        ("choices.0.routed_experts", "!"),
        ("choices.0.routed_experts", ""),
        ("choices.0.routed_experts", npy(np.zeros((7, 2, 2), np.uint8))),
        ("choices.0.routed_experts", npy(np.zeros((1, 2, 2), np.uint8))),
        ("choices.0.routed_experts", npy(np.zeros((6, 2), np.uint8))),
        ("choices.0.routed_experts", npy(np.zeros((6, 2, 2), np.float32))),
        ("choices.0.routed_experts", npy(np.asfortranarray(np.zeros((6, 2, 3), np.uint8)))),
        ("choices.0.routed_experts", npy(np.zeros((6, 0, 2), np.uint8))),
        ("choices.0.routed_experts", npy(np.zeros((6, 2, 2), np.uint8))[:-8]),
        ("usage.prompt_tokens", -1),
        ("prompt_token_ids", [1, -2]),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(at: str, value: Any) -> None:
    with pytest.raises(Corrupt):
        from_vllm(changed(at, value))


def test_what_is_no_answer_is_refused() -> None:
    for answer in (b"", b"{", b"[]", b'{"choices": [{}]}', b"\xff", "null"):
        with pytest.raises(Corrupt):
            from_vllm(answer)
        with pytest.raises(Corrupt):
            from_sglang(answer if answer != b"[]" else b"[[]]")
    for entry in ([], [-1.0], [-1.0, "3", None], ["-1", 3, None], [-1.0, 216.5, None], None):
        answer = copied(SGLANG)
        answer["meta_info"]["output_token_logprobs"][0] = entry
        with pytest.raises(Corrupt):
            from_sglang(answer)
    with pytest.raises(Corrupt):
        from_sglang({**SGLANG, "output_ids": [216, 34]})
    with pytest.raises(Corrupt):
        from_sglang({"meta_info": {}})


def test_limits_are_kept_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.engines import answers

    monkeypatch.setattr(answers, "MAX_TOKENS", 2)
    with pytest.raises(LimitExceeded):
        from_vllm(GENERATED)
    assert from_sglang(SGLANG)
    monkeypatch.setattr(answers, "MAX_TOKENS", 1)
    with pytest.raises(LimitExceeded):
        from_sglang(SGLANG)
    monkeypatch.setattr(record, "MAX_CHOICES", 1)
    with pytest.raises(LimitExceeded):
        from_sglang([SGLANG, SGLANG])
    monkeypatch.setattr(record, "MAX_EXPERT_BYTES", 1024)
    with pytest.raises(LimitExceeded):
        record.npy_experts("A" * 4096)
    # A header that promises more than there is takes no memory.
    header = npy(np.zeros((1, 1, 1), np.uint8))
    body = base64.b64decode(header).replace(b"(1, 1, 1)", b"(9, 9, 9)")
    with pytest.raises(Corrupt):
        record.npy_experts(base64.b64encode(body).decode())


def test_objects_in_a_numpy_file_are_not_loaded() -> None:
    with io.BytesIO() as buffer:
        np.save(buffer, np.array([[[print]]], object), allow_pickle=True)
        text = base64.b64encode(buffer.getvalue()).decode()
    with pytest.raises(Corrupt):
        record.npy_experts(text)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_experts_of_the_tokens_are_the_last_rows(dtype: Any) -> None:
    choices = np.arange(6 * 2 * 3, dtype=dtype).reshape(6, 2, 3)
    (found,) = from_vllm(changed("choices.0.routed_experts", npy(choices)))
    experts = found.token_experts()
    assert experts is not None
    assert experts.tolist() == choices[3:].tolist()
    assert not experts.flags.writeable
    # Without the prompt's, the first token's are left out, too.
    (found,) = from_vllm(changed("choices.0.routed_experts", npy(choices[4:])))
    experts = found.token_experts()
    assert experts is not None
    assert experts.tolist() == choices[4:].tolist()
    assert made([-1.0]).token_experts() is None


def test_sglang_sends_bare_numbers_of_a_shape_that_the_caller_knows() -> None:
    answer = copied(SGLANG)
    choices = np.arange(4 * 2 * 3, dtype="<i4").reshape(4, 2, 3)
    answer["meta_info"]["routed_experts"] = base64.b64encode(choices.tobytes()).decode()
    (found,) = from_sglang(answer, layers=2, top_k=3)
    experts = found.token_experts()
    assert experts is not None
    assert experts.tolist() == choices[2:].tolist()
    with pytest.raises(InvalidArgument, match="layers and top_k"):
        from_sglang(answer)
    with pytest.raises(Corrupt):
        from_sglang(answer, layers=5, top_k=3)


def test_records_survive_a_file_that_is_read_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    experts = Experts(2, 1, 2, "u1", bytes(range(4)))
    first = made([-0.1, None, LOWEST_LOG_PROB], experts=experts)
    second = made([-1 / 3], ["8"])
    record.append(path, [first])
    found, at = record.read(path)
    assert found == [first]
    assert record.read(path, at) == ([], at)
    line = msgspec.json.encode(second) + b"\n"
    with path.open("ab") as file:
        file.write(line[:20])
    assert record.read(path, at) == ([], at)
    with path.open("ab") as file:
        file.write(line[20:])
    assert record.read(path, at) == ([second], at + len(line))
    record.append(path, [])
    assert record.read(path)[0] == [first, second]


def test_several_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    one = made([-1.0] * 200)

    def write() -> None:
        for _ in range(50):
            record.append(path, [one])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert record.read(path)[0] == [one] * 200


@pytest.mark.parametrize("line", ["{}", "x", '{"request": "r", "prompt_count": 1}'])
def test_a_line_that_is_no_record_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(Corrupt):
        record.read(path)
    good = msgspec.json.encode(made([-1.0])).decode()
    path.write_text(good.replace("-1.0", "1.0") + "\n")
    with pytest.raises(Corrupt):
        record.read(path)


LOG_PROBS = st.floats(-30, 0, allow_nan=False)


@given(st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=1, max_size=60))
def test_numbers_are_those_of_the_whole(pairs: list[tuple[float, float]]) -> None:
    theirs, ours = (np.array(side) for side in zip(*pairs, strict=True))
    found = Agreement(clip=(0.8, 1.25), quantiles=(0.0, 0.25, 0.5, 0.9, 1.0))
    for start in range(0, len(pairs), 7):
        found.compare(made(theirs[start : start + 7].tolist()), ours[start : start + 7])
    told = found.of("v")
    difference = ours - theirs
    cut = np.clip(difference, -agreement.MAX_LOG_RATIO, agreement.MAX_LOG_RATIO)
    ratio = np.exp(cut)
    assert told.token_count == len(pairs)
    assert told.mean_difference == pytest.approx(np.abs(difference).mean())
    assert told.max_difference == pytest.approx(np.abs(difference).max())
    assert told.k1 == pytest.approx(-difference.mean(), abs=1e-12)
    assert told.k3 == pytest.approx((np.expm1(cut) - cut).mean(), rel=1e-9, abs=1e-12)
    assert told.k3 >= 0
    is_near_an_edge = (np.abs(ratio - 0.8) < 1e-9) | (np.abs(ratio - 1.25) < 1e-9)
    if not is_near_an_edge.any():
        assert told.clipped_share == pytest.approx(((ratio < 0.8) | (ratio > 1.25)).mean())
    for share, quantile in told.ratio_quantiles.items():
        exact = np.quantile(cut, share, method="inverted_cdf")
        assert math.log(quantile) == pytest.approx(exact, rel=0.06, abs=2e-4)


def test_each_token_counts_for_its_own_version() -> None:
    found = Agreement()
    found.compare(made([-1.0, -1.0, -1.0], ["7", "8", "8"]), [-1.0, -1.5, -2.0])
    assert found.versions == ("7", "8")
    assert found.of("7").max_difference == 0
    assert (found.of("8").token_count, found.of("8").mean_difference) == (2, 0.75)
    with pytest.raises(KeyError):
        found.of("9")


def test_tokens_without_a_number_and_without_a_chance_are_only_counted() -> None:
    found = Agreement()
    theirs = [None, -1.0, LOWEST_LOG_PROB, -1.0, -1.0]
    found.compare(made(theirs), [-1.0, math.nan, -1.0, -math.inf, -1.25])
    told = found.of("v")
    assert (told.token_count, told.missing_count, told.impossible_count) == (1, 2, 2)
    assert told.mean_difference == told.k1 == 0.25
    empty = Agreement()
    empty.compare(made([None]), [-1.0])
    nothing = empty.of("v")
    assert nothing.token_count == 0
    assert math.isnan(nothing.k3)
    assert math.isnan(nothing.max_difference)
    assert math.isnan(nothing.expert_share)
    assert all(math.isnan(quantile) for quantile in nothing.ratio_quantiles.values())


def test_one_absurd_token_does_not_drown_the_rest() -> None:
    found = Agreement()
    found.compare(made([-500.0, -1.0]), [-1.0, -1.0])
    assert found.of("v").max_difference == 499
    assert found.of("v").k3 < math.exp(agreement.MAX_LOG_RATIO)


def test_experts_agree_in_any_order() -> None:
    rows = np.array([[[9, 9]], [[0, 1]], [[2, 3]], [[4, 5]]], np.uint8)
    experts = Experts(4, 1, 2, "u1", rows.tobytes())
    found = Agreement()
    one = made([-1.0, -1.0, -1.0], ["7", "7", "8"], experts=experts)
    found.compare(one, [-1.0] * 3, [[[1, 0]], [[3, 6]], [[5, 4]]])
    assert (found.of("7").expert_count, found.of("7").expert_share) == (2, 0.75)
    assert (found.of("8").expert_count, found.of("8").expert_share) == (1, 1.0)
    # One row fewer than tokens: the first token's are not known.
    few = made([-1.0] * 3, experts=Experts(2, 1, 2, "u1", rows[2:].tobytes()))
    found.compare(few, [-1.0] * 3, [[[8, 8]], [[2, 3]], [[4, 6]]])
    assert (found.of("v").expert_count, found.of("v").expert_share) == (2, 0.75)
    # Told by one side only, they are not compared.
    found.compare(made([-1.0], ["9"]), [-1.0], [[[0, 1]]])
    assert found.of("9").expert_count == 0
    for shape in [(3, 1, 3), (3, 2, 2), (2, 1, 2)]:
        with pytest.raises(InvalidArgument):
            found.compare(one, [-1.0] * 3, np.zeros(shape, np.int64))


def test_many_rows_of_experts_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).integers(0, 8, (50, 3, 2), np.uint8)
    one = made([-1.0] * 50, experts=Experts(50, 3, 2, "u1", rows.tobytes()))
    whole, parts = Agreement(), Agreement()
    theirs = np.roll(rows, 1, axis=0)
    whole.compare(one, [-1.0] * 50, theirs)
    monkeypatch.setattr(agreement, "_EXPERT_ROWS", 7)
    parts.compare(one, [-1.0] * 50, theirs)
    assert whole.of("v") == parts.of("v")


def test_ranks_add_up_what_they_found() -> None:
    whole, first, second = Agreement(), Agreement(), Agreement()
    one, other = made([-1.0, -2.0], ["7", "8"]), made([-3.0], ["8"])
    for part, among, ours in [(first, one, [-1.5, -2.0]), (second, other, [-2.75])]:
        part.compare(among, ours)
        whole.compare(among, ours)
    first.merge(second)
    # Printed: NaN equals nothing.
    assert str([first.of(v) for v in first.versions]) == str([whole.of(v) for v in whole.versions])


def test_only_so_many_versions_are_kept() -> None:
    found = Agreement(keep=3)
    for version in range(10):
        found.compare(made([-1.0], [str(version)]), [-1.0])
    assert found.versions == ("7", "8", "9")


@pytest.mark.parametrize(
    "options",
    [{"clip": (1.1, 1.2)}, {"clip": (0.0, 1.2)}, {"quantiles": (1.5,)}, {"keep": 0}],
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Agreement(**options)


@pytest.mark.parametrize("ours", [[], [-1.0, -1.0], [[-1.0]], [0.5], [math.inf]])
def test_a_trainers_numbers_must_be_log_probabilities(ours: Any) -> None:
    with pytest.raises(InvalidArgument):
        Agreement().compare(made([-1.0]), ours)


GUIDE = (ROOT / "docs" / "guides" / "agreement.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("source", re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
def test_the_guides_examples_run(source: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
