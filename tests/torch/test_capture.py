"""Capturing tensors: every dtype and layout, against the bits of torch's own ``.to``."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch

from thinwire.errors import InvalidArgument, TensorMismatch
from thinwire.publish.baseline import Baseline, Changes
from thinwire.publish.staging import Found, Staging
from thinwire.publish.units import Plan
from thinwire.torch.capture import RUN_WORDS, Capture
from thinwire.torch.state import ModelState, Selection, holdings_of

from .making import spreads_of

BF16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BYTES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
WHOLE = [getattr(torch, f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)]
DTYPES = [*FLOATS, *BYTES, *WHOLE, torch.bool, torch.complex64]


def bits(tensor: torch.Tensor) -> bytes:
    """What a file of it holds."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits at all: NaNs with all payloads, infinities, subnormals, -0.0."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, count, np.uint8)).view(dtype).reshape(shape)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(rng.integers(0, 256, count * size, np.uint8)).view(dtype).reshape(shape)


def numbers(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Weights as trainers have them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.02).to(dtype)


class Captured:
    """A baseline of some tensors, as one rank alone has it."""

    def __init__(
        self, tensors: Tensors | Callable[[], Tensors], folder: Path, **selection: object
    ) -> None:
        read = tensors if callable(tensors) else lambda: tensors
        self.state = ModelState(read, Selection(**selection))  # type: ignore[arg-type]
        self.folder = folder
        sources = self.state.sources()
        self.plan = Plan(spreads_of([holdings_of(sources)]), 1)
        self.baseline = Baseline(self.plan, 0)
        self.capture = Capture(self.baseline)
        self.capture.fill(sources)

    def held(self) -> dict[str, bytes]:
        """The baseline's tensors."""
        found: dict[str, bytes] = {}
        for region in self.baseline.regions():
            name = self.plan.spreads[region.unit.tensor].name
            found[name] = found.get(name, b"") + region.baseline.tobytes()
        return found

    def diff(self, budget_bytes: int = 1 << 30) -> tuple[int, Staging]:
        staging = Staging(self.folder, budget_bytes)
        return self.capture.diff(self.state.sources(), staging), staging

    def changes(self, staging: Staging) -> dict[str, Changes]:
        """What differs, by tensor; every unit is the rank's own."""
        found = {}
        for place in staging.units():
            unit = self.baseline.units[place]
            changes = self.baseline.merged(place, {0: list(staging.of(place))})
            name = self.plan.spreads[unit.tensor].name
            if name in found:
                positions = np.concatenate([found[name].positions, changes.positions + unit.start])
                words = np.concatenate([found[name].words, changes.words])
                changes = Changes(positions, words)
            found[name] = changes
        return found

    def move(self, staging: Staging) -> None:
        for place in staging.units():
            self.baseline.apply_captured(place, list(staging.of(place)))


