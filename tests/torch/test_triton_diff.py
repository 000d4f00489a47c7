"""Changes found on the device: Triton interpreted against numpy, and compiled without a GPU.

Triton decides when it is imported whether it interprets, and others in this process may have
imported it. So the kernels run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: the diff on the device was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch

from thinwire.errors import InvalidArgument
from thinwire.torch import triton_diff
from thinwire.torch.device_diff import choose, fits

NO_TRITON = "Triton is not installed: the kernels were NOT run, neither interpreted nor compiled"
HAS_TRITON = importlib.util.find_spec("triton") is not None
if not HAS_TRITON:
    warnings.warn(NO_TRITON, stacklevel=1)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)

BLOCK = triton_diff._BLOCK_WORDS
DTYPES = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32]
LENGTHS = st.one_of(
    st.integers(0, 3 * BLOCK),
    st.builds(
        lambda blocks, more: max(0, blocks * BLOCK + more), st.integers(0, 4), st.integers(-2, 2)
    ),
)


class Interpreter:
    """A process in which Triton interprets."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TRITON_INTERPRET", "1")
            assert self.call("triton_diff.why_unavailable()") == ""

    def call(self, expression: str, **names: Any) -> Any:
        """The expression's value there, in terms of triton_diff and of what is given.

        As text: the names of this file mean nothing in another process.
        """
        load = "__import__('importlib').import_module('thinwire.torch.triton_diff')"
        program = f"(lambda triton_diff: {expression})({load})"
        return self._pool.submit(eval, program, names).result()

    def find_changes(self, new: torch.Tensor, base: torch.Tensor) -> tuple[Any, Any]:
        found: tuple[Any, Any] = self.call(
            "triton_diff.find_changes(new, base)", new=new, base=base
        )
        return found

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    if not HAS_TRITON:
        pytest.skip(NO_TRITON)
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


