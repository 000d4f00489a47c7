"""What vLLM loads in each of its processes, from the entry point group ``vllm.general_plugins``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

BACKEND = "thinwire"


def register() -> None:
    """Register the weight-transfer backend ``thinwire``. vLLM may call it several times."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # Already there: in this process it was called before.
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, "thinwire.engines.vllm.backend", "Backend"
        )
    _keep_cpu_weights_plain()


def _keep_cpu_weights_plain() -> None:
    """Have vLLM's CPU build keep linear weights as they were loaded, where thinwire updates them.

    It packs them for its kernels and empties the parameters, so that they can be neither changed
    nor compared; with tied embeddings its own reload leaves the packed output layer stale.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "is_thinwire", False):
        return

    def dispatch(layer: Any, *args: Any, **kwargs: Any) -> None:
        if _is_updated_by_thinwire():
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packing(layer, *args, **kwargs)

    dispatch.is_thinwire = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _is_updated_by_thinwire() -> bool:
    from vllm.config import get_current_vllm_config

    config = getattr(get_current_vllm_config(), "weight_transfer_config", None)
    return getattr(config, "backend", None) == BACKEND
