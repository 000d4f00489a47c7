"""NeMo-RL's payloads: what breaks a rule is an error that says which, and nothing is called."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import (
    Corrupt,
    FormatError,
    LimitExceeded,
    ThinwireError,
    Truncated,
    Unsupported,
)
from thinwire.interop import nemo

from .making import applied, bits_of, write_checkpoint
from .nemo_by_hand import NEW, OLD, packed, payload, saved, sound, stored, zstd

BASE = {name: stored(old) for name, old in OLD.items()}


def apply_all(path: Path) -> None:
    with nemo.open_delta(path) as delta:
        for name in delta.tensors:
            delta.new_tensor(name, BASE.get(name))


Edit = Callable[[Any, list[Any], list[dict[str, Any]]], Any]


def table(**fields: Any) -> Edit:
    return lambda _, __, tables: tables[0].update(fields)


def without(key: str) -> Edit:
    return lambda _, __, tables: tables[0].pop(key)


BAD_TABLES: dict[str, tuple[Edit, type[FormatError], str]] = {
    "no name": (without("name"), Corrupt, "no name"),
    "added floats": (without("operation"), Unsupported, "adds floats"),
    "operation": (table(operation="add"), Unsupported, "operation 'add'"),
    "unknown field": (table(numel=1), Unsupported, "'numel' is not known"),
    "samples by value": (table(verification_values=[1]), Unsupported, "verification_values"),
    "no dtype": (without("dtype"), Corrupt, "dtype is malformed"),
    "dtype": (table(dtype="float4"), Unsupported, "'float4'"),
    "other dtype": (table(dtype="float32"), Corrupt, "its values are int16"),
    "no shape": (without("shape"), Corrupt, "shape is malformed"),
    "listed shape": (table(shape=[40, 30]), Corrupt, "shape is malformed"),
    "negative shape": (table(shape=(-1, 2)), Corrupt, "negative|changes"),
    "huge shape": (table(shape=(1 << 40, 1 << 40)), LimitExceeded, "beyond"),
    "small shape": (table(shape=(3,)), Corrupt, "changes in a tensor"),
    "encoding": (table(index_encoding="indices"), Unsupported, "'indices' are not read"),
    "zstd deltas": (table(index_encoding="deltas_zstd"), Unsupported, "not read here"),
    "range without start": (table(index_encoding="range"), Corrupt, "contradict"),
    "deltas with start": (table(range_start=1), Corrupt, "contradict"),
    "group": (table(value_group=9), Corrupt, "no group 9"),
    "negative group": (table(value_group=-1), Corrupt, "value_group is malformed"),
    "true group": (table(value_group=True), Corrupt, "value_group is malformed"),
    "no values": (table(value_end=0), Corrupt, "0 changes"),
    "values shared": (
        lambda _, __, t: t[1].update(
            value_start=t[1]["value_start"] - 1, value_end=t[1]["value_end"] - 1
        ),
        Corrupt,
        "do not follow",
    ),
    "width": (table(index_end=3), Corrupt, "3 bytes of positions"),
    "twice": (lambda _, __, t: t.append(t[0]), Unsupported, "comes twice"),
    "left over": (lambda _, __, t: t.pop(), Corrupt, "left over"),
    "no table": (lambda _, __, t: t.append(5), Corrupt, "no name"),
    "samples": (table(verification_samples="x"), Corrupt, "verification_samples is malf"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables(tmp_path: Path, case: str) -> None:
    edit, error, match = BAD_TABLES[case]
    index, groups, tables = payload(OLD, NEW, "xor")
    edit(index, groups, tables)
    path = packed(tmp_path, saved(index, groups, tables))
    with pytest.raises(error, match=match) as caught:
        nemo.open_delta(path)
    assert str(path) in caught.value.message
    assert "NeMo-RL" in caught.value.message
    assert caught.value.hint


BAD_POSITIONS = {
    "outside": ("H", [5, 1194], "position 1200"),
    "wide": ("I", [0xFFFFFFFF, 0xFFFFFFFF], "not one of its 1200"),
    "negative": ("Q", [2**64 - 1, 5], "position -1"),
    "wraps": ("Q", [2**63 - 1, 2**63 - 1], "not one of its 1200"),
    "comes back": ("Q", [5, 2**64 - 2], "do not rise"),
}


@pytest.mark.parametrize("case", BAD_POSITIONS)
def test_bad_positions(tmp_path: Path, case: str) -> None:
    code, gaps, match = BAD_POSITIONS[case]
    row = {
        "name": "model.w",
        "shape": (40, 30),
        "dtype": "bfloat16",
        "operation": "xor",
        "index_start": 0,
        "index_end": struct.calcsize(code) * len(gaps),
        "value_group": 0,
        "value_start": 0,
        "value_end": len(gaps),
        "index_encoding": "deltas",
    }
    index = np.frombuffer(struct.pack(f"<{len(gaps)}{code}", *gaps), "u1")
    path = packed(tmp_path, saved(index, [np.zeros(len(gaps), "<i2")], [row]))
    with pytest.raises(Corrupt, match=match):
        apply_all(path)
    row |= {"index_end": 0, "index_encoding": "range", "range_start": 1199}
    path = packed(tmp_path, saved(np.empty(0, "u1"), [np.zeros(len(gaps), "<i2")], [row]))
    with pytest.raises(Corrupt, match="position 1200"):
        apply_all(path)


def test_other_values_than_a_payload(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    index, groups, tables = payload(OLD, NEW, "xor")
    flat = torch.zeros(4, 4, dtype=torch.int16)
    cases: list[tuple[Any, str]] = [
        ({"a": 1}, "no tuple"),
        ((index.size, (), []), "not a flat one"),
        ((torch.zeros(3), (), []), "FloatStorage"),
        ((torch.zeros(3, dtype=torch.bfloat16), (), []), "BFloat16Storage"),
        ((flat, (), []), "not a flat one"),
        ((flat[:, 1], (), []), "side by side"),
        ((torch.zeros(3, dtype=torch.int16), (), []), "are not bytes"),
        ((torch.zeros(3, dtype=torch.uint8), [], []), "no tuple"),
        ((torch.zeros(3, dtype=torch.uint8, requires_grad=False), (), ()), "no tuple"),
        (torch.nn.Linear(2, 2), "not taken"),
        ((torch.zeros(3, dtype=torch.uint8), (), [np.float32(3)]), "not taken"),
        ((torch.zeros(3, dtype=torch.uint8), (), [Path("x")]), "not taken"),
        ((torch.zeros(2, dtype=torch.uint8).to_sparse(), (), []), "not taken"),
    ]
    for number, (value, match) in enumerate(cases):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with pytest.raises(FormatError, match=match):
            nemo.open_delta(packed(tmp_path, buffer.getvalue(), f"{number}.pt"))
    buffer = io.BytesIO()
    torch.save((index, groups, tables), buffer, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError):
        nemo.open_delta(packed(tmp_path, buffer.getvalue(), "old.pt"))


def rezipped(edit: Callable[[dict[str, bytes]], Any], method: int = zipfile.ZIP_STORED) -> bytes:
    """The same members, changed, in an archive that Python wrote."""
    source = zipfile.ZipFile(io.BytesIO(sound("xor")))
    members = {name: source.read(name) for name in source.namelist()}
    edit(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def calls_system(members: dict[str, bytes]) -> None:
    """A pickle that would run a program."""
    members["archive/data.pkl"] = b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R."


BAD_ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], Any], type[FormatError], str]] = {
    "a call": (calls_system, Unsupported, r"names posix\.system"),
    "no pickle": (lambda m: m.pop("archive/data.pkl"), Corrupt, r"no member 'data\.pkl'"),
    "no version": (lambda m: m.pop("archive/version"), Unsupported, "version 3"),
    "version 4": (lambda m: m.update({"archive/version": b"4"}), Unsupported, "version 3"),
    "big-endian": (lambda m: m.update({"archive/byteorder": b"big"}), Unsupported, "little"),
    "two folders": (lambda m: m.update({"other/x": b""}), Corrupt, "one folder"),
    "a storage less": (lambda m: m.pop("archive/data/1"), Corrupt, "no member 'data/1'"),
    "a short storage": (
        lambda m: m.update({"archive/data/1": m["archive/data/1"][:-2]}),
        Corrupt,
        "not inside of its storage",
    ),
    "a long storage": (
        lambda m: m.update({"archive/data/1": m["archive/data/1"] + b"xx"}),
        Corrupt,
        "not inside of its storage",
    ),
    "members": (
        lambda m: m.update({f"archive/x{number}": b"" for number in range(2000)}),
        LimitExceeded,
        "members",
    ),
    "nothing": (lambda m: m.clear(), Corrupt, "one folder"),
}


def test_archives_of_others_are_read(tmp_path: Path) -> None:
    """Without the padding, the wide sizes and the checksums afterwards that torch has."""
    base = write_checkpoint(tmp_path / "base", OLD)
    path = packed(tmp_path, rezipped(lambda members: members.pop("archive/byteorder")))
    with nemo.open_delta(path) as delta:
        assert applied(base, delta) == bits_of(NEW)


@pytest.mark.parametrize("case", BAD_ARCHIVES)
def test_bad_archives(tmp_path: Path, case: str) -> None:
    edit, error, match = BAD_ARCHIVES[case]
    with pytest.raises(error, match=match):
        nemo.open_delta(packed(tmp_path, rezipped(edit)))


def test_packed_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="packed or encrypted"):
        nemo.open_delta(packed(tmp_path, rezipped(lambda _: None, zipfile.ZIP_DEFLATED)))


def test_members_must_lie_where_they_should(tmp_path: Path) -> None:
    whole = rezipped(lambda _: None)
    end = whole.rindex(b"PK\5\6")
    second = whole.index(b"PK\1\2", whole.index(b"PK\1\2") + 4)
    first_start = whole[whole.index(b"PK\1\2") :][42:46]
    cases = {
        "at the place of another": whole[: second + 42] + first_start + whole[second + 46 :],
        "outside": whole[: second + 42] + b"\xf0\xff\xff\x7f" + whole[second + 46 :],
        "a size beyond": whole[: second + 20] + b"\xf0\xff\xff\x7f" * 2 + whole[second + 28 :],
        "a checksum": whole[: second + 16] + b"abcd" + whole[second + 20 :],
        "a directory elsewhere": whole[: end + 16] + b"\0\0\0\0" + whole[end + 20 :],
        "a count": whole[: end + 8] + b"\1\0\1\0" + whole[end + 12 :],
        "a comment": whole[:-2] + b"\1\0x",
        "no end": whole[:-22],
        "junk": b"x" * 100,
        "empty": b"",
    }
    for name, data in cases.items():
        path = packed(tmp_path, data, f"{name}.pt")
        with pytest.raises(FormatError):
            nemo.open_delta(path)


def test_the_last_member_may_not_reach_into_the_directory(tmp_path: Path) -> None:
    whole = rezipped(lambda _: None)
    directory = whole.index(b"PK\1\2")
    last = whole.rindex(b"PK\1\2")
    start = int.from_bytes(whole[last + 42 : last + 46], "little")
    name_bytes = int.from_bytes(whole[start + 26 : start + 28], "little")
    reach = len(whole) - (start + 30 + name_bytes) - 22
    data = whole[start + 30 + name_bytes :][:reach]
    fields = struct.pack("<3I", zlib.crc32(data), reach, reach)
    # The checksum is over bytes that hold it, so only its failure or the overlap may show.
    path = packed(tmp_path, whole[: last + 16] + fields + whole[last + 28 :])
    with pytest.raises(Corrupt, match=r"overlap|CRC-32"):
        nemo.open_delta(path)
    assert directory < last


def test_every_prefix_is_an_error(tmp_path: Path) -> None:
    whole = zstd.compress(sound("xor"), 1)
    path = tmp_path / "x.pt"
    for size in range(0, len(whole), 61):
        path.write_bytes(whole[:size])
        with pytest.raises(Truncated if size > 3 or not size else FormatError):
            nemo.open_delta(path)
        nemo.is_delta(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(Corrupt, match="follow"):
        nemo.open_delta(path)


def test_a_look_never_raises(tmp_path: Path) -> None:
    (tmp_path / "zip.pt").write_bytes(sound("xor"))
    (tmp_path / "zstd.pt").write_bytes(zstd.compress(b"PK", 1))
    (tmp_path / "magic.pt").write_bytes(b"\x28\xb5\x2f\xfd")
    (tmp_path / "empty").write_bytes(b"")
    for path in [*tmp_path.iterdir(), tmp_path, tmp_path / "none"]:
        assert not nemo.is_delta(path)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_mutations_are_errors_or_other_weights(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The CRC-32 of its member finds what is flipped in values; the rest finds the rules."""
    raw = bytearray(sound("xor"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 3000), st.integers(0, len(raw) - 1)))
        raw[at % len(raw)] = data.draw(st.integers(0, 255))
    path = packed(tmp_path_factory.mktemp("mutated"), bytes(raw))
    with suppress(ThinwireError), nemo.open_delta(path) as delta:
        for name in delta.tensors:
            new = delta.new_tensor(name, BASE.get(name))
            assert (new.dtype, new.shape) == BASE[name][:2]


@pytest.mark.claim("nemo", "refuse", "changed pickles and archives")
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_mutated_pickles_call_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With the checksum made right again: what the pickle says is all that is left."""

    def edit(members: dict[str, bytes]) -> None:
        raw = bytearray(members["archive/data.pkl"])
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        members["archive/data.pkl"] = bytes(raw)

    path = packed(tmp_path_factory.mktemp("mutated"), rezipped(edit))
    with suppress(ThinwireError):
        apply_all(path)
