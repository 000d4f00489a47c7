"""Engines as they come: modules whose loaders fuse, cut, turn, pad, drop, double and transform."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from thinwire.checkpoint import Checkpoint
from thinwire.torch.dtypes import torch_dtype
from thinwire.torch.scatter import Change

Tensors = dict[str, torch.Tensor]
Write = Callable[["Engine", torch.Tensor], None]

FLOATS = ("BF16", "F16", "F32")
SMALL_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "I64")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Engine(nn.Module):
    """Parameters and buffers by plain names, and who writes which checkpoint tensor where."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.writers: dict[str, list[Write]] = {}
        self.transformed: set[str] = set()
        self.views: dict[str, tuple[str, int]] = {}
        self.calls = 0
        self.fails_at: int | None = None

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Have a parameter; its memory is filled with what looks like probes."""
        if tensor.dtype.is_floating_point:
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor)

    def part(self, name: str) -> torch.Tensor:
        found = getattr(self, name)
        assert isinstance(found, torch.Tensor)
        return found

    def take(self, name: str, dtype: str, shape: tuple[int, ...], *writers: Write) -> None:
        self.catalog[name] = (dtype, shape)
        self.writers[name] = list(writers)

    def tensors(self) -> Tensors:
        return {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        done = set()
        for name, value in weights:
            self.calls += 1
            if self.calls == self.fails_at:
                raise RuntimeError(f"no room for {name}")
            for write in self.writers[name]:
                write(self, value)
            done.add(name)
        return done


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def state(engine: Engine) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in engine.tensors().items()}


def copied(engine: Engine) -> Engine:
    """Another engine of the same content, ties and views."""
    other = copy.deepcopy(engine)
    for name, (owner, count) in engine.views.items():
        other.register_buffer(name, other.part(owner).detach()[:count])
    return other


def loaded(engine: Engine, tensors: Tensors) -> dict[str, bytes]:
    """What a fresh load makes of an engine."""
    fresh = copied(engine)
    fresh.fails_at = None
    fresh.load_weights(tensors.items())
    return state(fresh)


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits: NaNs, infinities, zeros of both signs, denormals."""
    count = int(np.prod(shape, dtype=np.int64))
    kind = torch_dtype(dtype)
    if not count:
        return torch.zeros(shape, dtype=kind)
    data = np.frombuffer(rng.bytes(count * kind.itemsize), np.uint8).copy()
    return torch.from_numpy(data).view(kind).reshape(shape)


