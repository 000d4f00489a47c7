"""One array in, the same kind of array out: every library, dtype, shape and memory layout."""

from __future__ import annotations

import array
import importlib
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import thinwire
from thinwire.errors import (
    InvalidArgument,
)

from .array_making import NUMPY_DTYPES, bits, random_array, stepped

SHAPES = [(), (0,), (1,), (3, 0, 2), (1, 1, 1), (129,), (40, 33), (5, 4, 3, 2)]


def assert_all_ways(base: np.ndarray, new: np.ndarray, **options: Any) -> None:
    """encode, then decode, decode_into, changes and inspect agree; the base is left alone."""
    before = bits(base)
    payload = thinwire.encode(base, new, **options)
    decoded = thinwire.decode(base, payload)
    assert type(decoded) is type(base)
    assert decoded.dtype == base.dtype
    assert decoded.shape == base.shape
    assert bits(decoded) == bits(new)

    found = thinwire.changes(base, payload)
    flat = base.reshape(-1).copy()
    assert found.indices.dtype == np.int64
    assert found.values.dtype == base.dtype
    assert (np.diff(found.indices) > 0).all()
    flat[found.indices] = found.values
    assert bits(flat) == bits(new)
    differs = np.frombuffer(bits(base), f"V{base.itemsize}") != np.frombuffer(
        bits(new), f"V{base.itemsize}"
    )
    assert np.array_equal(found.indices, np.flatnonzero(differs))

    inspection = thinwire.inspect(payload)
    assert inspection.file_bytes == len(payload)
    assert inspection.raw_bytes == base.nbytes
    assert inspection.tensors[0].shape == base.shape
    assert bits(base) == before
    own = base.copy()
    thinwire.decode_into(own, payload)
    assert bits(own) == bits(new)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_dtypes_and_shapes(name: str, shape: tuple[int, ...]) -> None:
    base = random_array(NUMPY_DTYPES[name], shape)
    assert_all_ways(base, stepped(base))
    assert_all_ways(base, base.copy())
    assert_all_ways(base, random_array(NUMPY_DTYPES[name], shape, 7))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e5m2", "int64", "bool"])
@pytest.mark.parametrize(
    "layout",
    [
        lambda a: a.T,
        lambda a: a[::-1, ::-1],
        lambda a: a[::2, 1::3],
        lambda a: a[:, ::-2],
        lambda a: np.asfortranarray(a),
        lambda a: a[3],
        lambda a: a[:, 3],
        lambda a: np.swapaxes(a.reshape(5, 8, 33), 0, 2),
    ],
)
def test_memory_layouts(name: str, layout: Any) -> None:
    whole = random_array(NUMPY_DTYPES[name], (40, 33))
    base = layout(whole)
    new = layout(stepped(whole))
    assert_all_ways(base, new)
    # In place through the view, and nothing beside it.
    payload = thinwire.encode(base, new)
    expected = whole.copy()
    layout(expected)[...] = new
    thinwire.decode_into(base, payload)
    assert bits(base) == bits(new)
    if np.may_share_memory(base, whole):
        assert bits(whole) == bits(expected)


def test_a_broadcast_base_is_only_read() -> None:
    base = np.broadcast_to(np.float32(1), (6, 5))
    new = np.full((6, 5), 2, np.float32)
    payload = thinwire.encode(base, new)
    assert bits(thinwire.decode(base, payload)) == bits(new)
    with pytest.raises(InvalidArgument, match="read-only"):
        thinwire.decode_into(base, payload)


@pytest.mark.parametrize("shape", [(600,), (0,), ()])
def test_a_read_only_base_decodes_but_not_in_place(shape: tuple[int, ...]) -> None:
    base = random_array(np.dtype(np.uint16), shape)
    new = stepped(base)
    base.flags.writeable = False
    payload = thinwire.encode(base, new)
    assert bits(thinwire.decode(base, payload)) == bits(new)
    with pytest.raises(InvalidArgument, match="read-only"):
        thinwire.decode_into(base, payload)


