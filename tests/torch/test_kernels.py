"""Finding what changed: every word size and instruction set against numpy and torch."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec import _native

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch

SETS = ["", *_native.instruction_sets()]
SIZES = [1, 2, 4, 8]
MAX_WORDS = 1 << 20
# Around the kernels' vectors, pieces and prefetching.
COUNTS = [0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 5001]


def aligned(array: np.ndarray, shift_bytes: int = 0, room_bytes: int = 0) -> np.ndarray:
    """The array's bytes, so many bytes behind a multiple of 64."""
    data = array.reshape(-1).view(np.uint8)
    memory = np.full(data.size + 192 + room_bytes, 0xA5, np.uint8)
    at = -memory.ctypes.data % 64 + shift_bytes
    memory[at : at + data.size] = data
    return memory[at : at + data.size]


def find(
    base: np.ndarray, new: np.ndarray, instructions: str, shift_bytes: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and words that differ, from outputs that have room for every word and no more."""
    positions = np.full(new.size, 0xFFFFFFFF, np.uint32)
    words = aligned(np.zeros_like(new), shift_bytes)
    count = _native.find_changes(
        aligned(base, shift_bytes),
        aligned(new, shift_bytes),
        new.itemsize,
        positions,
        words,
        instructions,
    )
    return positions[:count], words[: count * new.itemsize].view(new.dtype)


def check(base: np.ndarray, new: np.ndarray, instructions: str, shift_bytes: int = 0) -> None:
    positions, words = find(base, new, instructions, shift_bytes)
    expected = np.flatnonzero(base != new)
    assert np.array_equal(positions, expected)
    assert np.array_equal(words, new[expected])


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("size", SIZES)
class TestFindChanges:
    @settings(deadline=None, max_examples=30)
    @given(
        st.sampled_from(COUNTS) | st.integers(0, 6000),
        st.integers(0, 2**32),
        st.sampled_from([0.0, 0.001, 0.02, 0.5, 0.999, 1.0]),
        st.sampled_from([0, 8, 16, 24, 40]),
    )
    def test_any_changes(
        self, size: int, instructions: str, count: int, seed: int, share: float, shift_bytes: int
    ) -> None:
        rng = np.random.default_rng(seed)
        base = rng.integers(0, 256, count * size, np.uint8).view(f"<u{size}")
        # One bit of a word, whichever it is: high and low ones count alike.
        bit = (np.uint64(1) << rng.integers(0, 8 * size, count, np.uint64)).astype(base.dtype)
        new = np.where(rng.random(count) < share, base ^ bit, base)
        check(base, new, instructions, shift_bytes)

    def test_each_single_change(self, size: int, instructions: str) -> None:
        base = np.zeros(300, f"<u{size}")
        for at in range(300):
            new = base.copy()
            new[at] = 1
            check(base, new, instructions)

    def test_the_largest_run(self, size: int, instructions: str) -> None:
        base = np.zeros(MAX_WORDS, f"<u{size}")
        new = base.copy()
        new[[0, 65_535, 65_536, MAX_WORDS - 1]] = 7
        check(base, new, instructions)
        check(base, ~base, instructions)

    def test_nothing_is_written_behind_the_room(self, size: int, instructions: str) -> None:
        """What is found is at most every word."""
        count = 1027
        new = np.ones(count, f"<u{size}")
        positions = np.full(count + 64, 0xABABABAB, np.uint32)
        words = np.full((count + 64) * size, 0xCD, np.uint8)
        found = _native.find_changes(
            aligned(np.zeros_like(new)), aligned(new), size, positions, words, instructions
        )
        assert found == count
        assert np.all(positions[count:] == 0xABABABAB)
        assert np.all(words[count * size :] == 0xCD)


# Lower halves of FP32: exact, ties, and one bit on both sides of each.
LOWER = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xBFFF, 0xC000, 0xFFFE, 0xFFFF]
UPPER = np.arange(1 << 16, dtype=np.uint32)
IS_SPECIAL = (UPPER & 0x7F80) == 0x7F80


def rounded(
    base: np.ndarray, new: np.ndarray, instructions: str
) -> tuple[np.ndarray, np.ndarray] | None:
    positions = np.full(new.size, 0xFFFFFFFF, np.uint32)
    words = np.zeros(2 * new.size, np.uint8)
    count = _native.find_rounded_changes(
        aligned(base), new, positions, aligned(words), instructions
    )
    if count is None:
        return None
    words = np.zeros(2 * new.size, np.uint8)
    count = _native.find_rounded_changes(aligned(base), new, positions, words, instructions)
    assert count is not None
    return positions[:count], words[: 2 * count].view("<u2")


def by_torch(values: np.ndarray) -> np.ndarray:
    bits: np.ndarray = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    return bits.view("<u2")


@pytest.mark.parametrize("instructions", SETS)
class TestFindRoundedChanges:
    @pytest.mark.parametrize("lower", LOWER, ids=hex)
    def test_all_upper_halves(self, instructions: str, lower: int) -> None:
        """Every sign, exponent and leading mantissa: ties, subnormals, infinities and -0.0."""
        bits = (UPPER << 16) | np.uint32(lower)
        # Of those with all exponent bits only the two infinities are numbers.
        is_number = ~IS_SPECIAL | ((bits & 0x7FFFFFFF) == 0x7F800000)
        values = bits[is_number].view(np.float32)
        expected = by_torch(values)
        found = rounded(~expected, values, instructions)
        assert found is not None
        assert np.array_equal(found[0], np.arange(values.size)), "all differ from their inverse"
        assert np.array_equal(found[1], expected)
        nothing = rounded(expected, values, instructions)
        assert nothing is not None
        assert nothing[0].size == 0

    def test_what_rounds_up_to_infinity(self, instructions: str) -> None:
        values = np.array([0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF], np.uint32).view(np.float32)
        found = rounded(np.zeros(3, "<u2"), values, instructions)
        assert found is not None
        assert found[1].tolist() == [0x7F7F, 0x7F80, 0xFF80]

    def test_minus_zero_is_a_change(self, instructions: str) -> None:
        zeros = np.zeros(100, np.float32)
        found = rounded(np.zeros(100, "<u2"), -zeros, instructions)
        assert found is not None
        assert found[0].size == 100
        assert set(found[1].tolist()) == {0x8000}

    @settings(deadline=None, max_examples=40)
    @given(
        st.sampled_from(COUNTS) | st.integers(0, 6000),
        st.integers(0, 2**32),
        st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    )
    def test_any_changes(self, instructions: str, count: int, seed: int, share: float) -> None:
        rng = np.random.default_rng(seed)
        values = rng.normal(0, 0.02, count).astype(np.float32)
        new = by_torch(values)
        base = np.where(rng.random(count) < share, new ^ 1, new).astype("<u2")
        found = rounded(base, values, instructions)
        assert found is not None
        expected = np.flatnonzero(base != new)
        assert np.array_equal(found[0], expected)
        assert np.array_equal(found[1], new[expected])

    @pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0x7FBF8000])
    def test_any_nan_is_left_to_torch(self, instructions: str, bits: int) -> None:
        """Wherever it is: in vectors, in what is left over, and in any piece."""
        for count in (1, 5, 64, 2048, 2049, 4100):
            for at in {0, count // 2, count - 1}:
                values = np.zeros(count, np.float32)
                values.view(np.uint32)[at] = bits
                assert rounded(np.zeros(count, "<u2"), values, instructions) is None

    def test_an_fp32_array_of_any_alignment(self, instructions: str) -> None:
        values = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
        for shift in (4, 12, 28):
            shifted = aligned(values, shift).view(np.float32)
            found = rounded(np.zeros(1000, "<u2"), shifted, instructions)
            assert found is not None
            assert np.array_equal(found[1], by_torch(values))


class TestBadArguments:
    def arguments(self, count: int = 10, size: int = 2) -> list[np.ndarray]:
        return [
            np.zeros(count * size, np.uint8),
            np.zeros(count * size, np.uint8),
            np.zeros(count, np.uint32),
            np.zeros(count * size, np.uint8),
        ]

    def call(
        self, base: object, new: object, size: int, at: object, words: object, *more: str
    ) -> int:
        return _native.find_changes(base, new, size, at, words, *more)  # type: ignore[arg-type]

    def test_good_ones(self) -> None:
        base, new, at, words = self.arguments()
        assert self.call(base, new, 2, at, words) == 0

    @pytest.mark.parametrize("size", [0, 3, 5, 16])
    def test_word_sizes(self, size: int) -> None:
        base, new, at, words = self.arguments(16, 16)
        with pytest.raises(ValueError):
            self.call(base, new, size, at, words)

    @pytest.mark.parametrize(
        "change",
        [
            lambda b, n, a, w: (b[:-2], n, a, w),
            lambda b, n, a, w: (b, n[:-2], a, w),
            lambda b, n, a, w: (b, n[:-1], a, w),
            lambda b, n, a, w: (b[:-1], n[:-1], a, w),
            lambda b, n, a, w: (b, n, a[:-1], w),
            lambda b, n, a, w: (b, n, a, w[:-1]),
            lambda b, n, a, w: (b[1:-1], n[1:-1], a, w),
            lambda b, n, a, w: (b[:-2], n[:-2], a, w[1:]),
        ],
    )
    def test_sizes_and_alignment(self, change: Callable[..., tuple[np.ndarray, ...]]) -> None:
        base, new, at, words = change(*self.arguments())
        with pytest.raises(ValueError):
            self.call(base, new, 2, at, words)

    @pytest.mark.parametrize("argument", [0, 1, 2, 3])
    @pytest.mark.parametrize("kind", ["dtype", "strided", "two dimensions", "none"])
    def test_kinds(self, argument: int, kind: str) -> None:
        arrays: list[object] = list(self.arguments())
        array = self.arguments()[argument]
        arrays[argument] = {
            "dtype": array.view(np.int8 if array.itemsize == 1 else np.int32),
            "strided": np.zeros(2 * array.size, array.dtype)[::2],
            "two dimensions": array.reshape(2, -1),
            "none": None,
        }[kind]
        base, new, at, words = arrays
        with pytest.raises(TypeError):
            self.call(base, new, 2, at, words)

    @pytest.mark.parametrize("argument", [2, 3])
    def test_read_only_outputs(self, argument: int) -> None:
        arrays = self.arguments()
        arrays[argument].flags.writeable = False
        with pytest.raises(TypeError):
            self.call(*arrays[:2], 2, *arrays[2:])

    def test_read_only_inputs_will_do(self) -> None:
        base, new, at, words = self.arguments()
        base.flags.writeable = new.flags.writeable = False
        assert self.call(base, new, 2, at, words) == 0

    def test_more_than_a_chunk(self) -> None:
        arrays = self.arguments(MAX_WORDS + 1, 1)
        with pytest.raises(ValueError):
            self.call(*arrays[:2], 1, *arrays[2:])

    def test_instructions_that_there_are_not(self) -> None:
        base, new, at, words = self.arguments()
        with pytest.raises(ValueError):
            self.call(base, new, 2, at, words, "mmx")
        with pytest.raises(ValueError):
            _native.find_rounded_changes(base, np.zeros(10, np.float32), at, words, "mmx")

    def test_rounded(self) -> None:
        base, _, at, words = self.arguments()
        new = np.zeros(10, np.float32)
        assert _native.find_rounded_changes(base, new, at, words) == 0
        for bad in (
            (base[:-2], new, at, words),
            (base[:-1], new, at, words),
            (base, new[:-1], at, words),
            (base, new, at[:-1], words),
            (base, new, at, words[:-2]),
            (np.zeros(30, np.uint8)[1:21], new, at, words),
            (base, new, at, np.zeros(30, np.uint8)[1:21]),
        ):
            with pytest.raises(ValueError):
                _native.find_rounded_changes(*bad)
        for wrong in (new.astype(np.float64), new.view(np.int32), new[::2]):
            with pytest.raises(TypeError):
                _native.find_rounded_changes(base, wrong, at, words)