def find_changes_reference(
    new_words: torch.Tensor, base_words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``find_changes`` returns, by torch alone."""
    positions = torch.nonzero(new_words != base_words).reshape(-1)
    return positions.to(torch.int32), new_words[positions]


def numpy_words(tensor: torch.Tensor) -> np.ndarray:
    """By bytes: what the dtype makes of them does not matter."""
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1, tensor.dtype.itemsize)


def check_found(
    found: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor, base: torch.Tensor
) -> None:
    where = np.flatnonzero((numpy_words(new) != numpy_words(base)).any(axis=1))
    positions, words = found
    assert positions.dtype == torch.int32
    assert words.dtype == new.dtype
    assert positions.numpy().tolist() == where.tolist()
    assert (numpy_words(words) == numpy_words(new)[where]).all()


def words_made(dtype: torch.dtype, length: int, share: float, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, (length, dtype.itemsize), dtype=np.uint8)
    new = base.copy()
    changed = random.random(length) < share
    # One bit of a word, also of its topmost byte: anything but equality would miss some.
    new[changed, random.integers(0, dtype.itemsize)] ^= np.uint8(1 << random.integers(0, 8))
    return tuple(torch.from_numpy(words.reshape(-1)).view(dtype) for words in (new, base))


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    length=LENGTHS,
    share=st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_as_numpy_finds_them(
    interpreter: Interpreter, dtype: torch.dtype, length: int, share: float, seed: int
) -> None:
    new, base = words_made(dtype, length, share, seed)
    check_found(interpreter.find_changes(new, base), new, base)
    check_found(find_changes_reference(new, base), new, base)


@pytest.mark.parametrize("place", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK])
def test_a_single_change(interpreter: Interpreter, place: int) -> None:
    base = torch.zeros(2 * BLOCK + 1, dtype=torch.int16)
    new = base.clone()
    new[place] = -32768
    check_found(interpreter.find_changes(new, base), new, base)


def test_words_that_do_not_begin_at_a_multiple_of_16_bytes(interpreter: Interpreter) -> None:
    new, base = words_made(torch.int16, BLOCK + 9, 0.3, 5)
    check_found(interpreter.find_changes(new[3:], base[3:]), new[3:], base[3:])


@needs_triton
@pytest.mark.filterwarnings("ignore:.*FP_FUSION")
@pytest.mark.parametrize("width", ["i8", "i16", "i32"])
@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
def test_the_compiler_takes_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: tuple[Any, ...], width: str
) -> None:
    """Down to machine code, without a GPU: the interpreter allows what the compiler does not."""
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_diff, "tl", triton.language, raising=False)
    for kernel in (triton_diff._count, triton_diff._write):
        words = dict.fromkeys(("new", "base", "words"), f"*{width}")
        numbers = dict.fromkeys(("counts", "ends", "positions"), "*i32")
        types = {**words, **numbers, "length": "i32", "block": "constexpr"}
        names = list(kernel.__annotations__)[:-1]
        source = ASTSource(
            fn=JITFunction(kernel),
            signature={name: types[name] for name in names},
            constexprs={"block": BLOCK},
        )
        compiled = triton.compile(source, target=GPUTarget(*target))
        assert compiled.asm["cubin" if target[0] == "cuda" else "hsaco"]


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    triton_diff._kernels.cache_clear()
    yield
    triton_diff._kernels.cache_clear()


@pytest.mark.usefixtures("fresh_kernels")
def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton cannot be imported" in triton_diff.why_unavailable()
    words = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(InvalidArgument, match="cannot be imported"):
        triton_diff.find_changes(words, words)


@needs_triton
@pytest.mark.usefixtures("fresh_kernels")
def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in triton_diff.why_unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert triton_diff.why_unavailable() == ""
    words = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(InvalidArgument, match="cpu is none"):
        triton_diff.find_changes(words, words)


@pytest.mark.parametrize(
    ("new", "base", "reason"),
    [
        (torch.zeros(3, dtype=torch.int16), torch.zeros(4, dtype=torch.int16), "differ"),
        (torch.zeros(3, dtype=torch.int16), torch.zeros(3, dtype=torch.uint16), "differ"),
        (torch.zeros(3), torch.zeros(3), "integer"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "integer"),
        (torch.zeros(2, 2, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.int8), "flat"),
        (torch.zeros(6, dtype=torch.int8)[::2], torch.zeros(3, dtype=torch.int8), "flat"),
        (
            torch.empty(triton_diff.MAX_WORDS + 1, dtype=torch.int8, device="meta"),
            torch.empty(triton_diff.MAX_WORDS + 1, dtype=torch.int8, device="meta"),
            "at once",
        ),
    ],
)
def test_what_cannot_be_compared(new: torch.Tensor, base: torch.Tensor, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        triton_diff.find_changes(new, base)


@pytest.mark.parametrize(
    ("facts", "way", "reason"),
    [
        ({}, "device", "10 times faster"),
        ({"device_s": 0.8}, "device", "1.25 times faster"),
        ({"device_s": 0.81}, "host", "not 1.25 times faster"),
        ({"device_s": math.nan}, "host", "no measurement"),
        ({"device_s": 0.0}, "host", "no measurement"),
        ({"host_s": math.inf}, "host", "no measurement"),
    ],
)
def test_the_choice(facts: dict[str, Any], way: str, reason: str) -> None:
    usual = {"host_s": 1.0, "device_s": 0.1}
    choice = choose(**{**usual, **facts})
    assert choice.way == way
    assert reason in choice.reason


@pytest.mark.parametrize(("needed_bytes", "is_fit"), [(0, True), (50, True), (51, False)])
def test_what_fits(needed_bytes: int, is_fit: bool) -> None:
    assert fits(free_bytes=100, needed_bytes=needed_bytes) == is_fit


@pytest.mark.skipif(
    not (HAS_TRITON and torch.cuda.is_available()),
    reason="no Triton with a CUDA device here: the kernels were NOT run on one, only interpreted",
)
def test_on_a_real_device() -> None:
    old = torch.randn(5_000_001, device="cuda")
    new = torch.where(torch.rand_like(old) < 0.01, old * 1.01, old)
    base, words = (tensor.to(torch.bfloat16).view(torch.int16) for tensor in (old, new))
    found = triton_diff.find_changes(words, base)
    check_found((found[0].cpu(), found[1].cpu()), words.cpu(), base.cpu())
