"""The functions of ``fireworks-delta-compression`` under their names; torch tensors in and out.

torch is imported when a function needs it. Where the package takes a ``device`` to compute on, the
work is done on the host here, and results go where the package's would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.checkpoint.disk import ByteArray, put_in_place, remove_quietly, temporary_sibling
from thinwire.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from thinwire.codec.arrays import Bits, to_bits
from thinwire.errors import InvalidArgument, Unsupported
from thinwire.interop.fireworks.coding import Encoded, decode, encode, format_named
from thinwire.interop.fireworks.errors import (
    DeltaKeyMismatchError,
    DeltaSizeMismatchError,
    package_errors,
    runtime_errors,
)
from thinwire.interop.fireworks.folder import open_fireworks
from thinwire.interop.fireworks.in_place import update_weights_file
from thinwire.interop.weights_out import new_weights

_TORCH_NAMES = {
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


def delta_compress(*, src: Any, dst: Any, compression_format: str) -> tuple[Any, str]:
    """A tensor's change: its payload as a U8 tensor on the CPU, and a checksum of ``dst``.

    Args:
        src: The old tensor, on any device.
        dst: The new one, of the same dtype and shape.
        compression_format: "arc_v1", "arc_v2", "arc_v3", "thinwire", or an older name of these; in
            any case.

    Raises:
        BackendNotFoundError: There is no such format.
        DeltaSizeMismatchError: Dtype or shape differ.
        Unsupported: A dtype that safetensors does not have.
    """
    format_named(compression_format)
    old, new = _bits(src), _bits(dst)
    encoded = _encode(compression_format, _stored(old), _stored(new), "the tensor")
    return _payload_tensor(encoded), encoded.checksum


def delta_decompress(
    *, src: Any, compressed_diff: Any, checksum: str, compression_format: str
) -> Any:
    """The new tensor, verified: of dtype, shape and device of ``src``, which is only read.

    Raises:
        BackendNotFoundError: There is no such format.
        DeltaChecksumError: The new bits are not those of the checksum.
        DeltaDecompressionError: The payload cannot be read.
        DeltaSizeMismatchError: It was made for another dtype or shape.
    """
    old = _bits(src)
    payload = _bits(compressed_diff).data
    with package_errors():
        new = decode(compression_format, old.data, old.dtype, old.shape, payload, checksum)
    return _restored(src, old, new).to(src.device)


def delta_compress_dicts(
    src: Mapping[str, Any],
    dst: Mapping[str, Any],
    compression_format: str,
    must_match: bool = True,
    device: Any = None,
    executor: Executor | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Payloads and checksums by name; see :func:`delta_compress`.

    Args:
        src: The old tensors.
        dst: The new ones.
        compression_format: See there.
        must_match: Whether both must have the same names; else ``dst`` may have more.
        device: Taken for the package's sake: tensors are compared on the host.
        executor: Threads or processes for the work of each tensor; None: one after the other.

    Raises:
        DeltaKeyMismatchError: The names differ.
        ThinwireError: As there.
    """
    del device
    _check_names(src, dst, must_match, "src and dst")
    calls = ((src[name], dst[name], compression_format) for name in src)
    done = dict(zip(src, _run(executor, _compress, calls), strict=True))
    return {n: one[0] for n, one in done.items()}, {n: one[1] for n, one in done.items()}


