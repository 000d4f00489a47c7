"""ARC v1, v2 and v3 tensor by tensor: Fireworks' own package, or thinwire's without it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from thinwire.bench.peer import Encoded, MissingExtraError, Peer
from thinwire.bench.tensors import Tensor, Words
from thinwire.interop.fireworks import coding

_PACKAGE = "fireworks-delta-compression"
_MODULE = "fireworks_delta_compression"
_WAIT_CONSTANT = "_CANDIDATE_WAIT_MULTIPLIER"

PATIENT_MULTIPLIER = 1000.0
"""Long enough that arc_v3 always keeps the smallest of its candidates, see Arc."""

# A dtype that torch or ARC has no use for travels as bytes: ARC v3 falls back to v2 for those.
_TORCH_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
# Integers of each width that both numpy and every torch know by the same name.
_PLAIN_NAMES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Arc:
    """One ARC format, with all that the package's public API does per tensor.

    arc_v3 tries five candidates in threads and keeps the smallest of those done within 1.5 times
    the time of the first, so its bytes vary from run to run. ``wait_multiplier`` replaces the 1.5;
    with the default it waits for all. Judge its speed by CPU seconds: its threads overlap.
    Raises MissingExtraError when the package or torch is not installed.
    """

    def __init__(self, name: str, wait_multiplier: float = PATIENT_MULTIPLIER) -> None:
        self.name = name
        try:
            self._torch: Any = importlib.import_module("torch")
            self._package: Any = importlib.import_module(_MODULE)
            arc3 = importlib.import_module(f"{_MODULE}.backends.arc3")
        except ImportError as error:
            raise MissingExtraError(
                f"row {name} needs the package {_PACKAGE}==0.1.0 (and torch): {error}"
            ) from error
        if not hasattr(arc3, _WAIT_CONSTANT):
            raise MissingExtraError(f"row {name} needs {_PACKAGE} 0.1.0, another one is installed")
        self._arc3: Any = arc3
        self._wait_multiplier = wait_multiplier

    def encode(self, base: Tensor, new: Tensor) -> Encoded:
        """See Peer. ARC files hold every tensor, changed or not."""
        with self._settings():
            diff, checksum = self._package.delta_compress(
                src=self._to_torch(base), dst=self._to_torch(new), compression_format=self.name
            )
        return Encoded(diff.numpy().tobytes(), checksum)

    def decode(self, base: Tensor, encoded: Encoded) -> Words:
        """See Peer. The package verifies its Adler-32."""
        diff = np.frombuffer(bytearray(encoded.payload), np.uint8)
        with self._settings():
            new = self._package.delta_decompress(
                src=self._to_torch(base),
                compressed_diff=self._torch.from_numpy(diff),
                checksum=encoded.checksum,
                compression_format=self.name,
            )
        plain = getattr(self._torch, _PLAIN_NAMES[base.words.itemsize])
        words: Words = new.reshape(-1).view(plain).numpy().view(base.words.dtype)
        return words

    def _to_torch(self, tensor: Tensor) -> Any:
        torch_name = _TORCH_NAMES.get(tensor.dtype)
        if not tensor.words.size:
            # numpy's empty arrays have strides that torch does not take.
            return self._torch.empty(
                tensor.shape, dtype=getattr(self._torch, torch_name or "uint8")
            )
        plain = tensor.words.view(_PLAIN_NAMES[tensor.words.itemsize])
        flat = self._torch.from_numpy(plain)
        if torch_name is None:
            return flat.view(self._torch.uint8)
        return flat.view(getattr(self._torch, torch_name)).reshape(tensor.shape)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Our wait multiplier (read by the package at each call) and one torch thread.

        Torch warns of read-only buffers, ours and the package's own; neither writes to them.
        """
        wait = getattr(self._arc3, _WAIT_CONSTANT)
        thread_count = self._torch.get_num_threads()
        setattr(self._arc3, _WAIT_CONSTANT, self._wait_multiplier)
        self._torch.set_num_threads(1)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable.*")
                yield
        finally:
            setattr(self._arc3, _WAIT_CONSTANT, wait)
            self._torch.set_num_threads(thread_count)


class OwnArc:
    """One ARC format as thinwire writes it: never larger than the package's smallest payload.

    So its sizes stand for the package's. Its speeds do not: for sparse updates it is faster, but
    where most elements changed the package as shipped, which keeps what is done first, is.
    """

    note = f"written by thinwire, as {_PACKAGE} is not installed: its speeds are not the package's"

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, base: Tensor, new: Tensor) -> Encoded:
        """See Peer."""
        bits = base.words.view(np.uint8), new.words.view(np.uint8)
        return Encoded(*coding.encode(self.name, *bits, new.dtype, new.shape))

    def decode(self, base: Tensor, encoded: Encoded) -> Words:
        """See Peer. The Adler-32 is verified."""
        bits = base.words.view(np.uint8)
        new = coding.decode(
            self.name, bits, base.dtype, base.shape, encoded.payload, encoded.checksum
        )
        words: Words = new.view(base.words.dtype)
        return words


def make_arc(name: str) -> Peer:
    """The package's row where it is installed, else thinwire's."""
    try:
        return Arc(name)
    except MissingExtraError:
        return OwnArc(name)
