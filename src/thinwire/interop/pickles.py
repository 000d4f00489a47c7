"""Pickles read without anything that could call something.

The reader knows the opcodes that build plain values: tables, lists, tuples, text, bytes, whole
numbers. Every other opcode is refused by its name. Given an allow-list of global names it also
takes the opcodes of a torch checkpoint's ``data.pkl``; a name then stands for an inert marker of
the caller's, and what the pickle would have called is handed back as a ``Call`` that says so.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from thinwire.errors import Corrupt, FormatError, LimitExceeded, Truncated, Unsupported

Plain: TypeAlias = Any
"""What a pickle holds: dict, list, tuple, str, int, bool, None, and bytes as ``memoryview``.

With an allow-list also float, markers, ``Call`` and ``PersistentId``.
"""

MAX_OPCODES = 1 << 16
MAX_DEPTH = 32
MAX_INT_BYTES = 16

_NAMES = {op.code.encode("latin-1")[0]: op.name for op in pickletools.opcodes}
_HINT = "Fetch it again; if it stays so, it was not written by the system that it names"
# Protocols that have the opcodes taken here; the older ones come with an allow-list only.
_PLAIN_PROTOCOLS = (4, 5)
_MARKED_PROTOCOLS = (2, 3, 4, 5)


@dataclass
class Call:
    """What a pickle asks to be called; nothing was.

    Attributes:
        target: The caller's marker for the function.
        args: Its arguments.
        items: What the pickle would have put into the result by key.
        state: What the pickle would have set the result's state to.
    """

    target: Any
    args: tuple[Plain, ...]
    items: dict[str, Plain] = field(default_factory=dict)
    state: Plain = None


@dataclass(frozen=True)
class PersistentId:
    """What a pickle refers to outside of itself, by an identity of its writer's."""

    identity: Plain


class _Held:
    """A value on the stack or in the memo, how deep it goes, and of how many values it consists.

    Shared parts count each time, as whoever walks or shows the value comes by them each time.
    Fetched from the memo it is ``is_shared``, and nothing more may go into it: so no value can hold
    itself.
    """

    __slots__ = ("depth", "is_shared", "value", "value_count")

    def __init__(self, value: Plain, depth: int = 0, value_count: int = 1) -> None:
        self.value = value
        self.depth = depth
        self.value_count = value_count
        self.is_shared = False


def read_pickle(
    data: bytes | memoryview,
    *,
    what: str = "the pickle",
    globals: Mapping[tuple[str, str], Any] | None = None,
    max_opcodes: int = MAX_OPCODES,
) -> Plain:
    """The value in a pickle; bytes in it are views of ``data``.

    Args:
        data: The whole pickle: nothing may follow it.
        what: Its name for messages.
        globals: Markers by module and name. None: the opcodes that name or call anything are
            refused, whatever they name.
        max_opcodes: How many opcodes it may have, and of how many values it may consist where
            shared ones count each time.

    Raises:
        Unsupported: An opcode or a global name that is not taken.
        Truncated: It ends too early.
        Corrupt: It contradicts itself.
        LimitExceeded: More than ``max_opcodes`` opcodes or values, values nested beyond
            ``MAX_DEPTH``, or a whole number of more than ``MAX_INT_BYTES`` bytes.
    """
    return _Reader(memoryview(data).cast("B"), what, globals, max_opcodes).read()


