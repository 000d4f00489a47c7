"""The pickle reader takes plain values and runs nothing; the writer makes Python's own bytes."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import Corrupt, FormatError, LimitExceeded, Truncated, Unsupported
from thinwire.interop.fireworks.pickle_write import OpenTable, Unshared, write_pickle
from thinwire.interop.pickles import MAX_DEPTH, Call, PersistentId, read_pickle

PROTO = b"\x80\x05"
MARKERS = {("torch._utils", "_rebuild"): "rebuild", ("collections", "OrderedDict"): "table"}

texts = st.text(st.characters(codec="utf-8"), max_size=12)
atoms = st.one_of(
    texts,
    st.integers(-(1 << 31), (1 << 63) - 1),
    st.binary(max_size=300),
    st.sampled_from([b"", b"x" * 65_535, b"y" * 65_536, b"z" * 70_000]),
)
storable = st.recursive(
    atoms,
    lambda parts: st.one_of(
        st.lists(parts, max_size=5).map(tuple), st.dictionaries(texts, parts, max_size=5)
    ),
    max_leaves=20,
)
plain = st.recursive(
    st.one_of(atoms, st.none(), st.booleans()),
    lambda parts: st.one_of(
        st.lists(parts, max_size=5),
        st.lists(parts, max_size=5).map(tuple),
        st.dictionaries(texts, parts, max_size=5),
    ),
    max_leaves=20,
)


def apart(value: Any) -> Any:
    """The same value whose equal texts are one object and whose bytes are all their own."""
    if isinstance(value, dict):
        return {shared(key): apart(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(apart(part) for part in value)
    if isinstance(value, str):
        return shared(value)
    return bytes(bytearray(value)) if isinstance(value, bytes) and len(value) > 1 else value


POOL: dict[str, str] = {}


def shared(text: str) -> str:
    return POOL.setdefault(text, text)


def as_bytes(value: Any) -> Any:
    """What was read, its views of bytes as bytes."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {key: as_bytes(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(as_bytes(part) for part in value)
    return value


def has_single_bytes(value: Any) -> bool:
    """Python keeps one object for each byte, and so writes the second one as the first."""
    if isinstance(value, dict | tuple):
        return any(has_single_bytes(p) for p in (value.values() if type(value) is dict else value))
    return isinstance(value, bytes) and len(value) == 1


@given(storable)
@settings(max_examples=80, deadline=None)
def test_writes_what_python_writes(value: Any) -> None:
    ours = write_pickle(value)
    assert pickle.loads(ours) == value
    assert as_bytes(read_pickle(ours)) == value
    if not has_single_bytes(value):
        assert ours == pickle.dumps(apart(value), protocol=5)


def test_text_made_anew_is_written_anew() -> None:
    text = "dtype" * 3
    value = {"a": text, "b": Unshared(text), "c": text}
    twin = {"a": text, "b": "".join(list(text)), "c": text}
    assert write_pickle(value) == pickle.dumps(twin, protocol=5)


def test_an_open_table_is_the_table() -> None:
    items = {"version": 1, "shape": (3, 4), "data": b"q" * 66_000}
    table = OpenTable(items)
    for last in ({"kind": "flat"}, {"kind": "row", "data": b"r" * 70_000}):
        assert table.write_with("indices", last) == write_pickle(items | {"indices": last})


@given(plain, st.sampled_from([4, 5]))
@settings(max_examples=80, deadline=None)
def test_reads_what_python_writes(value: Any, protocol: int) -> None:
    assert as_bytes(read_pickle(pickle.dumps(value, protocol=protocol))) == value


def test_large_tables_and_long_texts() -> None:
    value = {f"key {n}": n for n in range(3000)} | {"long": "é" * 400, "list": list(range(2500))}
    assert read_pickle(pickle.dumps(value, protocol=4)) == value