def delta_compress_dicts_to_file(
    *,
    src: Mapping[str, Any],
    dst: Mapping[str, Any],
    diff_file: str,
    compression_format: str,
    must_match: bool = True,
    device: Any = None,
    executor: Executor | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """As :func:`delta_compress_dicts`, and a delta file of them, which appears whole.

    Raises:
        ThinwireError: As there; ``StoreError`` where the file cannot be written.
    """
    diffs, checksums = delta_compress_dicts(
        src, dst, compression_format, must_match, device, executor
    )
    payloads = {name: diff.numpy() for name, diff in diffs.items()}
    write_diff_file(Path(diff_file), payloads, checksums)
    return diffs, checksums


def delta_compress_files_to_file(
    *,
    src: str,
    dst: str,
    diff_file: str,
    compression_format: str,
    must_match: bool = True,
    device: Any = None,
    executor: Executor | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """As :func:`delta_compress_dicts_to_file`, of two safetensors files.

    Raises:
        ThinwireError: As there; ``FormatError`` where one of them is malformed.
    """
    del device
    encoded = compress_files(src, dst, diff_file, compression_format, must_match, executor)
    diffs = {name: _payload_tensor(one) for name, one in encoded.items()}
    return diffs, {name: one.checksum for name, one in encoded.items()}


def delta_decompress_dict_from_file(
    *,
    src: Mapping[str, Any],
    diff_file: str,
    compression_format: str,
    device: Any = None,
    executor: Executor | None = None,
    must_match: bool = True,
) -> dict[str, Any]:
    """The new tensors of a delta file, by name; ``src`` is only read.

    Args:
        src: The old tensors.
        diff_file: The delta file.
        compression_format: How it is coded.
        device: Where the new tensors are to be; None: on the CPU.
        executor: Threads or processes for the work of each tensor; None: one after the other.
        must_match: Whether ``src`` must have the names of the file; else it may have more.

    Raises:
        DeltaKeyMismatchError: The names differ.
        ThinwireError: As :func:`delta_decompress`; the message names the tensor.
    """
    with package_errors(), open_fireworks(diff_file, compression_format) as delta:
        _check_names(delta.tensors, src, must_match, f"src and {diff_file}")
        calls = (
            (src[name], *delta.payload(name), delta.compression_format, device or "cpu")
            for name in delta.tensors
        )
        return dict(zip(delta.tensors, _run(executor, _decompress, calls), strict=True))


def delta_decompress_inplace(*, base_path: str, diff_path: str, compression_format: str) -> None:
    """Turn a weights file into the new one where it lies, all or nothing, also if killed.

    Its metadata stays. Needs the model's size of disk space beside it meanwhile. Calling it again
    with the same delta is always right: it finishes what was cut short, and then does nothing.

    Raises:
        DeltaKeyMismatchError: Base and delta do not hold tensors of the same names.
        DeltaChecksumError, DeltaDecompressionError, DeltaSizeMismatchError: The delta is damaged,
            or was made from another base. The file is as it was.
        NotFound: There is no such file.
        BaseUnusable: The file is a link or has two names, or somebody else is updating it.
        StoreError: A file cannot be read or written.
    """
    with package_errors():
        update_weights_file(Path(base_path), Path(diff_path), compression_format)


def decompress_delta_into_source(
    diff_file: str, src: str, compression_format: str, executor: Executor | None = None
) -> dict[str, Any]:
    """As :func:`delta_decompress_inplace`; returns the new tensors of the file.

    Args:
        diff_file: The delta file.
        src: The weights file.
        compression_format: How the delta is coded.
        executor: Taken for the package's sake: the disk, not the decoding, takes the time.

    Raises:
        ThinwireError: As there; and each is a ``RuntimeError`` too, as all of the package's are.
    """
    del executor
    with runtime_errors():
        delta_decompress_inplace(
            base_path=src, diff_path=diff_file, compression_format=compression_format
        )
        tensors = SafetensorsFile.open(src).tensors
        return {name: _torch_tensor(one) for name, one in tensors.items()}


def compress_files(
    src: str,
    dst: str,
    diff_file: str,
    compression_format: str,
    must_match: bool = True,
    executor: Executor | None = None,
) -> dict[str, Encoded]:
    """Write the delta file of two safetensors files; returns payloads and checksums by name.

    Raises:
        ThinwireError: As :func:`delta_compress_files_to_file`.
    """
    format_named(compression_format)
    old, new = SafetensorsFile.open(src).tensors, SafetensorsFile.open(dst).tensors
    _check_names(old, new, must_match, f"{src} and {dst}")
    calls = (
        (compression_format, old[name], new[name], f"{dst}: tensor {name[:200]!r}") for name in old
    )
    encoded = dict(zip(old, _run(executor, _encode, calls), strict=True))
    payloads = {name: np.frombuffer(one.payload, np.uint8) for name, one in encoded.items()}
    checksums = {name: one.checksum for name, one in encoded.items()}
    write_diff_file(Path(diff_file), payloads, checksums)
    return encoded


def write_diff_file(
    path: Path, payloads: Mapping[str, ByteArray], checksums: Mapping[str, str]
) -> None:
    """A delta file: payloads as lists of bytes, checksums as metadata. Replaces what is there.

    Raises:
        StoreError, LimitExceeded: It cannot be written.
    """
    temporary = temporary_sibling(path)
    try:
        with new_weights(temporary) as writer:
            for name, payload in payloads.items():
                writer.add_payload(name, payload, checksums[name])
        put_in_place(temporary, path, overwrite=True)
    except BaseException:
        remove_quietly(temporary)
        raise


def _encode(compression_format: str, old: StoredTensor, new: StoredTensor, where: str) -> Encoded:
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise DeltaSizeMismatchError(
            f"{where}: old is {old.dtype} {list(old.shape)}, new is {new.dtype} {list(new.shape)}",
            hint="Send full weights where a tensor changes dtype or shape",
        )
    return encode(compression_format, old.data, new.data, new.dtype, new.shape)


def _compress(src: Any, dst: Any, compression_format: str) -> tuple[Any, str]:
    return delta_compress(src=src, dst=dst, compression_format=compression_format)


def _decompress(
    src: Any, payload: ByteArray, checksum: str, where: str, compression_format: str, device: Any
) -> Any:
    old = _bits(src)
    with package_errors():
        new = decode(
            compression_format, old.data, old.dtype, old.shape, payload, checksum, where=where
        )
    return _restored(src, old, new).to(device)


def _run(
    executor: Executor | None, work: Callable[..., Any], calls: Iterable[tuple[Any, ...]]
) -> Iterable[Any]:
    """What ``work`` makes of each call's arguments, in order; on an executor all at once.

    It is a function of a module, with all that it needs in its arguments: so processes can run it.
    """
    if executor is None:
        return (work(*call) for call in calls)
    futures: list[Future[Any]] = [executor.submit(work, *call) for call in calls]
    return (future.result() for future in futures)


def _check_names(
    needed: Mapping[str, Any], held: Mapping[str, Any], must_match: bool, where: str
) -> None:
    odd = needed.keys() ^ held.keys() if must_match else needed.keys() - held.keys()
    if odd:
        raise DeltaKeyMismatchError(
            f"{where}: tensor {min(odd)[:200]!r} is on one side only ({len(odd)} such tensors)",
            hint="Give two states of one model",
            tensor=min(odd),
        )


def _bits(tensor: Any) -> Bits:
    try:
        return to_bits(tensor.detach().cpu())
    except AttributeError:
        raise InvalidArgument(
            f"{type(tensor).__name__} is no torch tensor",
            hint="Pass torch tensors; for numpy arrays see thinwire.interop.fireworks.encode",
        ) from None


def _stored(bits: Bits) -> StoredTensor:
    return StoredTensor(bits.dtype, bits.shape, bits.data)


def _restored(src: Any, old: Bits, new: ByteArray) -> Any:
    # numpy's empty arrays have strides that torch does not take.
    return old.restore(new) if new.size else src.detach().cpu().clone()


def _payload_tensor(encoded: Encoded) -> Any:
    return import_module("torch").from_numpy(np.frombuffer(bytearray(encoded.payload), np.uint8))


def _torch_tensor(stored: StoredTensor) -> Any:
    torch = import_module("torch")
    kind = getattr(torch, _TORCH_NAMES.get(stored.dtype, ""), None)
    if kind is None:
        raise Unsupported(
            f"torch has no dtype for {stored.dtype}", hint="Read the file with thinwire"
        )
    shape = stored.shape
    if stored.dtype == "F4":  # torch counts pairs of elements
        shape = (*shape[:-1], shape[-1] // 2)
    if not stored.data.size:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(stored.data.copy()).view(kind).reshape(shape)