class _Reader:
    """One pass over the opcodes of one pickle."""

    def __init__(
        self,
        data: memoryview,
        what: str,
        globals: Mapping[tuple[str, str], Any] | None,
        max_opcodes: int,
    ) -> None:
        self._data = data
        self._what = what
        self._globals = globals
        self._max_opcodes = max_opcodes
        self._at = 0
        self._stack: list[_Held] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Held] = {}

    def read(self) -> Plain:
        """See :func:`read_pickle`."""
        actions = _PLAIN_ACTIONS if self._globals is None else _MARKED_ACTIONS
        self._protocol()
        for _ in range(self._max_opcodes):
            code = self._number(1)
            if code == _STOP:
                return self._result()
            action = actions.get(code)
            if action is None:
                name = _NAMES.get(code, f"0x{code:02x}")
                raise self._fault(f"has the opcode {name}, which is not taken", Unsupported)
            action(self)
        raise self._fault(f"has more than {self._max_opcodes} opcodes", LimitExceeded)

    def _protocol(self) -> None:
        if self._number(1) != _PROTO:
            raise self._fault("does not begin with its protocol")
        protocol = self._number(1)
        taken = _PLAIN_PROTOCOLS if self._globals is None else _MARKED_PROTOCOLS
        if protocol not in taken:
            raise self._fault(f"has the protocol {protocol}, which is not taken", Unsupported)

    def _result(self) -> Plain:
        if len(self._stack) != 1 or self._marks:
            raise self._fault("does not end with one value")
        if self._at != len(self._data):
            raise self._fault(f"is followed by {len(self._data) - self._at} other bytes")
        return self._stack[0].value

    # What the opcodes take from the data.

    def _take(self, size_bytes: int) -> memoryview:
        stop = self._at + size_bytes
        if stop > len(self._data):
            raise self._fault(f"ends where {size_bytes} bytes are needed", Truncated)
        taken = self._data[self._at : stop]
        self._at = stop
        return taken

    def _number(self, size_bytes: int) -> int:
        return int.from_bytes(self._take(size_bytes), "little")

    def _text(self, size_bytes: int) -> str:
        try:
            return str(self._take(size_bytes), "utf-8")
        except UnicodeDecodeError:
            raise self._fault("holds text that is not UTF-8") from None

    def _line(self) -> str:
        # A view has no find(); names are short, so neither is looked for far.
        piece = bytes(self._data[self._at : self._at + _MAX_NAME_BYTES])
        stop = piece.find(b"\n")
        if stop < 0:
            raise self._fault("holds a name without an end")
        name = self._text(stop)
        self._at += 1
        return name

    # What the opcodes do to the stack.

    def _push(self, value: Plain, depth: int = 0, value_count: int = 1) -> None:
        self._check_extent(depth, value_count)
        self._stack.append(_Held(value, depth, value_count))

    def _check_extent(self, depth: int, value_count: int) -> None:
        if depth > MAX_DEPTH:
            raise self._fault(f"is nested beyond {MAX_DEPTH} levels", LimitExceeded)
        if value_count > self._max_opcodes:
            rule = f"consists of more than {self._max_opcodes} values, with shared ones each time"
            raise self._fault(rule, LimitExceeded)

    def _pop(self) -> _Held:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise self._fault("takes a value that is not there")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[_Held]:
        if not self._marks:
            raise self._fault("takes a mark that is not there")
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _push_tuple(self, parts: list[_Held]) -> None:
        depth = 1 + max((part.depth for part in parts), default=0)
        value_count = 1 + sum(part.value_count for part in parts)
        self._push(tuple(part.value for part in parts), depth, value_count)

    def _set_items(self, parts: list[_Held]) -> None:
        target = self._open_target(parts)
        held = target.value.items if isinstance(target.value, Call) else target.value
        if not isinstance(held, dict) or len(parts) % 2:
            raise self._fault("sets items where there is no table, or half an item")
        for key, part in zip(parts[::2], parts[1::2], strict=True):
            # Whole numbers can be chosen so that their hashes are one: a table of them takes
            # quadratic time. No system here has them as keys.
            if type(key.value) is not str:
                raise self._fault("has a key that is no text")
            if key.value in held:
                raise self._fault(f"has the key {key.value[:80]!r} twice")
            held[key.value] = part.value

    def _append_items(self, parts: list[_Held]) -> None:
        target = self._open_target(parts)
        if not isinstance(target.value, list):
            raise self._fault("appends where there is no list")
        target.value.extend(part.value for part in parts)

    def _open_target(self, parts: list[_Held]) -> _Held:
        """The value on top, into which ``parts`` go."""
        target = self._pop()
        self._stack.append(target)
        if target.is_shared:
            raise self._fault("changes a value that it has used already")
        target.depth = max([target.depth, *(1 + part.depth for part in parts)])
        target.value_count += sum(part.value_count for part in parts)
        self._check_extent(target.depth, target.value_count)
        return target

    def _remember(self, number: int) -> None:
        held = self._pop()
        self._stack.append(held)
        self._memo[number] = held

    def _recall(self, number: int) -> None:
        held = self._memo.get(number)
        if held is None:
            raise self._fault("recalls a value that it never kept")
        held.is_shared = True
        self._stack.append(held)

    def _push_long(self) -> None:
        size_bytes = self._number(1)
        if size_bytes > MAX_INT_BYTES:
            raise self._fault(f"has a whole number of {size_bytes} bytes", LimitExceeded)
        self._push(int.from_bytes(self._take(size_bytes), "little", signed=True))

    # What only a caller with an allow-list gets: names and calls, as markers.

    def _push_global(self, module: Plain, name: Plain) -> None:
        assert self._globals is not None
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._fault("names a global by something that is no text")
        if (module, name) not in self._globals:
            raise self._fault(f"names {module[:80]}.{name[:80]}, which is not taken", Unsupported)
        self._push(self._globals[module, name])

    def _push_stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._push_global(module.value, name.value)

    def _push_call(self) -> None:
        args, target = self._pop(), self._pop()
        assert self._globals is not None
        if not isinstance(args.value, tuple):
            raise self._fault("calls something without a tuple of arguments")
        if not any(target.value is marker for marker in self._globals.values()):
            raise self._fault("calls something that is not one of the names taken", Unsupported)
        self._push(Call(target.value, args.value), 1 + args.depth, 1 + args.value_count)

    def _set_state(self) -> None:
        state = self._pop()
        target = self._open_target([state])
        if not isinstance(target.value, Call):
            raise self._fault("sets the state of something that has none")
        target.value.state = state.value

    def _push_persistent(self) -> None:
        identity = self._pop()
        self._push(PersistentId(identity.value), 1 + identity.depth, 1 + identity.value_count)

    def _fault(self, reason: str, error: type[FormatError] = Corrupt) -> FormatError:
        message = f"{self._what} {reason} (at byte {self._at})"
        return error(message, hint=_HINT, what=self._what, at=self._at)


