"""Pairs of tensors that ARC is tried on, payloads to tamper with, and Fireworks' own package."""

from __future__ import annotations

import bz2
import importlib
import json
import lzma
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from thinwire.interop.fireworks import arc3
from thinwire.interop.fireworks.coding import decode
from thinwire.interop.fireworks.layout import ENVELOPE_MARK, checksum_of, written_layout

from .making import SHARED

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CORPUS = SHARED / "corpus"
MISSING = "needs fireworks-delta-compression 0.1.0 and torch, which are not installed"

# How wide an element is, and torch's name for it.
DTYPES = {
    "BF16": (2, "bfloat16"),
    "F16": (2, "float16"),
    "F32": (4, "float32"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F64": (8, "float64"),
    "I8": (1, "int8"),
    "I16": (2, "int16"),
    "I32": (4, "int32"),
    "I64": (8, "int64"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (300,), (0,), (4, 0), (3, 5), (40, 60), (1, 700)]
SHAPES += [(700, 1), (2, 3, 4), (5, 1, 80), (2, 3, 2, 5), (1, 1, 1, 1), (6, 0, 2), (3000,)]
CHANGES = ("none", "one", "few", "step", "sign", "nan", "all", "random", "last")
# A quiet NaN with a payload, its lowest byte first, and a negative zero.
_NANS = {"BF16": 0xFFC5, "F16": 0x7E55, "F32": 0x7FC12345, "F8_E4M3": 0x7F, "F8_E5M2": 0xFE}


class Pair(NamedTuple):
    """A tensor before and after; bits as uint8."""

    dtype: str
    shape: tuple[int, ...]
    base: np.ndarray
    new: np.ndarray


def random_pair(seed: int) -> Pair:
    """A pair of any dtype, shape and kind of change; all of them come up."""
    rng = np.random.default_rng(seed)
    dtype = list(DTYPES)[seed % len(DTYPES)]
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    return make_pair(dtype, shape, CHANGES[int(rng.integers(len(CHANGES)))], seed)


def make_pair(dtype: str, shape: tuple[int, ...], change: str, seed: int = 0) -> Pair:
    rng = np.random.default_rng(seed)
    width = DTYPES[dtype][0]
    count = int(np.prod(shape, dtype=np.int64))
    words = rng.integers(0, 1 << 63, count, np.uint64).astype(f"<u{width}")
    if dtype == "BOOL":
        words &= 1
    elif seed % 3 == 0:  # as weights are: of few exponents
        words = (rng.normal(0, 0.05, count) * (1 << (8 * width - 2))).astype(f"i{width}")
        words = words.view(f"<u{width}")
    new = _changed(words, dtype, change, rng)
    if dtype == "BOOL":
        new &= 1
    return Pair(dtype, shape, _bytes(words), _bytes(new))


def _bytes(words: np.ndarray) -> np.ndarray:
    # Not a view: numpy's empty arrays have none of another width.
    return np.frombuffer(words.tobytes(), np.uint8)


def _changed(words: np.ndarray, dtype: str, change: str, rng: np.random.Generator) -> np.ndarray:
    new = words.copy()
    count = words.size
    if not count or change == "none":
        return new
    bits = 8 * words.itemsize
    some = rng.choice(count, max(1, count // 30), replace=False)
    if change == "one":
        new[int(rng.integers(count))] ^= 1
    elif change == "few":
        new[some] ^= rng.integers(0, 4, some.size).astype(words.dtype)
    elif change == "step":
        new[some] += 1
    elif change == "sign":
        new[some] = words.dtype.type(1 << (bits - 1))
    elif change == "nan":
        new[some] = words.dtype.type(_NANS.get(dtype, 3))
    elif change == "all":
        new ^= 1
    elif change == "last":
        new[-1] = ~new[-1]
    else:
        new = rng.integers(0, 1 << 63, count, np.uint64).astype(words.dtype)
    return new


def real_pairs() -> Iterator[tuple[str, Pair]]:
    """Tensors of one step of each run of the project's corpus, but for the largest one."""
    meta = json.loads((CORPUS / "corpus.json").read_text())
    bases: dict[str, np.ndarray] = {}
    for run, info in meta["runs"].items():
        if (bits := bases.get(info["base"])) is None:
            raw = lzma.decompress((CORPUS / info["base"]).read_bytes())
            planes = np.frombuffer(raw, np.uint8).reshape(2, -1)
            bits = planes[0].astype(np.uint16) | planes[1].astype(np.uint16) << 8
            bases[info["base"]] = bits
        steps = np.load(CORPUS / info["file"])
        step = next(step for step in info["steps"] if f"gap_{step}" in steps)
        new = bits.copy()
        new[np.cumsum(steps[f"gap_{step}"].astype(np.int64))] = steps[f"new_{step}"]
        start = 0
        for name, shape in meta["index"][info["base"]]:
            stop = start + int(np.prod(shape, dtype=np.int64))
            if stop - start < 1 << 20:
                sides = (side[start:stop].view(np.uint8) for side in (bits, new))
                yield f"{run}/{name}", Pair("BF16", tuple(shape), *sides)
            start = stop


class Package:
    """Fireworks' package, on bits; all of arc_v3's candidates are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch = pytest.importorskip("torch", reason=MISSING)
        pytest.importorskip("fireworks_delta_compression", reason=MISSING)
        compression = importlib.import_module("fireworks_delta_compression.compression")
        self.arc3 = importlib.import_module("fireworks_delta_compression.backends.arc3")
        monkeypatch.setattr(self.arc3, "_CANDIDATE_WAIT_MULTIPLIER", 1e6)
        self._backends = compression._get_compression_functions()

    def encode(self, name: str, pair: Pair) -> tuple[bytes, str]:
        with _no_warnings():
            diff, checksum = self._backends[name].compress(
                src=self.tensor(pair, pair.base), dst=self.tensor(pair, pair.new)
            )
        return diff.numpy().tobytes(), checksum

    def decode(self, name: str, pair: Pair, payload: bytes, checksum: str) -> np.ndarray:
        diff = self.torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8))
        with _no_warnings():
            new = self._backends[name].decompress(
                src=self.tensor(pair, pair.base), compressed_diff=diff, checksum=checksum
            )
        assert tuple(new.shape) == pair.shape
        return self.bits(new)

    def tensor(self, pair: Pair, data: np.ndarray) -> Any:
        kind = getattr(self.torch, DTYPES[pair.dtype][1])
        if not data.size:
            return self.torch.empty(pair.shape, dtype=kind)
        return self.torch.from_numpy(data.copy()).view(kind).reshape(pair.shape)

    def bits(self, tensor: Any) -> np.ndarray:
        flat = tensor.contiguous().flatten().view(self.torch.uint8)
        return np.frombuffer(flat.numpy().tobytes(), np.uint8)


def _no_warnings() -> Any:
    # Torch warns of buffers that cannot be written; nobody does.
    return warnings.catch_warnings(action="ignore")


PAIR = make_pair("BF16", (40, 60), "few", 6)
Body = dict[str, Any]


def body_of(pair: Pair = PAIR) -> Body:
    """The fields of an arc_v3 payload of ours with flat indices, be it the smallest or not."""
    layout = written_layout(pair.dtype)
    assert layout is not None
    sides = pair.base, pair.new
    first = next(arc3._envelopes(*sides, layout, pair.shape, checksum_of(pair.new)))
    envelope = pickle.loads(first[len(ENVELOPE_MARK) :])
    body: Body = pickle.loads(zstd.decompress(envelope["data"]))
    return body


def packed(body: Any, codec: str = "zstd") -> bytes:
    raw = pickle.dumps(body, protocol=5)
    return enveloped(bz2.compress(raw) if codec == "bz2" else zstd.compress(raw), codec)


def enveloped(data: bytes, codec: str) -> bytes:
    return ENVELOPE_MARK + pickle.dumps({"codec": codec, "data": data}, protocol=5)


def read(payload: bytes, pair: Pair = PAIR, name: str = "arc_v3") -> np.ndarray:
    checksum = checksum_of(pair.new)
    return decode(name, pair.base, pair.dtype, pair.shape, payload, checksum, where="f: tensor 'w'")