class TestFilling:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_any_bits_of_any_dtype(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Where the published dtype is the tensor's own, the bits are its own."""
        tensors = {"t": random_bits(dtype, (37, 5)), "s": random_bits(dtype, (), 1)}
        captured = Captured(tensors, tmp_path, dtype=None)
        assert captured.held() == {name: bits(t) for name, t in tensors.items()}

    @pytest.mark.parametrize("target", FLOATS, ids=str)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_conversions(self, tmp_path: Path, dtype: torch.dtype, target: torch.dtype) -> None:
        tensors = {"t": numbers(dtype, (100, 3))}
        captured = Captured(tensors, tmp_path, dtype=target)
        assert captured.held() == {"t": bits(tensors["t"].to(target))}

    @pytest.mark.parametrize("dtype", [*BYTES, *WHOLE, torch.bool, torch.complex64], ids=str)
    def test_what_is_no_parameter_s_float_stays(self, tmp_path: Path, dtype: torch.dtype) -> None:
        tensors = {"t": random_bits(dtype, (9, 3))}
        assert Captured(tensors, tmp_path, dtype=BF16).held() == {"t": bits(tensors["t"])}

    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t.T,
            lambda t: t[::2, 1::3],
            lambda t: t.permute(1, 0),
            lambda t: t[3],
            lambda t: t[:, :1].expand(40, 7),
            lambda t: t.reshape(2, 20, 30).transpose(0, 2),
            lambda t: t[5:5],
            lambda t: t[0, 0],
            lambda t: t[1:, 3:].T.flip(0),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.complex64], ids=str)
    def test_any_layout(
        self, tmp_path: Path, dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """What counts is the order of the elements, as ``contiguous()`` has them."""
        whole = numbers(torch.float32, (40, 30)).to(dtype)

        def expected() -> bytes:
            return bits(view(whole) if dtype == torch.complex64 else view(whole).to(BF16))

        captured = Captured(lambda: {"t": view(whole), "o": torch.ones(3)}, tmp_path)
        assert captured.held().get("t", b"") == expected()
        old = expected()
        whole[::7] *= 3
        count, staging = captured.diff()
        captured.move(staging)
        assert captured.held().get("t", b"") == expected()
        assert (count > 0) == (old != expected())

    def test_lazily_conjugated_and_negated(self, tmp_path: Path) -> None:
        tensor = random_bits(torch.complex64, (11,)).nan_to_num(1.0)
        lazy = {"c": tensor.conj(), "n": tensor.conj().imag}
        held = Captured(lazy, tmp_path, dtype=None).held()
        assert held == {"c": bits(lazy["c"].resolve_conj()), "n": bits(lazy["n"].resolve_neg())}

    @pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 7])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.int64], ids=str)
    def test_memory_that_begins_at_any_byte(
        self, tmp_path: Path, dtype: torch.dtype, offset: int
    ) -> None:
        """As the tensors of a file may, whose header has any length."""
        data = bytearray(np.random.default_rng(0).integers(0, 120, 8 * 500 + 8, np.uint8).tobytes())
        tensor = torch.frombuffer(data, dtype=dtype, count=500, offset=offset)
        for target in (None, BF16):
            captured = Captured({"t": tensor}, tmp_path, dtype=target)
            is_rounded = target is not None and dtype.is_floating_point
            assert captured.held() == {"t": bits(tensor.to(BF16) if is_rounded else tensor)}
            assert captured.diff()[0] == 0

    def test_parameters_that_want_gradients(self, tmp_path: Path) -> None:
        tensor = torch.nn.Parameter(numbers(torch.float32, (5, 5)))
        captured = Captured({"t": tensor}, tmp_path)
        assert captured.held() == {"t": bits(tensor.to(BF16))}
        assert captured.diff()[0] == 0
        assert tensor.grad is None

    def test_inference_tensors(self, tmp_path: Path) -> None:
        with torch.inference_mode():
            tensor = numbers(torch.float32, (5, 5)) + 1
        assert Captured({"t": tensor}, tmp_path).held() == {"t": bits(tensor.to(BF16))}

    def test_a_dtype_that_no_file_holds(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="'t'"):
            Captured({"t": torch.zeros(3).to(torch.complex128)}, tmp_path)

    def test_no_real_numbers_of_complex_ones(self, tmp_path: Path) -> None:
        """Nor the other way: what should they be?"""
        for dtype, target in ((torch.complex64, torch.float32), (torch.float32, torch.complex64)):
            with pytest.raises(InvalidArgument, match="'t'"):
                Captured({"t": torch.ones(4).to(dtype)}, tmp_path, dtypes={"t": target})


