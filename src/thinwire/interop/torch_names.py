"""What torch calls the dtypes of safetensors: several systems write these names to their files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TORCH_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "BF16": "bfloat16",
        "F16": "float16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "F4": "float4_e2m1fn_x2",
        "BOOL": "bool",
        **{f"I{width}": f"int{width}" for width in (8, 16, 32, 64)},
        **{f"U{width}": f"uint{width}" for width in (8, 16, 32, 64)},
    }
)
"""safetensors' name to torch's. F6 has none, and torch's F4 has two elements in one."""