def test_signs_and_payloads_of_nan_survive() -> None:
    base = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC0, 0x7F80], "<u2")
    new = np.array([0x8000, 0x0000, 0x7FC1, 0xFFC0, 0xFF81], "<u2")
    assert_all_ways(base, new, dtype="BF16")
    assert_all_ways(base.view(ml_dtypes.bfloat16), new.view(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("carrier", "dtype"),
    [
        ("uint16", "BF16"),
        ("uint16", "F16"),
        ("int16", "BF16"),
        ("uint8", "F8_E4M3"),
        ("uint8", "F8_E5M2"),
        ("uint32", "F32"),
        ("uint64", "F64"),
        ("uint64", "C64"),
    ],
)
def test_bits_that_travel_as_integers(carrier: str, dtype: str) -> None:
    base = random_array(np.dtype(carrier), (30, 7))
    assert_all_ways(base, stepped(base), dtype=dtype)
    payload = thinwire.encode(base, stepped(base), dtype=dtype)
    assert thinwire.inspect(payload).tensors[0].dtype == dtype


def test_bfloat16_bits_decode_onto_either_carrier() -> None:
    base = random_array(NUMPY_DTYPES["bfloat16"], (50,))
    new = stepped(base)
    payload = thinwire.encode(base, new)
    assert thinwire.encode(base.view("<u2"), new.view("<u2"), dtype="BF16") == payload
    decoded = thinwire.decode(base.view("<u2"), payload)
    assert decoded.dtype == np.uint16
    assert bits(decoded) == bits(new)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers(kind: Any) -> None:
    base = kind(bytes(range(256)) * 3)
    new = bytes(reversed(range(256))) * 3
    payload = thinwire.encode(base, kind(new))
    decoded = thinwire.decode(base, payload)
    assert bytes(decoded) == new
    if kind is not memoryview:
        assert type(decoded) is kind
    assert thinwire.changes(base, payload).values.dtype == np.uint8
    if kind is bytearray:
        thinwire.decode_into(base, payload)
        assert base == new
    else:
        with pytest.raises(InvalidArgument, match="read-only"):
            thinwire.decode_into(base, payload)


@pytest.mark.parametrize("code", "bBhHiIqQfd")
def test_array_module(code: str) -> None:
    base = array.array(code, [3, 1, 4, 1, 5])
    new = array.array(code, [3, 1, 4, 2, 6])
    payload = thinwire.encode(base, new)
    assert thinwire.decode(base, payload).tolist() == new.tolist()
    assert thinwire.changes(base, payload).indices.tolist() == [3, 4]
    thinwire.decode_into(base, payload)
    assert base == new


@pytest.mark.parametrize("base", [b"", bytearray(), array.array("f"), memoryview(b"")])
def test_empty_buffers(base: Any) -> None:
    payload = thinwire.encode(base, base)
    assert len(thinwire.decode(base, payload)) == 0
    assert thinwire.changes(base, payload).indices.size == 0


@pytest.mark.parametrize("base", [bytearray(), array.array("f"), np.empty(0, np.float32)])
def test_empty_arrays_that_can_be_written_decode_in_place(base: Any) -> None:
    thinwire.decode_into(base, thinwire.encode(base, base))
    assert len(base) == 0


class Tensor:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int8", "uint64", "complex64"])
def test_dlpack(name: str) -> None:
    base = random_array(NUMPY_DTYPES[name], (8, 9))
    new = stepped(base)
    payload = thinwire.encode(Tensor(base), Tensor(new))
    assert payload == thinwire.encode(base, new)
    assert bits(thinwire.decode(Tensor(base), payload)) == bits(new)
    strided = Tensor(base[::2, ::-1])
    payload = thinwire.encode(strided, Tensor(new[::2, ::-1]))
    assert bits(thinwire.decode(strided, payload)) == bits(new[::2, ::-1])


def test_dlpack_in_place_or_not_at_all() -> None:
    base = random_array(np.dtype(np.float32), (50,))
    new = stepped(base)
    payload = thinwire.encode(base, new)
    before = bits(base)
    try:
        thinwire.decode_into(Tensor(base), payload)
    except InvalidArgument:
        assert bits(base) == before
    else:
        assert bits(base) == bits(new)


def test_dlpack_of_another_device_is_refused() -> None:
    class OnDevice(Tensor):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)  # CUDA

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("on the device")

    with pytest.raises(InvalidArgument, match="DLPack"):
        thinwire.encode(OnDevice(np.zeros(3)), OnDevice(np.zeros(3)))


def test_payloads_may_be_any_buffer() -> None:
    base = random_array(NUMPY_DTYPES["float32"], (300,))
    payload = thinwire.encode(base, stepped(base))
    for kind in (bytes, bytearray, memoryview, lambda data: memoryview(b"x" + data)[1:]):
        assert bits(thinwire.decode(base, kind(payload))) == bits(stepped(base))


def test_torch_tensors() -> None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        warnings.warn("torch is not importable: torch tensors were NOT tested", stacklevel=1)
        pytest.skip("torch is not importable")
    for name in ["bfloat16", "float16", "float32", "int64", "bool", "uint8", "float8_e4m3fn"]:
        kind = getattr(torch, name)
        whole = torch.from_numpy(random_array(np.dtype(np.uint8), (64 * kind.itemsize,)))
        whole = (whole & 1 if name == "bool" else whole).view(kind).reshape(8, 8)
        after = torch.from_numpy(stepped(whole.view(torch.uint8).numpy())).view(kind)
        for layout in (lambda t: t, lambda t: t.T, lambda t: t[::2, 1::2], lambda t: t[3, 3]):
            base, new = layout(whole).clone(), layout(after)
            payload = thinwire.encode(layout(whole), new)
            decoded = thinwire.decode(layout(whole), payload)
            assert isinstance(decoded, torch.Tensor)
            assert decoded.dtype == kind
            assert decoded.shape == base.shape
            assert _torch_bits(decoded, torch) == _torch_bits(new, torch)
            found = thinwire.changes(base, payload)
            assert found.indices.size == thinwire.inspect(payload).changed_count
            target = whole.clone()
            thinwire.decode_into(layout(target), payload)
            assert _torch_bits(layout(target), torch) == _torch_bits(new, torch)
        for shape in ((0,), (0, 4), (3, 0)):
            nothing = torch.zeros(shape, dtype=kind)
            decoded = thinwire.decode(nothing, thinwire.encode(nothing, nothing))
            assert (decoded.dtype, decoded.shape) == (kind, nothing.shape)
    with pytest.raises(InvalidArgument, match="meta"):
        thinwire.encode(torch.zeros(3, device="meta"), torch.zeros(3, device="meta"))
    grad = torch.zeros(3, requires_grad=True)
    payload = thinwire.encode(grad, torch.ones(3))
    assert thinwire.decode(grad, payload).tolist() == [1, 1, 1]


def _torch_bits(tensor: Any, torch: Any) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_importing_thinwire_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, thinwire; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