class Evil:
    """Writes to a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"a": Evil(tmp_path / "ran")}, protocol=protocol)
    with pytest.raises(FormatError):
        read_pickle(data)
    with pytest.raises(FormatError):
        read_pickle(data, globals={("collections", "OrderedDict"): "table"})
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)
    assert (tmp_path / "ran").exists()


PLAIN = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE",
    "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "TUPLE", "SETITEM", "SETITEMS", "APPEND", "APPENDS",
}  # fmt: skip


@pytest.mark.parametrize("code", range(256))
def test_every_other_opcode_is_refused_by_name(code: int) -> None:
    names = {ord(op.code): op.name for op in pickletools.opcodes}
    if names.get(code) in PLAIN:
        return
    with pytest.raises(Unsupported, match=f"opcode {names.get(code, f'0x{code:02x}')},"):
        read_pickle(PROTO + b"K\x01" + bytes([code]) + b"os\nsystem\n.")


def test_every_prefix_is_truncated() -> None:
    value = {"a": (1, 300, -70_000, 1 << 40), "b": [None, True, b"xyz"], "c": {"d": "é"}}
    data = pickle.dumps(value, protocol=5)
    for size in range(len(data)):
        with pytest.raises(Truncated):
            read_pickle(data[:size])


@given(st.binary(max_size=60))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    for start in (b"", PROTO):
        try:
            read_pickle(start + data)
            read_pickle(start + data, globals={("a", "b"): "c"})
        except FormatError:
            pass


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"0.", Unsupported),  # POP
        (b".", Corrupt),  # nothing
        (b"NN.", Corrupt),  # two values
        (b"N.N", Corrupt),  # more behind
        (b"(N.", Corrupt),  # an open mark
        (b"u.", Corrupt),  # no mark
        (b"(Nu.", Corrupt),  # no table
        (b"}(Nu.", Corrupt),  # half an item
        (b"}NNs.", Corrupt),  # a key that is no text
        (b"}(\x8c\x01aN\x8c\x01aNu.", Corrupt),  # a key twice
        (b"}K\x01Ns.", Corrupt),  # whole numbers as keys: their hashes may all be one
        (b"]Ns.", Corrupt),  # items into nothing
        (b"}Na.", Corrupt),  # appended to a table
        (b"(NNa.", Corrupt),  # taken across a mark
        (b"\x94.", Corrupt),  # nothing to keep
        (b"h\x00.", Corrupt),  # nothing kept
        (b"\x8c\x02\xff\xff.", Corrupt),  # not UTF-8
        (b"\x8a\xff" + bytes(255) + b".", LimitExceeded),  # a huge number
        (b"\x8e" + b"\xff" * 8 + b"x.", Truncated),  # a huge run of bytes
        (b"\x95" + b"\xff" * 8 + b"N.", Truncated),  # a huge frame
        (b"X" + b"\xff" * 4 + b"x.", Truncated),  # a huge text
        (b"]\x94h\x00a.", Corrupt),  # a list in itself
        (b"}\x94\x8c\x01ah\x00s.", Corrupt),  # a table in itself
        (b"]\x94]\x94h\x00ah\x01a.", Corrupt),  # in one another
    ],
)
def test_malformed(body: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error):
        read_pickle(PROTO + body)


@pytest.mark.parametrize("start", [b"\x80\x06", b"\x80\x03", b"N", b"\x80"])
def test_other_protocols(start: bytes) -> None:
    with pytest.raises(FormatError):
        read_pickle(start + b"N.")


def test_limits() -> None:
    deep: Any = ()
    for _ in range(MAX_DEPTH - 1):
        deep = (deep,)
    assert read_pickle(pickle.dumps(deep, protocol=5)) == deep
    for value in ((deep,), [deep], {"a": deep}):
        with pytest.raises(LimitExceeded, match="nested"):
            read_pickle(pickle.dumps(value, protocol=5))
    with pytest.raises(LimitExceeded, match="more than 9 opcodes"):
        read_pickle(PROTO + b"(" + b"N" * 10 + b"t.", max_opcodes=9)


@pytest.mark.parametrize("part_count", [2, 30])
def test_shared_parts_count_each_time(part_count: int) -> None:
    """Else a few hundred bytes are 2**30 values to whoever walks or shows them."""
    levels = [b"(" + b"h%c" % level * part_count + b"t\x94" for level in range(MAX_DEPTH - 2)]
    # One value is left: a tuple of what was made on the way.
    data = PROTO + b"()\x94" + b"".join(levels) + b"t."
    for names in (None, MARKERS):
        with pytest.raises(LimitExceeded, match="more than 65536 values"):
            read_pickle(data, globals=names)
    few = PROTO + b"()\x94" + b"".join(levels[:2]) + b"t."
    assert read_pickle(few) == ((), ((),) * part_count, (((),) * part_count,) * part_count)


TEN = b"(" + b"N" * 9 + b"tq\x00"
TABLE = b"ccollections\nOrderedDict\n"
KEY = b"X\x01\x00\x00\x00a"


@pytest.mark.parametrize(
    "body",
    [
        TEN,
        b"](" + b"N" * 9 + b"e",
        b"}(" + b"".join(KEY[:-1] + b"%cN" % n for n in range(97, 102)) + b"u",
        TEN + b"Q",
        TABLE + TEN + b"R",
        TABLE + b")R" + TEN + b"b",
        TABLE + b")R" + KEY + TEN + b"s",
    ],
)
def test_parts_count_in_every_kind_of_value(body: bytes) -> None:
    data = b"\x80\x02" + body + b"q\x01h\x01h\x01\x87."
    assert read_pickle(data, globals=MARKERS, max_opcodes=40)
    with pytest.raises(LimitExceeded, match="more than 29 values"):
        read_pickle(data, globals=MARKERS, max_opcodes=29)


def test_names_and_calls_become_markers() -> None:
    data = (
        b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01X\x01\x00\x00\x00a"
        b"ctorch._utils\n_rebuild\n(X\x01\x00\x00\x00sQK\x05tRq\x02sX\x01\x00\x00\x00bh\x02s"
        b"}X\x01\x00\x00\x00mG?\xf0\x00\x00\x00\x00\x00\x00sb."
    )
    call = Call("rebuild", (PersistentId("s"), 5))
    assert read_pickle(data, globals=MARKERS) == Call(
        "table", (), {"a": call, "b": call}, {"m": 1.0}
    )
    with pytest.raises(Unsupported):
        read_pickle(data)
    with pytest.raises(Unsupported, match=r"names torch\._utils\._rebuild, which is not taken"):
        read_pickle(data, globals={("collections", "OrderedDict"): "table"})


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"cos\nsystem\n.", Unsupported),  # not on the list
        (b"cos\nsystem", Corrupt),  # a name without an end
        (b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93.", Unsupported),
        (b"NN\x93.", Corrupt),  # named by nothing
        (b"N)R.", Unsupported),  # calls a value
        (b"ccollections\nOrderedDict\nNR.", Corrupt),  # without arguments
        (b"}}b.", Corrupt),  # the state of a table
        (b"ccollections\nOrderedDict\n)Rq\x00X\x01\x00\x00\x00ah\x00s.", Corrupt),  # in itself
        (b"ccollections\nOrderedDict\n)R)R.", Unsupported),  # calls what a call gave
        (b"\x82\x01.", Unsupported),  # EXT1
        (b"ios\nsystem\n.", Unsupported),  # INST
    ],
)
def test_markers_let_nothing_else_in(body: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error):
        read_pickle(b"\x80\x02" + body, globals=MARKERS)