def weights_like(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What weights look like."""
    count = int(np.prod(shape, dtype=np.int64))
    values = torch.from_numpy(rng.normal(0, 0.3, count))
    if dtype in ("I8", "U8", "I32", "I64"):
        values = torch.from_numpy(rng.integers(0, 120, count))
    return values.to(torch_dtype(dtype)).reshape(shape)


def content(
    engine: Engine, rng: np.random.Generator, make: Callable[..., torch.Tensor] = random_bits
) -> Tensors:
    """A checkpoint of an engine's catalog."""
    return {name: make(rng, dtype, shape) for name, (dtype, shape) in engine.catalog.items()}


def stepped(tensors: Tensors, rng: np.random.Generator, share: float) -> tuple[Tensors, Any]:
    """A later version, and the rising positions of what changed in it."""
    new, places = {}, {}
    for name, tensor in tensors.items():
        count = tensor.numel()
        if not count:
            new[name], places[name] = tensor, np.empty(0, np.int64)
            continue
        at = np.flatnonzero(rng.random(count) < share)
        words = tensor.clone().reshape(-1).view(WORDS[tensor.element_size()])
        words[torch.from_numpy(at)] ^= torch.from_numpy(rng.integers(1, 4, at.size)).to(words.dtype)
        new[name] = words.view(tensor.dtype).reshape(tensor.shape)
        places[name] = at.astype(np.int64)
    return new, places


def words_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if not tensor.numel():
        return np.empty(0, f"u{tensor.element_size()}")
    flat = tensor.contiguous().reshape(-1).view(WORDS[tensor.element_size()])
    return flat.numpy().view(f"u{tensor.element_size()}")


def changes(new: Tensors, places: Mapping[str, np.ndarray[Any, Any]]) -> list[Change]:
    return [Change(name, at, words_of(new[name])[at]) for name, at in places.items() if at.size]


NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def write_checkpoint(folder: Path, tensors: Tensors) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(bits(tensor) for tensor in tensors.values())
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return Checkpoint.open(folder, ignore_subfolders=True)


# What an engine is made of. Each adds parameters and checkpoint tensors under a prefix.


@dataclass
class Build:
    engine: Engine
    rng: np.random.Generator
    draw: Any
    kinds: list[str] = field(default_factory=list)

    def room(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Memory full of what was there: anything, digits of probes too."""
        how = self.draw(st.sampled_from(["digits", "zeros", "ones", "noise"]))
        kind = torch_dtype(dtype)
        if how == "zeros":
            return torch.zeros(shape, dtype=kind)
        if how == "ones":
            return torch.ones(shape).to(kind)
        if how == "noise":
            return random_bits(self.rng, dtype, shape)
        count = int(np.prod(shape, dtype=np.int64))
        codes = torch.from_numpy(self.rng.integers(0x80, 0x7F80, count).astype(np.int16))
        return codes.view(torch.bfloat16).to(kind).reshape(shape)


def size(build: Build, high: int = 9) -> int:
    return int(build.draw(st.integers(1, high)))


def float_pair(build: Build) -> tuple[str, str]:
    source = build.draw(st.sampled_from(FLOATS))
    return source, build.draw(st.sampled_from([source, *FLOATS]))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def copy_to(
    name: str,
    where: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
    change: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
) -> Write:
    def write(engine: Engine, value: torch.Tensor) -> None:
        where(engine.part(name)).copy_(change(value))

    return write


def plain(build: Build, p: str) -> None:
    dtype = build.draw(st.sampled_from([*FLOATS, *SMALL_DTYPES]))
    target = build.draw(st.sampled_from([dtype, *FLOATS])) if dtype in FLOATS else dtype
    shape = tuple(build.draw(st.lists(st.integers(0, 6), max_size=3)))
    build.engine.hold(f"{p}_w", build.room(shape, target))
    build.engine.take(f"{p}.w", dtype, shape, copy_to(f"{p}_w"))


def turned(build: Build, p: str) -> None:
    """Held transposed, or with its dimensions in another order of memory."""
    source, target = float_pair(build)
    n, k = size(build), size(build)
    if build.draw(st.booleans()):
        build.engine.hold(f"{p}_w", build.room((k, n), target))
        build.engine.take(f"{p}.w", source, (n, k), copy_to(f"{p}_w", lambda t: t.t()))
    else:
        build.engine.hold(f"{p}_w", build.room((k, n), target).t())
        build.engine.take(f"{p}.w", source, (n, k), copy_to(f"{p}_w"))


def fused(build: Build, p: str) -> None:
    """q, k and v in one, each cut by rows; k and v may be replicated."""
    source, target = float_pair(build)
    tp = build.draw(st.sampled_from([1, 2, 3]))
    rank = build.draw(st.integers(0, tp - 1))
    k = size(build)
    rows = [size(build, 5) for _ in range(3)]
    build.engine.hold(f"{p}_qkv", build.room((sum(rows), k), target))
    start = 0
    for name, count in zip("qkv", rows, strict=True):
        is_replicated = name != "q" and build.draw(st.booleans())
        first = 0 if is_replicated else rank * count
        total = count if is_replicated else tp * count

        def write(
            engine: Engine,
            value: torch.Tensor,
            start: int = start,
            first: int = first,
            count: int = count,
        ) -> None:
            engine.part(f"{p}_qkv")[start : start + count].copy_(value[first : first + count])

        build.engine.take(f"{p}.{name}", source, (total, k), write)
        start += count


def row_parallel(build: Build, p: str) -> None:
    """Cut by columns: one strided run."""
    source, target = float_pair(build)
    tp, n, k = build.draw(st.sampled_from([2, 3])), size(build, 12), size(build, 6)
    rank = build.draw(st.integers(0, tp - 1))
    build.engine.hold(f"{p}_w", build.room((n, k), target))

    def write(engine: Engine, value: torch.Tensor) -> None:
        engine.part(f"{p}_w").copy_(value[:, rank * k : (rank + 1) * k])

    build.engine.take(f"{p}.w", source, (n, tp * k), write)


def one_column(build: Build, p: str) -> None:
    """A column of a wider parameter; the others are padding, or of another tensor."""
    n, k = size(build, 12), build.draw(st.integers(2, 4))
    build.engine.hold(f"{p}_w", build.room((n, k), "BF16"))
    for column in build.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=2, unique=True)):
        build.engine.take(
            f"{p}.c{column}", "BF16", (n,), copy_to(f"{p}_w", lambda t, c=column: t[:, c])
        )


def interleaved(build: Build, p: str) -> None:
    """Halves of rows interleaved, as rotary kernels want them."""
    half, k = size(build), size(build)
    build.engine.hold(f"{p}_w", build.room((2 * half, k), "BF16"))

    def write(engine: Engine, value: torch.Tensor) -> None:
        mixed = value.reshape(2, half, k).transpose(0, 1).reshape(2 * half, k)
        engine.part(f"{p}_w").copy_(mixed)

    build.engine.take(f"{p}.w", "BF16", (2 * half, k), write)


def vocabulary(build: Build, p: str) -> None:
    """Cut by rows and padded with zeros; tied to a head, or held once more."""
    source, target = float_pair(build)
    tp, n, k = build.draw(st.sampled_from([1, 2])), size(build), size(build)
    rank, pad = build.draw(st.integers(0, tp - 1)), size(build, 3)
    build.engine.hold(f"{p}_embed", build.room((n + pad, k), target))
    names = [f"{p}_embed"]
    how = build.draw(st.sampled_from(["alone", "tied", "twice"]))
    if how == "tied":
        build.engine.register_parameter(f"{p}_head", build.engine.get_parameter(f"{p}_embed"))
    elif how == "twice":
        build.engine.hold(f"{p}_head", build.room((n + pad, k), target))
        names.append(f"{p}_head")

    def write(engine: Engine, value: torch.Tensor) -> None:
        for name in names:
            engine.part(name)[:n].copy_(value[rank * n : (rank + 1) * n])
            engine.part(name)[n:].zero_()

    build.engine.take(f"{p}.embed", source, (tp * n, k), write)


def dropped(build: Build, p: str) -> None:
    dtype = build.draw(st.sampled_from([*FLOATS, *SMALL_DTYPES]))
    build.engine.take(f"{p}.inv_freq", dtype, (size(build),))


def unwritten(build: Build, p: str) -> None:
    dtype = build.draw(st.sampled_from([*FLOATS, *SMALL_DTYPES]))
    build.engine.hold(f"{p}_own", build.room((size(build), size(build)), dtype))


def experts(build: Build, p: str) -> None:
    """w1 and w3 of each expert fused and cut, w2 cut by columns; maybe held transposed."""
    tp, e, i, h = build.draw(st.sampled_from([1, 2])), size(build, 4), size(build, 4), size(build)
    rank, is_turned = build.draw(st.integers(0, tp - 1)), build.draw(st.booleans())
    build.engine.hold(f"{p}_w13", build.room((e, h, 2 * i) if is_turned else (e, 2 * i, h), "BF16"))
    build.engine.hold(f"{p}_w2", build.room((e, h, i), "BF16"))
    cut = slice(rank * i, (rank + 1) * i)
    for number in range(e):

        def up(engine: Engine, value: torch.Tensor, number: int, start: int) -> None:
            held = engine.part(f"{p}_w13")[number]
            (held.t() if is_turned else held)[start : start + i].copy_(value[cut])

        def down(engine: Engine, value: torch.Tensor, number: int = number) -> None:
            engine.part(f"{p}_w2")[number].copy_(value[:, cut])

        for name, start in (("w1", 0), ("w3", i)):
            build.engine.take(
                f"{p}.{number}.{name}",
                "BF16",
                (tp * i, h),
                lambda engine, value, n=number, s=start: up(engine, value, n, s),
            )
        build.engine.take(f"{p}.{number}.w2", "BF16", (h, tp * i), down)


def stacked(build: Build, p: str) -> None:
    """All experts come as one tensor of three dimensions, as GPT-OSS has them."""
    e, i, h = size(build, 3), size(build, 4), size(build)
    build.engine.hold(f"{p}_w", build.room((e, 2 * i, h), "BF16"))

    def write(engine: Engine, value: torch.Tensor) -> None:
        held = engine.part(f"{p}_w")
        held[:, :i].copy_(value[:, :, ::2].transpose(1, 2))
        held[:, i:].copy_(value[:, :, 1::2].transpose(1, 2))

    build.engine.take(f"{p}.gate_up", "BF16", (e, h, 2 * i), write)


def with_gaps(build: Build, p: str) -> None:
    """A parameter that is a view with gaps: it cannot be seen flat."""
    n, k = build.draw(st.integers(2, 6)), size(build, 5)
    build.engine.hold(f"{p}_view", build.room((n, k + 1), "BF16")[:, :k])
    build.engine.take(f"{p}.w", "BF16", (n, k), copy_to(f"{p}_view"))


def overlapping(build: Build, p: str) -> None:
    """A buffer that is a view of a part of a parameter."""
    n, k = build.draw(st.integers(2, 6)), size(build, 5)
    build.engine.hold(f"{p}_w", build.room((n, k), "BF16"))
    build.engine.register_buffer(f"{p}_first", build.engine.part(f"{p}_w").detach()[: n - 1])
    build.engine.views[f"{p}_first"] = (f"{p}_w", n - 1)
    build.engine.take(f"{p}.w", "BF16", (n, k), copy_to(f"{p}_w"))


def unprobed(build: Build, p: str) -> None:
    """A dtype that no digits are made of."""
    dtype = build.draw(st.sampled_from(["I16", "F64", "BOOL"]))
    shape = (size(build),)
    room = torch.zeros(shape, dtype=torch_dtype(dtype))
    build.engine.hold(f"{p}_w", room)
    build.engine.take(f"{p}.w", dtype, shape, copy_to(f"{p}_w"))


def _less(value: torch.Tensor) -> torch.Tensor:
    return value.float().clamp(-0.5, 0.5)


TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plus one": lambda v: v.float() + 1,
    "twice": lambda v: v.float() * 2,
    "half": lambda v: v.float() / 2,
    "scaled": lambda v: v.float() * 0.7,
    "negated": lambda v: -v,
    "absolute and less": lambda v: -v.float().abs(),
    "exponential": lambda v: -v.float().exp(),
    "clamped": _less,
    "sorted": lambda v: v.reshape(-1).float().sort(descending=True).values.reshape(v.shape),
    "summed": lambda v: v.float() + v.float().roll(1),
    "mean": lambda v: v.float().mean().expand(v.shape),
}


def transforming(build: Build, p: str) -> None:
    """Not what was written: it must be refused."""
    source, target = float_pair(build)
    how = TRANSFORMS[build.draw(st.sampled_from(sorted(TRANSFORMS)))]
    # Of very few elements, the mean or the sorted ones may be what was there.
    shape = (build.draw(st.integers(3, 40)), build.draw(st.integers(3, 9)))
    build.engine.hold(f"{p}_w", build.room(shape, target))

    def write(engine: Engine, value: torch.Tensor) -> None:
        engine.part(f"{p}_w").copy_(how(value))

    build.engine.take(f"{p}.w", source, shape, write)
    build.engine.transformed.add(f"{p}_w")


def quantising(build: Build, p: str) -> None:
    """To INT8 or FP8, with a scale of its own; or back from there."""
    shape = (build.draw(st.integers(3, 9)), build.draw(st.integers(3, 9)))
    target = build.draw(st.sampled_from(["I8", "F8_E4M3", "F8_E5M2"]))
    if build.draw(st.booleans()):
        build.engine.hold(f"{p}_q", build.room(shape, target))
        build.engine.hold(f"{p}_scale", build.room((shape[0],), "F32"))

        def write(engine: Engine, value: torch.Tensor) -> None:
            scale = value.float().abs().nan_to_num(1, 1, 1).amax(1).clamp(1e-30) / 100
            engine.part(f"{p}_scale").copy_(scale)
            scaled = (value.float().nan_to_num(0, 0, 0) / scale[:, None]).round()
            engine.part(f"{p}_q").copy_(scaled)

        build.engine.take(f"{p}.w", "BF16", shape, write)
        build.engine.transformed |= {f"{p}_q", f"{p}_scale"}
    else:
        factor = build.draw(st.sampled_from([1.0, 0.5, 3.0]))
        build.engine.hold(f"{p}_w", build.room(shape, "BF16"))
        build.engine.take(
            f"{p}.w",
            target,
            shape,
            copy_to(f"{p}_w", change=lambda v: v.float() * factor),
        )
        build.engine.transformed.add(f"{p}_w")


HONEST = [plain, turned, fused, row_parallel, one_column, interleaved, vocabulary, dropped]
HONEST += [unwritten, experts, stacked, overlapping]
HIDDEN = [with_gaps, unprobed]
LYING = [transforming, quantising]


@st.composite
def engines(draw: Any, kinds: Iterable[Callable[[Build, str], None]] = HONEST) -> Engine:
    """An engine of some parts; the same part may come several times."""
    seed = draw(st.integers(0, 2**32 - 1))
    build = Build(Engine(), np.random.default_rng(seed), draw)
    chosen = draw(st.lists(st.sampled_from(list(kinds)), min_size=1, max_size=6))
    for number, kind in enumerate(chosen):
        kind(build, f"p{number}")
    if not any(dtype in (*FLOATS, *SMALL_DTYPES) for dtype, _ in build.engine.catalog.values()):
        plain(build, "more")
    return build.engine
