"""Calls that are wrong, and bases that are: an error that says so, and nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import thinwire
from thinwire.errors import BaseMismatch, InvalidArgument, TensorMismatch, Unsupported

from .array_making import NUMPY_DTYPES, bits, random_array, stepped
from .writer import digest_of_runs


@pytest.mark.parametrize(
    ("base", "error"),
    [
        ("text", InvalidArgument),
        (None, InvalidArgument),
        ([1, 2], InvalidArgument),
        (object(), InvalidArgument),
        (np.zeros(3, ">f4"), InvalidArgument),
        (np.zeros(3, "complex128"), Unsupported),
        (np.array(["a"]), Unsupported),
        (np.array([None]), Unsupported),
        (np.zeros(2, "datetime64[s]"), Unsupported),
        (np.zeros(2, [("x", "f4")]), Unsupported),
    ],
)
def test_what_is_no_array_is_refused(base: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        thinwire.encode(base, base)


@pytest.mark.parametrize("dtype", ["BF16", "F64", "nonsense"])
def test_a_dtype_of_another_width_is_refused(dtype: str) -> None:
    base = np.zeros(4, np.float32)
    with pytest.raises((InvalidArgument, Unsupported)):
        thinwire.encode(base, base, dtype=dtype)


@pytest.mark.parametrize(("dtype", "elements"), [("F4", 24), ("F6_E2M3", 16), ("F6_E3M2", 16)])
def test_packed_dtypes_come_as_bytes(dtype: str, elements: int) -> None:
    base = np.arange(36, dtype=np.uint8).reshape(3, 12)
    new = base ^ np.uint8(3)
    payload = thinwire.encode(base, new, dtype=dtype)
    assert thinwire.inspect(payload).tensors[0].shape == (3, elements)
    decoded = thinwire.decode(base, payload)
    assert np.array_equal(decoded, new)
    assert decoded.shape == base.shape
    assert np.array_equal(thinwire.changes(base, payload).values, new.reshape(-1))
    with pytest.raises(InvalidArgument):
        thinwire.encode(np.uint8(3), np.uint8(4), dtype=dtype)


def test_sides_that_differ_are_refused() -> None:
    base = np.zeros((3, 4), np.float32)
    for new in (np.zeros((4, 3), np.float32), np.zeros(12, np.float32), base.view(np.int32)):
        with pytest.raises(TensorMismatch):
            thinwire.encode(base, new)


def test_a_base_of_another_dtype_or_shape_is_refused() -> None:
    base = random_array(NUMPY_DTYPES["bfloat16"], (6, 4))
    payload = thinwire.encode(base, stepped(base))
    wrong = [base.view(np.float16), base.T, base.reshape(-1), base[:5], base.view(np.uint8)]
    wrong += [np.zeros((6, 4), np.float32), np.zeros((6, 4), np.int32)]
    for other in wrong:
        for call in (thinwire.decode, thinwire.changes, thinwire.decode_into):
            copy = other.copy()
            with pytest.raises(TensorMismatch):
                call(copy, payload)
            assert bits(copy) == bits(other)


@pytest.mark.parametrize("call", [thinwire.decode, thinwire.changes, thinwire.decode_into])
@pytest.mark.parametrize("changed", [True, False])
def test_a_wrong_base_is_named_with_both_digests(call: Any, changed: bool) -> None:
    base = random_array(NUMPY_DTYPES["bfloat16"], (5000,))
    payload = thinwire.encode(base, stepped(base) if changed else base)
    other = stepped(base, 0.5)
    before = bits(other)
    with pytest.raises(BaseMismatch) as caught:
        call(other, payload)
    expected, actual = (f"{digest_of_runs(bits(a), 2 << 20):016x}" for a in (base, other))
    assert caught.value.context["expected_digest"] == expected
    assert caught.value.context["actual_digest"] == actual
    assert expected in str(caught.value)
    assert actual in str(caught.value)
    assert bits(other) == before


def test_applying_twice_is_a_wrong_base() -> None:
    base = random_array(NUMPY_DTYPES["float32"], (300,))
    payload = thinwire.encode(base, stepped(base))
    thinwire.decode_into(base, payload)
    after = bits(base)
    with pytest.raises(BaseMismatch):
        thinwire.decode_into(base, payload)
    assert bits(base) == after


def test_a_named_delta_is_not_for_one_array() -> None:
    base = np.zeros(5, np.float32)
    payload = thinwire.encode_tensors({"w": base}, {"w": base})
    for call in (thinwire.decode, thinwire.changes, thinwire.decode_into):
        with pytest.raises(InvalidArgument, match="decode_tensors"):
            call(base, payload)


@pytest.mark.parametrize("options", [{"zstd_level": 0}, {"zstd_level": 20}, {"instructions": "x"}])
def test_a_spec_out_of_range_is_refused(options: dict[str, Any]) -> None:
    base = np.zeros(5, np.float32)
    with pytest.raises(InvalidArgument):
        thinwire.encode(base, base, spec=thinwire.Spec(**options))


def test_a_path_is_no_payload(tmp_path: Any) -> None:
    base = np.zeros(4, np.uint8)
    path = tmp_path / "delta.tw"
    path.write_bytes(thinwire.encode(base, base + 1))
    for payload in (str(path), path, np.frombuffer(path.read_bytes(), np.uint8)):
        with pytest.raises(InvalidArgument):
            thinwire.decode(base, payload)


def test_a_base_that_is_the_new_one_is_told_so() -> None:
    base = np.arange(1000, dtype=np.uint16)
    new = base ^ np.uint16(1)
    payload = thinwire.encode(base, new)
    thinwire.decode_into(base, payload)
    with pytest.raises(BaseMismatch, match="applied already") as caught:
        thinwire.decode_into(base, payload)
    assert "the array" in caught.value.message
    assert np.array_equal(base, new)
