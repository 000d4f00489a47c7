"""Arrays of any library to bits and back, without importing that library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from thinwire.codec.dtypes import dtype_named
from thinwire.errors import InvalidArgument, Unsupported

_NUMPY_NAMES = {
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
    "float4_e2m1fn_x2": "F4",  # torch's: two elements a byte
    "bool": "BOOL",
    **{f"int{width}": f"I{width}" for width in (8, 16, 32, 64)},
    **{f"uint{width}": f"U{width}" for width in (8, 16, 32, 64)},
}


class Bits(NamedTuple):
    """An array's bits: a contiguous uint8 view (a copy where the array was not contiguous).

    ``restore`` makes an array of the caller's kind from new bits; ``is_view`` says whether writing
    to ``data`` writes to the caller's array. ``numpy_dtype`` is that of its elements, or uint of
    their width where numpy itself has none.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    is_view: bool
    numpy_dtype: np.dtype[Any]
    restore: Callable[[np.ndarray], Any]


def to_bits(array: Any, dtype: str | None = None) -> Bits:
    """The bits of a numpy array, a CPU torch tensor, a DLPack or a buffer object.

    Args:
        array: Any of these; contiguous or not.
        dtype: A safetensors dtype to read the bits as, for arrays that hold, say, BF16 as uint16.

    Raises:
        InvalidArgument: Not an array, not on the CPU, or of another width than ``dtype``.
        Unsupported: A dtype that safetensors does not have.
    """
    if isinstance(array, np.ndarray | np.generic):
        return _from_numpy(np.asarray(array), dtype, lambda new: new)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        try:
            return _from_torch(array, dtype, torch)
        except RuntimeError as error:  # sparse, conjugated, or without storage
            raise InvalidArgument(f"the tensor's memory cannot be read: {error}") from None
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, dtype)
    try:
        view = memoryview(array)
    except TypeError:
        raise InvalidArgument(
            f"{type(array).__name__} is not an array",
            hint="Pass a numpy array, a CPU torch tensor, a DLPack object or a buffer",
        ) from None
    restore: Callable[[np.ndarray], Any] = lambda new: new  # noqa: E731
    if isinstance(array, bytes | bytearray):
        kind = type(array)
        restore = lambda new: kind(new.tobytes())  # noqa: E731
    return _from_numpy(np.asarray(view), dtype, restore)


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def shape_of(dtype: str, shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """The tensor's shape in elements of ``dtype`` for an array of this shape.

    They differ for packed dtypes alone: bytes that hold F4 or F6 stand for more elements, counted
    along the last dimension.

    Raises:
        InvalidArgument: The last dimension does not hold whole elements, or there is none.
    """
    bits = dtype_named(dtype).bits
    if bits == 8 * item_bytes:
        return shape
    if not shape or shape[-1] * 8 * item_bytes % bits:
        raise InvalidArgument(
            f"an array of shape {list(shape)} does not hold whole {dtype} elements"
        )
    return (*shape[:-1], shape[-1] * 8 * item_bytes // bits)


def _from_numpy(array: np.ndarray, dtype: str | None, restore: Callable[[np.ndarray], Any]) -> Bits:
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        raise InvalidArgument("the array is big-endian", hint="Convert it with .astype('<...')")
    name = _named(array.dtype.name, array.dtype.itemsize, dtype)
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    shares = array.size == 0 or np.may_share_memory(contiguous, array)
    is_view = shares and array.flags.writeable
    kind = array.dtype
    shape = array.shape

    def rebuild(bits: np.ndarray) -> Any:
        return restore(bits.view(kind).reshape(shape))

    elements = shape_of(name, shape, array.dtype.itemsize)
    return Bits(name, elements, contiguous.reshape(-1).view(np.uint8), is_view, kind, rebuild)


def _from_torch(tensor: Any, dtype: str | None, torch: Any) -> Bits:
    if tensor.device.type != "cpu":
        raise InvalidArgument(
            f"the tensor lies on {tensor.device}",
            hint="Pass tensor.cpu(): the codec reads host memory",
        )
    kind = tensor.dtype
    name = _named(str(kind).removeprefix("torch."), tensor.element_size(), dtype)
    contiguous = tensor.detach().contiguous()
    data = contiguous.reshape(-1).view(torch.uint8).numpy()
    is_view = contiguous.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()
    shape = tuple(tensor.shape)

    def rebuild(bits: np.ndarray) -> Any:
        if not bits.size:
            # numpy gives it strides that torch refuses to view.
            return torch.empty(shape, dtype=kind)
        return torch.from_numpy(bits).view(kind).reshape(shape)

    numpy_dtype = _torch_numpy_dtype(tensor)
    elements = shape_of(name, shape, tensor.element_size())
    return Bits(name, elements, data, is_view, numpy_dtype, rebuild)


def _torch_numpy_dtype(tensor: Any) -> np.dtype[Any]:
    try:
        return np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:  # bfloat16, float8
        return np.dtype(f"u{tensor.element_size()}")


def _from_dlpack(array: Any, dtype: str | None) -> Bits:
    try:
        view = np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"the array cannot be read through DLPack: {error}",
            hint="Pass host memory of a dtype numpy knows; BF16 as a uint16 view, dtype='BF16'",
        ) from None
    namespace = getattr(array, "__array_namespace__", lambda: np)()
    return _from_numpy(view, dtype, getattr(namespace, "from_dlpack", lambda new: new))


def _named(name: str, item_bytes: int, wanted: str | None) -> str:
    if wanted is not None:
        bits = dtype_named(wanted).bits
        # Packed elements come as bytes.
        if bits != 8 * item_bytes and not (bits < 8 and item_bytes == 1):
            raise InvalidArgument(f"an array of {name} cannot be read as {wanted}: other widths")
        return wanted
    try:
        return _NUMPY_NAMES[name]
    except KeyError:
        raise Unsupported(
            f"arrays of {name} have no safetensors dtype",
            hint="Pass a view of a known dtype, or dtype= (packed F4 and F6 as uint8)",
            dtype=name,
        ) from None
