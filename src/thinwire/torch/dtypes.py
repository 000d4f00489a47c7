"""The dtypes of safetensors, and what torch calls them."""

from __future__ import annotations

import torch

from thinwire.errors import InvalidArgument, TensorMismatch

# torch's names; older releases lack some.
_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "bool": "BOOL",
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
}
_NAME_OF: dict[torch.dtype, str] = {
    getattr(torch, own): name for own, name in _NAMES.items() if hasattr(torch, own)
}
_DTYPE_OF = {name: dtype for dtype, name in _NAME_OF.items()}


def dtype_name(dtype: torch.dtype, tensor: str = "") -> str:
    """A torch dtype by its safetensors name.

    Args:
        dtype: The dtype.
        tensor: Whose it is, to be named in an error.

    Raises:
        InvalidArgument: It cannot be published.
    """
    found = _NAME_OF.get(dtype)
    if found is None:
        raise InvalidArgument(
            f"tensor {tensor!r} is {dtype}, which cannot be published",
            hint="Leave it out (exclude=), or publish it in another dtype (dtypes=)",
        )
    return found


def torch_dtype(name: str, tensor: str = "") -> torch.dtype:
    """torch's dtype for one of safetensors.

    Args:
        name: The dtype.
        tensor: Whose it is, to be named in an error.

    Raises:
        TensorMismatch: torch has none.
    """
    found = _DTYPE_OF.get(name)
    if found is None:
        raise TensorMismatch(
            f"tensor {tensor!r} is {name}, which torch does not have",
            hint="Leave it out (ignore=)",
            tensor=tensor,
        )
    return found
