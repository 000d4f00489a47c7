"""The run that starts in the midst of things: same BF16 weights, masters between them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch missing: the spread run trains with it", allow_module_level=True)

import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_masters_round_to_the_same_weights_and_lie_evenly_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from changes_spread import spread

    generator = torch.Generator().manual_seed(5)
    weight = (0.02 * torch.randn(20_000, generator=generator)).to(torch.bfloat16).float()
    weight[:4] = torch.tensor([0.0, 1.0, -1.0, 0.5])
    master = spread(weight, generator)
    assert torch.equal(master.to(torch.bfloat16).float(), weight)
    exponent = torch.floor(torch.log2(weight[4:].abs()))
    offset = (master[4:] - weight[4:]) / torch.exp2(exponent - 7)
    assert offset.min() < -0.49
    assert offset.max() > 0.49
    counts = torch.histc(offset, bins=4, min=-0.5, max=0.5)
    assert counts.min() > 0.9 * counts.max()
