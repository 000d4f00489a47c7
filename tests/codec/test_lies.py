"""Sound heads before content that lies: an error, or the right weights; never wrong ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import numpy as np
import pytest

import thinwire
from thinwire.errors import (
    ApplyError,
    BaseMismatch,
    FormatError,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
    Unsupported,
)

from .hostile import PARTS, TABLE, Change, rebuilt, tensor
from .sample_delta import NEW, PAYLOAD, READERS, decode_all
from .writer import pack, unpack, with_sections

LIES: dict[str, tuple[Change, type[ThinwireError]]] = {
    "no tables": (lambda index: index.update(tables=[]), FormatError),
    "tables of another dtype": (lambda index: index.update(tables=[TABLE]), FormatError),
    "members swapped": (
        lambda index: index["tensors"].insert(0, index["tensors"].pop(1)),
        ApplyError,
    ),
    "a shape that no base has": (tensor("frozen.large", shape=[1 << 48]), TensorMismatch),
    "a name that no base has": (tensor("weights", name="other"), TensorMismatch),
}


@pytest.mark.parametrize("name", LIES)
def test_indexes_that_lie(name: str) -> None:
    change, error = LIES[name]
    payload = rebuilt(change)
    thinwire.inspect(payload)
    for read in READERS:
        with pytest.raises(error):
            read(payload)


def test_a_group_without_members_is_harmless() -> None:
    payload = rebuilt(lambda index: index["groups"].append({"dtype": "BF16"}))
    assert decode_all(payload).keys() == NEW.keys()


@pytest.mark.parametrize("at", range(len(PARTS.digests)))
def test_a_digest_that_lies(at: int) -> None:
    digests = list(PARTS.digests)
    digests[at] ^= 1
    payload = pack(PARTS.index, digests, PARTS.sections)
    thinwire.inspect(payload)
    if DIGEST_OWNERS[at] == "new":
        with pytest.raises((FormatError, BaseMismatch)):
            decode_all(payload)
    else:
        # Looked at to explain a failure only: the digest of the new tensor vouches for the result.
        assert decode_all(payload).keys() == NEW.keys()


def _digest_owners() -> list[str]:
    """What each digest is of: "base", "new" (or of a carried file), "absent" here."""
    by_kind = {"delta": ["base", "new"], "same": ["new"], "full": ["new"], "removed": ["absent"]}
    owners: list[str] = []
    for record in PARTS.index["tensors"]:
        owners += by_kind[record.get("kind", "delta")]
    return owners + ["new" if "stored" in file else "absent" for file in PARTS.index["attachments"]]


DIGEST_OWNERS = _digest_owners()


def _first_bytes() -> list[int]:
    """Where the sections of chunks begin."""
    sizes = [size for record in PARTS.index["tensors"] for size in record.get("sizes", [])]
    sizes += [group.get("size", 0) for group in PARTS.index["groups"]]
    return [int(at) for at, size in zip(np.cumsum([0, *sizes]), sizes, strict=False) if size]


@pytest.mark.parametrize("start", _first_bytes())
def test_methods_tables_and_shifts_out_of_range(start: int) -> None:
    for at, values in ((start, range(256)), (start + 1, (0, 1, 62, 63, 193, 194, 255))):
        for value in values:
            sections = bytearray(PARTS.sections)
            if sections[at] == value:
                continue
            class_coded = sections[start] < 128
            sections[at] = value
            payload = with_sections(PAYLOAD, bytes(sections))
            thinwire.inspect(payload)
            for read in READERS:
                if at == start or class_coded:
                    _assert_error_or_right(read, payload, 128 <= value < 254 and at == start)


def _assert_error_or_right(
    read: Callable[[bytes], dict[str, np.ndarray]], payload: bytes, unsupported: bool
) -> None:
    try:
        found = read(payload)
    except Unsupported:
        return
    except (FormatError, ApplyError):
        found = {}
    # changes() passes over tensors that are carried in full.
    assert not unsupported or (found and "added" not in found)
    for name, bits in found.items():
        assert bits.tobytes() == NEW[name].tobytes()


def test_a_hostile_delta_for_one_array() -> None:
    base = np.arange(6, dtype=np.uint16)
    payload = thinwire.encode(base, base + np.uint16(1), dtype="BF16")
    parts = unpack(payload)
    for fields in (
        {"shape": [1 << 40]},
        {"shape": [2, 3]},
        {"dtype": "F32", "shape": [3]},
        {"dtype": "I8", "shape": [12]},
        {"name": "x"},
        {"kind": "full", "group": None, "sizes": [3]},
    ):
        index = copy.deepcopy(parts.index)
        index["tensors"][0].update(fields)
        for hostile in (pack(index, parts.digests, parts.sections),):
            for call in (thinwire.decode, thinwire.changes, thinwire.decode_into):
                own = base.copy()
                with pytest.raises((FormatError, ApplyError, InvalidArgument)):
                    call(own, hostile)
                assert np.array_equal(own, base)


def test_carried_in_full_for_one_array() -> None:
    # Sound, but not what encode writes: decode may take it, decode_into may refuse, nothing else.
    base = np.arange(6, dtype="<u2")
    new = base[::-1].copy()
    whole = unpack(thinwire.encode_tensors({}, {"": new}))
    payload = pack(*whole)
    with contextlib.suppress(ThinwireError):
        assert np.array_equal(thinwire.decode(base, payload), new)
    own = base.copy()
    try:
        thinwire.decode_into(own, payload)
    except ThinwireError:
        assert np.array_equal(own, base)
    else:
        assert np.array_equal(own, new)
