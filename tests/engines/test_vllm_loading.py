"""What vLLM's backend finds out about a model before it touches its weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from thinwire.engines.vllm.loading import (  # noqa: E402
    check_same_model,
    derived_tensors,
    model_behind,
)
from thinwire.errors import EngineError  # noqa: E402


class Absorbing(torch.nn.Module):
    """As MLA does: a product of weights is kept beside them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(32, 32, bias=False)
        derived = self.kv_b_proj.weight.detach().clone()
        if where == "attribute":
            self.w_uv = derived
        elif where == "impl":
            self.impl = SimpleNamespace(w_uk_t=derived)
        elif where == "list":
            self.parts = [{"w": derived}]


@pytest.mark.parametrize("where", ["attribute", "impl", "list"])
def test_what_is_kept_beside_the_weights_is_found(where: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), Absorbing(where))
    (found,) = derived_tensors(model)
    assert found.startswith("1.")


def test_views_caches_scales_and_numbers_are_not_derived() -> None:
    model = torch.nn.Linear(32, 32)
    model.view = model.weight.detach().view(-1)
    model.kv_cache = [torch.zeros(4096)]
    model.scale = torch.ones(1)
    model.places = torch.zeros(4096, dtype=torch.int64)
    model.register_buffer("cos_sin_cache", torch.zeros(4096))
    assert derived_tensors(model) == []


def config_of(folder: Path, **values: object) -> SimpleNamespace:
    (folder / "config.json").write_text(json.dumps(values))
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(**values)))


def test_another_model_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    values = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 512}
    engine = config_of(tmp_path, **values)
    check_same_model(tmp_path, engine)
    (tmp_path / "config.json").write_text(json.dumps({**values, "hidden_size": 128}))
    with pytest.raises(EngineError, match="hidden_size is 64"):
        check_same_model(tmp_path, engine)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"hidden_size": null}'])
def test_a_config_that_says_nothing_forbids_nothing(tmp_path: Path, content: str) -> None:
    engine = config_of(tmp_path, hidden_size=64)
    (tmp_path / "config.json").write_text(content)
    check_same_model(tmp_path, engine)
    check_same_model(tmp_path, None)


def test_the_model_behind_a_function() -> None:
    model = torch.nn.Linear(2, 2)

    def load_weights(weights: object) -> object:
        return model, weights

    assert model_behind(load_weights) is model
    assert model_behind(model.forward) is model
    with pytest.raises(EngineError, match="cannot be reached"):
        model_behind(lambda weights: weights)
