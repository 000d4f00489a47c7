"""What ``torch.save`` wrote, read without torch and without anything that could call something.

Such a file is a zip archive of stored members: ``data.pkl`` says what there is, ``data/0`` and so
on hold the bytes of tensors. Only flat integer tensors are taken, which is what NeMo-RL's payloads
have. Members are looked up by name and never become files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.checkpoint.disk import ByteArray
from thinwire.errors import Corrupt, FormatError, Truncated, Unsupported
from thinwire.interop.foreign import check_count, rule_broken
from thinwire.interop.pickles import Call, PersistentId, read_pickle
from thinwire.interop.unpacked import description_limit

MAX_MEMBERS = 1024
"""Members that an archive may have: a payload has one for each width of values."""

MAX_OPCODES = 1 << 22
"""Of the pickle: a changed tensor takes about thirty. Each takes up to 140 bytes of memory."""

SMALL_OPCODES = 1 << 16
"""How many there may be however small the file is."""

_OPCODES_PER_BYTE = 6  # Tensors with one change each, all alike but for their names, come to 4.

_PIECE_BYTES = 16 << 20
_STORED = 0
_ENCRYPTED_FLAG = 1
_END = struct.Struct("<4s4H2IH")
_WIDE_LOCATOR = struct.Struct("<4sIQI")
_WIDE_END = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_EXTRA = struct.Struct("<2H")
_WIDE_FIELD = 1
_IS_WIDE = 0xFFFFFFFF
_REBUILD, _NO_HOOKS = "a tensor", "no hooks"
# The storages of flat integers, by the element that torch has in them.
_STORAGES = {
    "ByteStorage": np.dtype("u1"),
    "ShortStorage": np.dtype("<i2"),
    "IntStorage": np.dtype("<i4"),
    "LongStorage": np.dtype("<i8"),
}
_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _REBUILD,
    ("collections", "OrderedDict"): _NO_HOOKS,
    **{("torch", name): kind for name, kind in _STORAGES.items()},
}


class Member(NamedTuple):
    """One member of an archive, as its directory has it."""

    name: str
    header_start: int
    size_bytes: int
    checksum: int


class TorchFile:
    """An opened archive; its arrays are views of ``data``.

    Args:
        system: Whose file it is, for messages.
        file: Where it lies.
        data: All of its bytes.
        packed_bytes: How many bytes were sent for it, which bounds what it may ask for.

    Raises:
        FormatError: It is no such archive, or a member is not what its checksum says.
    """

    def __init__(self, system: str, file: object, data: ByteArray, packed_bytes: int) -> None:
        self._system = system
        self._file = file
        self._data = data
        self._max_description_bytes = description_limit(packed_bytes)
        self._max_opcodes = min(MAX_OPCODES, SMALL_OPCODES + _OPCODES_PER_BYTE * packed_bytes)
        self._members = self._read_members()
        folders = {name.partition("/")[0] for name in self._members}
        if len(folders) != 1:
            raise self._fault("its members do not lie in one folder")
        self._folder = folders.pop()
        if self._text("version", "") != "3" or self._text("byteorder", "little") != "little":
            raise self._fault("it is not of version 3 and little-endian", Unsupported)

    def value(self) -> Any:
        """What was saved: tuples, lists, tables and numbers, tensors as calls; see :meth:`array`.

        Raises:
            FormatError: The pickle holds anything else.
        """
        pickled = self._member("data.pkl")
        limit = self._max_description_bytes
        check_count(self._system, "bytes of pickle", pickled.size, limit, self._file)
        what = f"{self._file}: data.pkl ({self._system} format)"
        return read_pickle(pickled.data, what=what, globals=_GLOBALS, max_opcodes=self._max_opcodes)

    def array(self, saved: Any) -> npt.NDArray[Any]:
        """The elements of a flat tensor that :meth:`value` has.

        Raises:
            FormatError: It is no such tensor, or not inside of its storage.
        """
        match saved:
            case Call(
                target=target,
                args=(
                    PersistentId(identity=("storage", np.dtype() as kind, str(key), "cpu", count)),
                    start,
                    (size,),
                    (stride,),
                    False,
                    Call(target=hooks, args=()),
                ),
                state=None,
            ) if target is _REBUILD and hooks is _NO_HOOKS:
                pass
            case _:
                raise self._fault("it holds a tensor that is not a flat one of integers on the CPU")
        if not all(type(number) is int and number >= 0 for number in (count, start, size)):
            raise self._fault("a tensor's sizes are malformed")
        if stride != 1 and size > 1:
            raise self._fault("a tensor's elements do not lie side by side", Unsupported)
        storage = self._member(f"data/{key}")
        if storage.size != count * kind.itemsize or start + size > count:
            raise self._fault(f"a tensor of {size} elements is not inside of its storage")
        if size == 0:
            return np.empty(0, kind)
        return storage[start * kind.itemsize : (start + size) * kind.itemsize].view(kind)

    def _text(self, name: str, otherwise: str) -> str:
        if f"{self._folder}/{name}" not in self._members:
            return otherwise
        return self._member(name)[:16].tobytes().decode("latin-1").strip()

    def _member(self, name: str) -> ByteArray:
        member = self._members.get(f"{self._folder}/{name}")
        if member is None:
            raise self._fault(f"it has no member {name[:80]!r}")
        return self._bytes_of(member)

    def _read_members(self) -> Mapping[str, Member]:
        start, stop, count = self._find_directory()
        check_count(self._system, "members", count, MAX_MEMBERS, self._file)
        limit = self._max_description_bytes
        check_count(self._system, "bytes of directory", stop - start, limit, self._file)
        directory = self._data[start:stop].tobytes()
        members: dict[str, Member] = {}
        at = 0
        for _ in range(count):
            member, at = self._read_entry(directory, at)
            if member.name in members:
                raise self._fault(f"it has two members {member.name[:80]!r}")
            members[member.name] = member
        if at != len(directory):
            raise self._fault("its directory is longer than its members are many")
        last = 0
        for member in sorted(members.values(), key=lambda member: member.header_start):
            data = self._bytes_of(member)
            if member.header_start < last:
                raise self._fault(f"its member {member.name[:80]!r} overlaps another one")
            last = self._data_start(member) + data.size
            checksum = 0
            for piece in range(0, data.size, _PIECE_BYTES):
                checksum = zlib.crc32(data[piece : piece + _PIECE_BYTES].data, checksum)
            if checksum != member.checksum:
                raise self._fault(f"its member {member.name[:80]!r} is not what its CRC-32 says")
        if last > start:
            raise self._fault("its members overlap its directory")
        return members

    def _find_directory(self) -> tuple[int, int, int]:
        """Where the directory lies, and how many members it has: from the end of the file."""
        end = self._data.size - _END.size
        mark, disk, _, _, count, size_bytes, start, comment = self._unpack(_END, end)
        if mark != b"PK\x05\x06" or disk or comment:
            raise self._fault("it does not end as a zip archive of torch's does")
        at = end - _WIDE_LOCATOR.size
        if at >= 0 and bytes(self._data[at : at + 4]) == b"PK\x06\x07":
            _, _, wide, _ = self._unpack(_WIDE_LOCATOR, at)
            fields = self._unpack(_WIDE_END, wide)
            if fields[0] != b"PK\x06\x06" or wide + _WIDE_END.size != at:
                raise self._fault("its end is malformed")
            count, size_bytes, start = fields[7], fields[8], fields[9]
            end = wide
        if start + size_bytes != end:
            raise self._fault("its directory is not where its end says")
        return start, end, count

    def _read_entry(self, directory: bytes, at: int) -> tuple[Member, int]:
        if at + _ENTRY.size > len(directory):
            raise self._fault("its directory ends too early", Truncated)
        fields = _ENTRY.unpack_from(directory, at)
        mark, flags, method, checksum = fields[0], fields[3], fields[4], fields[7]
        packed_bytes, size_bytes, name_bytes, extra_bytes, comment_bytes = fields[8:13]
        header_start = fields[16]
        name_start = at + _ENTRY.size
        extra_start = name_start + name_bytes
        stop = extra_start + extra_bytes + comment_bytes
        if mark != b"PK\x01\x02" or stop > len(directory):
            raise self._fault("its directory is malformed")
        if method != _STORED or flags & _ENCRYPTED_FLAG:
            raise self._fault("a member is packed or encrypted", Unsupported)
        try:
            name = directory[name_start:extra_start].decode()
        except UnicodeDecodeError:
            raise self._fault("a member's name is not UTF-8") from None
        extra = directory[extra_start : extra_start + extra_bytes]
        numbers = self._widened(extra, [size_bytes, packed_bytes, header_start])
        if numbers[0] != numbers[1]:
            raise self._fault(f"the sizes of its member {name[:80]!r} differ")
        return Member(name, numbers[2], numbers[0], checksum), stop

    def _widened(self, extra: bytes, numbers: list[int]) -> list[int]:
        """The numbers, those that need more than 32 bits from the extra field."""
        wide = b""
        at = 0
        while at + _EXTRA.size <= len(extra):
            kind, size_bytes = _EXTRA.unpack_from(extra, at)
            at += _EXTRA.size
            if kind == _WIDE_FIELD:
                wide = extra[at : at + size_bytes]
            at += size_bytes
        result = []
        for number in numbers:
            if number == _IS_WIDE:
                if len(wide) < 8:
                    raise self._fault("a member's size is missing")
                number, wide = int.from_bytes(wide[:8], "little"), wide[8:]
            result.append(number)
        return result

    def _data_start(self, member: Member) -> int:
        fields = self._unpack(_LOCAL, member.header_start)
        name_start = member.header_start + _LOCAL.size
        name = self._data[name_start : name_start + fields[9]].tobytes()
        if fields[0] != b"PK\x03\x04" or name != member.name.encode():
            raise self._fault(f"its member {member.name[:80]!r} is not where the directory says")
        return name_start + int(fields[9]) + int(fields[10])

    def _bytes_of(self, member: Member) -> ByteArray:
        start = self._data_start(member)
        stop = start + member.size_bytes
        if stop > self._data.size:
            raise self._fault(f"its member {member.name[:80]!r} ends too early", Truncated)
        return self._data[start:stop]

    def _unpack(self, form: struct.Struct, at: int) -> tuple[Any, ...]:
        if at < 0 or at + form.size > self._data.size:
            raise self._fault("it ends too early, or points outside of itself", Truncated)
        return form.unpack(self._data[at : at + form.size].tobytes())

    def _fault(self, rule: str, error: type[FormatError] = Corrupt) -> FormatError:
        return rule_broken(self._system, rule, file=self._file, error=error)