_Action: TypeAlias = Callable[[_Reader], None]
_MAX_NAME_BYTES = 512
_PROTO, _STOP = 0x80, 0x2E


def _actions_by_code(actions: Mapping[str, _Action]) -> dict[int, _Action]:
    codes = {name: code for code, name in _NAMES.items()}
    return {codes[name]: action for name, action in actions.items()}


def _skip_frame(reader: _Reader) -> None:
    size_bytes = reader._number(8)
    if size_bytes > len(reader._data) - reader._at:
        raise reader._fault(f"ends inside a frame of {size_bytes} bytes", Truncated)


_PLAIN_ACTIONS = _actions_by_code(
    {
        "FRAME": _skip_frame,
        "MARK": lambda r: r._marks.append(len(r._stack)),
        "MEMOIZE": lambda r: r._remember(len(r._memo)),
        "BINGET": lambda r: r._recall(r._number(1)),
        "LONG_BINGET": lambda r: r._recall(r._number(4)),
        "NONE": lambda r: r._push(None),
        "NEWTRUE": lambda r: r._push(True),
        "NEWFALSE": lambda r: r._push(False),
        "BININT": lambda r: r._push(int.from_bytes(r._take(4), "little", signed=True)),
        "BININT1": lambda r: r._push(r._number(1)),
        "BININT2": lambda r: r._push(r._number(2)),
        "LONG1": _Reader._push_long,
        "SHORT_BINUNICODE": lambda r: r._push(r._text(r._number(1))),
        "BINUNICODE": lambda r: r._push(r._text(r._number(4))),
        "SHORT_BINBYTES": lambda r: r._push(r._take(r._number(1))),
        "BINBYTES": lambda r: r._push(r._take(r._number(4))),
        "BINBYTES8": lambda r: r._push(r._take(r._number(8))),
        "EMPTY_DICT": lambda r: r._push({}, 1),
        "EMPTY_LIST": lambda r: r._push([], 1),
        "EMPTY_TUPLE": lambda r: r._push_tuple([]),
        "TUPLE1": lambda r: r._push_tuple([r._pop()]),
        "TUPLE2": lambda r: r._push_tuple([r._pop(), r._pop()][::-1]),
        "TUPLE3": lambda r: r._push_tuple([r._pop(), r._pop(), r._pop()][::-1]),
        "TUPLE": lambda r: r._push_tuple(r._pop_to_mark()),
        "SETITEM": lambda r: r._set_items([r._pop(), r._pop()][::-1]),
        "SETITEMS": lambda r: r._set_items(r._pop_to_mark()),
        "APPEND": lambda r: r._append_items([r._pop()]),
        "APPENDS": lambda r: r._append_items(r._pop_to_mark()),
    }
)
_MARKED_ACTIONS = _PLAIN_ACTIONS | _actions_by_code(
    {
        "BINPUT": lambda r: r._remember(r._number(1)),
        "LONG_BINPUT": lambda r: r._remember(r._number(4)),
        "BINFLOAT": lambda r: r._push(struct.unpack(">d", r._take(8))[0]),
        "GLOBAL": lambda r: r._push_global(r._line(), r._line()),
        "STACK_GLOBAL": _Reader._push_stack_global,
        "REDUCE": _Reader._push_call,
        "BUILD": _Reader._set_state,
        "BINPERSID": _Reader._push_persistent,
    }
)