class TestChanges:
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.sampled_from(DTYPES),
        st.sampled_from([0.0, 0.01, 0.2, 0.3, 1.0]),
        st.integers(0, 2**32),
        st.sampled_from([0, 100, 1 << 30]),
    )
    def test_any_bits_that_flip(
        self, tmp_path: Path, dtype: torch.dtype, share: float, seed: int, budget_bytes: int
    ) -> None:
        """Positions and words, whatever the bits mean, in memory and in the file."""
        rng = np.random.default_rng(seed)
        tensors = {"t": random_bits(dtype, (50, 7), seed), "u": random_bits(dtype, (), seed)}
        captured = Captured(lambda: tensors, tmp_path, dtype=None)
        words = {}
        for spread in captured.plan.spreads:
            old = np.frombuffer(bits(tensors[spread.name]), f"<u{spread.word_bytes}")
            new = old ^ (rng.random(old.size) < share).astype(old.dtype)
            words[spread.name] = (old, new)
            flat = torch.from_numpy(new.view(np.uint8).copy()).view(dtype)
            tensors[spread.name] = flat.reshape(spread.shape)
        count, staging = captured.diff(budget_bytes)
        assert count == sum(int(np.count_nonzero(old != new)) for old, new in words.values())
        found = captured.changes(staging)
        for name, (old, new) in words.items():
            at = np.flatnonzero(old != new)
            assert (name in found) == bool(at.size)
            if at.size:
                positions = found[name].positions
                assert set(at) <= set(positions.tolist())
                assert np.array_equal(found[name].words.view(new.dtype), new[positions])
        captured.move(staging)
        assert captured.held() == {name: bits(t) for name, t in tensors.items()}
        assert captured.diff()[0] == 0
        staging.close()

    @pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
    def test_a_sign_of_zero_is_a_change(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """``==`` says that nothing changed."""
        tensor = torch.zeros(1000, dtype=dtype)
        captured = Captured({"t": tensor}, tmp_path)
        tensor[[3, 500, 999]] = -0.0
        count, staging = captured.diff()
        assert count == 3
        assert captured.changes(staging)["t"].positions.tolist() == [3, 500, 999]
        captured.move(staging)
        tensor.zero_()
        assert captured.diff()[0] == 3, "and back"

    def test_nan_payloads_of_bf16_travel_as_they_are(self, tmp_path: Path) -> None:
        patterns = [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC1, 0xFFFF]
        tensor = torch.zeros(100, dtype=BF16)
        captured = Captured({"t": tensor}, tmp_path)
        words = torch.tensor(patterns, dtype=torch.int32).to(torch.int16)
        tensor.view(torch.int16)[: len(patterns)] = words
        count, staging = captured.diff()
        assert count == len(patterns)
        found = captured.changes(staging)["t"].words.view("<u2")
        assert found.tolist() == patterns
        captured.move(staging)
        assert captured.diff()[0] == 0, "a NaN that did not change is no change"
        tensor.view(torch.int16)[0] = 0x7F82
        assert captured.diff()[0] == 1, "another payload is one"

    @pytest.mark.parametrize("count", [1, 7, 31, 32, 100, 4099, RUN_WORDS])
    @pytest.mark.parametrize("nan", [0x7FC00000, 0x7F800001, 0xFFC12345, 0xFFFFFFFF], ids=hex)
    def test_nan_of_fp32_is_what_torch_makes_of_it(
        self, tmp_path: Path, nan: int, count: int
    ) -> None:
        """Whose bits depend on the instructions that torch uses there."""
        tensor = numbers(torch.float32, (count,))
        captured = Captured({"t": tensor}, tmp_path)
        at = sorted({0, count // 3, count - 1})
        tensor.view(torch.int32)[at] = torch.tensor(nan, dtype=torch.int64).to(torch.int32)
        tensor[count // 2] = 3.0
        found, staging = captured.diff()
        assert found == len({*at, count // 2})
        captured.move(staging)
        assert captured.held() == {"t": bits(tensor.to(BF16))}
        assert captured.diff()[0] == 0
        assert Captured({"t": tensor}, tmp_path).held() == captured.held(), "filling rounds alike"

    def test_infinities_and_subnormals(self, tmp_path: Path) -> None:
        tensor = torch.zeros(64)
        captured = Captured({"t": tensor}, tmp_path)
        tensor[:6] = torch.tensor([torch.inf, -torch.inf, 3.4e38, 1e-40, -1e-42, 1e-45])
        _, staging = captured.diff()
        captured.move(staging)
        assert captured.held() == {"t": bits(tensor.to(BF16))}

    def test_what_does_not_cross_a_rounding_is_no_change(self, tmp_path: Path) -> None:
        """Most of what an optimizer does to master weights."""
        tensor = torch.ones(1000)
        captured = Captured({"t": tensor}, tmp_path)
        tensor.add_(1e-4)
        assert captured.diff()[0] == 0
        for _ in range(40):
            tensor.add_(1e-4)  # nothing is lost: it sums up to a change
        count, staging = captured.diff()
        assert count == 1000
        captured.move(staging)
        assert captured.held() == {"t": bits(tensor.to(BF16))}

    def test_several_runs_and_chunks(self, tmp_path: Path) -> None:
        """Changes on both sides of each border; one run wholly, one not at all."""
        count = (1 << 20) + 3 * RUN_WORDS + 17
        tensor = torch.zeros(count, dtype=BF16)
        captured = Captured({"a": torch.ones(3), "t": tensor}, tmp_path)
        marks = [0, RUN_WORDS - 1, RUN_WORDS, (1 << 20) - 1, 1 << 20, count - 1]
        tensor[marks] = 1.0
        tensor[2 * RUN_WORDS : 3 * RUN_WORDS] = 2.0
        found, staging = captured.diff()
        assert found == len(marks) + RUN_WORDS
        positions = captured.changes(staging)["t"].positions
        expected = sorted([*marks, *range(2 * RUN_WORDS, 3 * RUN_WORDS)])
        assert positions.tolist() == expected
        captured.move(staging)
        assert captured.held()["t"] == bits(tensor)


class TestDense:
    def test_a_run_that_changed_a_lot_is_kept_whole(self, tmp_path: Path) -> None:
        """It takes its own size, and no more: positions would triple it."""
        tensor = numbers(BF16, (3 * RUN_WORDS,))
        captured = Captured({"t": tensor}, tmp_path)
        tensor.view(torch.int16).bitwise_xor_(1)
        count, staging = captured.diff()
        assert count == 3 * RUN_WORDS
        assert staging.changed_bytes == 2 * count
        assert all(run.positions is None for place in staging.units() for run in staging.of(place))

    def test_few_changes_take_six_bytes_each(self, tmp_path: Path) -> None:
        tensor = numbers(BF16, (RUN_WORDS,))
        captured = Captured({"t": tensor}, tmp_path)
        tensor.view(torch.int16)[::1000].bitwise_xor_(1)
        count, staging = captured.diff()
        assert staging.changed_bytes == 6 * count

    @pytest.mark.parametrize("budget_bytes", [0, 5_000, 300_000, 10_000_000])
    @pytest.mark.parametrize("stride", [1, 3, 50])
    def test_beyond_the_budget_they_lie_in_a_file(
        self, tmp_path: Path, budget_bytes: int, stride: int
    ) -> None:
        """Of any word size, as they were; and nothing is left in the folder."""
        tensors = {
            "f": numbers(torch.float32, (2 * RUN_WORDS + 5,)),
            "b": numbers(BF16, (RUN_WORDS + 3,)),
            "i": torch.arange(5001),
            "u": torch.zeros(999, dtype=torch.uint8),
        }
        captured = Captured(tensors, tmp_path, dtype=None)
        for tensor in tensors.values():
            tensor[::stride] += 1
        count, staging = captured.diff(budget_bytes)
        # Adding 1 changes every word of them.
        assert count == sum(len(tensor[::stride]) for tensor in tensors.values())
        assert list(tmp_path.iterdir()) == [], "the file has no name"
        memory = sum(
            run.byte_count
            for place in staging.units()
            for run in staging._units[place]
            if isinstance(run, Found)
        )
        assert memory <= budget_bytes
        for _ in range(2):  # read more than once: by the sample, then by the encoder
            found = captured.changes(staging)
        for name, changes in found.items():
            size = captured.plan.spreads[list(tensors).index(name)].word_bytes
            new = np.frombuffer(bits(tensors[name]), f"<u{size}")
            assert np.array_equal(changes.words.view(new.dtype), new[changes.positions])
        captured.move(staging)
        assert captured.held() == {name: bits(t) for name, t in tensors.items()}
        staging.close()
        assert staging.units() == []


class TestIndependence:
    @pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
    @pytest.mark.parametrize("stride", [1, 100])
    @pytest.mark.parametrize("target", [None, BF16], ids=str)
    def test_training_goes_on_meanwhile(
        self, tmp_path: Path, dtype: torch.dtype, stride: int, target: torch.dtype | None
    ) -> None:
        """What was captured is that of the moment, also where it is the tensor's own bits."""
        tensor = numbers(dtype, (RUN_WORDS + 100,))
        captured = Captured({"t": tensor}, tmp_path, dtype=target)
        filled = captured.held()
        tensor[::stride] += 1
        then = bits(tensor if target is None else tensor.to(target))
        _, staging = captured.diff()
        tensor.fill_(7)
        assert captured.held() == filled, "the baseline does not move by itself"
        captured.move(staging)
        assert captured.held() == {"t": then}

    def test_one_capture_does_not_write_over_another(self, tmp_path: Path) -> None:
        tensor = numbers(BF16, (5000,))
        captured = Captured({"t": tensor}, tmp_path)
        first = bits(tensor)
        tensor[10] += 1
        second = bits(tensor)
        _, one = captured.diff()
        tensor[:2000:7] += 1
        _, other = captured.diff()
        assert captured.held() == {"t": first}
        captured.move(one)
        assert captured.held() == {"t": second}
        captured.move(other)
        assert captured.held() == {"t": bits(tensor)}


class TestOtherModels:
    @pytest.mark.parametrize(
        ("change", "name"),
        [
            (lambda t: t.pop("a"), "a"),
            (lambda t: t.update(c=torch.ones(3)), "c"),
            (lambda t: t.update(a=torch.ones(4, 5)), "a"),
            (lambda t: t.update(a=torch.ones(20)), "a"),
            (lambda t: t.update(b=torch.ones(3, dtype=torch.int32)), "b"),
            (lambda t: t.update(z=t.pop("a")), "z"),
        ],
    )
    def test_other_names_shapes_or_dtypes(
        self, tmp_path: Path, change: Callable[[Tensors], object], name: str
    ) -> None:
        tensors = {"a": torch.ones(5, 4), "b": torch.ones(3, dtype=torch.int64)}
        captured = Captured(lambda: dict(tensors), tmp_path)
        change(tensors)
        for act in (captured.diff, lambda: captured.capture.fill(captured.state.sources())):
            with pytest.raises(TensorMismatch, match=repr(name)) as raised:
                act()
            assert raised.value.context["tensor"] == name

    def test_another_order_is_the_same_model(self, tmp_path: Path) -> None:
        tensors: Tensors = {"a": torch.ones(5, 4), "b": torch.zeros(3)}
        captured = Captured(lambda: dict(reversed(tensors.items())), tmp_path)
        turned: Mapping[str, torch.Tensor] = dict(tensors)
        captured.state = ModelState(lambda: turned, Selection())
        tensors["b"].fill_(2)
        assert captured.diff()[0] == 3

    def test_another_float_dtype_that_is_published_alike_is_none(self, tmp_path: Path) -> None:
        """Casting a model does not end its stream."""
        tensors = {"a": torch.ones(5, 4)}
        captured = Captured(lambda: tensors, tmp_path)
        tensors["a"] = tensors["a"].double()
        assert captured.diff()[0] == 0
