"""A process that loads models afresh in vLLM and answers with their log-probabilities.

Each line of its standard input asks for one model, which is loaded when it is first asked for:
``{"model": folder, "prompts": [[token, ...]], "generate": n, "texts": [[token, ...]]}``. Each line
that it answers holds ``generated`` (for each prompt its n greedy tokens and the log-probability of
each, one prompt at a time) and ``scores`` (for each text the log-probability of every token but the
first, given those before). ``{"pack": shape}`` asks for an array as vLLM packs experts.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_models: dict[str, Any] = {}


def main() -> None:
    # Answers go where standard output was; what vLLM prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = _packed(asked["pack"]) if "pack" in asked else _answer(asked)
        print(json.dumps(answer), file=answers, flush=True)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    model = _loaded(asked["model"])
    greedy = SamplingParams(
        temperature=0, max_tokens=max(1, asked["generate"]), logprobs=0, ignore_eos=True
    )
    generated = []
    for prompt in asked["prompts"]:
        (request,) = model.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
        output = request.outputs[0]
        tokens = list(output.token_ids)
        found = [at[token].logprob for token, at in zip(tokens, output.logprobs, strict=True)]
        generated.append([tokens, found])
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    texts = [{"prompt_token_ids": text} for text in asked["texts"]]
    scores = []
    for request in model.generate(texts, scored, use_tqdm=False) if texts else []:
        pairs = zip(request.prompt_token_ids[1:], request.prompt_logprobs[1:], strict=True)
        scores.append([at[token].logprob for token, at in pairs])
    return {"generated": generated, "scores": scores}


def _packed(shape: list[int]) -> dict[str, Any]:
    import numpy as np
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseChoice
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensChoice
    from vllm.utils.serial_utils import numpy2base64

    for choice in (GenerateTokensChoice, CompletionResponseChoice):
        assert "routed_experts" in choice.model_fields
    assert "weight_versions" in GenerateTokensChoice.model_fields
    array = np.arange(np.prod(shape)).reshape(shape)
    return {"packed": [numpy2base64(array.astype(kind)) for kind in ("u1", "<u2", "<i4")]}


def _loaded(folder: str) -> Any:
    from vllm import LLM

    if folder not in _models:
        _models[folder] = LLM(
            folder,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=8,
            enforce_eager=True,
            num_gpu_blocks_override=256,
            enable_prefix_caching=False,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            # The same kernels as in the servers under test.
            weight_transfer_config={"backend": "thinwire"},
        )
    return _models[folder]


if __name__ == "__main__":
    main()
