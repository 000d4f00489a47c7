"""Target `pickles`: the reader of pickles that calls nothing, alone."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzz.interop_bundle import check_error
from fuzz.interop_mutate import ODD_VALUES
from fuzz.interop_opcodes import GLOBALS, Global, emit_pickle, mutate_pickle, thaw
from fuzz.interop_watch import executed, watched
from fuzz.target import Target, require
from thinwire.errors import FormatError, ThinwireError
from thinwire.interop.fireworks.pickle_write import write_pickle
from thinwire.interop.pickles import Call, PersistentId, read_pickle

# No file is anything to this reader.
_NO_ROOM = Path("/thinwire-fuzz-no-room")


class _Refusing(pickle.Unpickler):
    """Python's own reader, where nothing can be named."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}")

    def persistent_load(self, identity: Any) -> Any:
        raise pickle.UnpicklingError("refers to something")


def _run(data: bytes) -> None:
    plain = _read(data, None)
    _read(data, GLOBALS)
    if plain is None:
        return
    _check_plain(plain)
    try:
        real = _Refusing(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, *ODD_VALUES, EOFError):
        return
    require(repr(real) == repr(thaw(plain)), "another value than Python's own reader has")


def _read(data: bytes, globals: dict[tuple[str, str], Global] | None) -> Any:
    try:
        with watched(_NO_ROOM, _NO_ROOM):
            return read_pickle(data, globals=globals)
    except FormatError as error:
        check_error(error)
        return None
    except ThinwireError as error:
        require(False, f"no error of a format: {error!r}")


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            require(type(key) in (str, int), f"a key is {type(key)}")
            _check_plain(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_plain(part)
    else:
        plain = (str, int, bool, type(None), memoryview)
        require(type(value) in plain, f"a value is {type(value)}")


def _mutate(data: bytes, random: Random) -> bytes:
    return mutate_pickle(data, random, random.choice([GLOBALS, None]))


def _seeds() -> dict[str, bytes]:
    plain: Any = {
        "version": 1,
        "shape": (12, 25),
        "data": bytes(range(40)),
        "numbers": [0, -1, 255, 65535, 2**31 - 1, -(2**31), 2**63, 2**100, None, True, False],
        "nested": {"a": {"b": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], "c": ""}},
        "again": ["é", "é", b"", b"x" * 300],
    }
    storage = ("storage", GLOBALS["torch", "ShortStorage"], "0", "cpu", 4)
    hooks = Call(GLOBALS["collections", "OrderedDict"], ())
    args = (PersistentId(storage), 0, (4,), (1,), False, hooks)
    tensor = Call(GLOBALS["torch._utils", "_rebuild_tensor_v2"], args)
    writers: dict[str, Callable[[Any], bytes]] = {
        "protocol-5": lambda value: pickle.dumps(value, protocol=5),
        "protocol-4": lambda value: pickle.dumps(value, protocol=4),
        "plain": emit_pickle,
    }
    seeds = {name: write(plain) for name, write in writers.items()}
    # Protocol 2 has no bytes.
    seeds["protocol-2"] = pickle.dumps(plain["nested"] | {"n": plain["numbers"]}, protocol=2)
    ours = {"codec": "zstd", "shape": (1, 2), "n": 2**40, "data": b"abc", "more": {"x": b""}}
    planted = _Planted()
    return seeds | {
        "ours": write_pickle(ours),
        "torch": emit_pickle((tensor, (tensor,), [{"name": "w", "x": 1.5}])),
        "planted": pickle.dumps({"codec": planted}, protocol=4),
        "planted-2": pickle.dumps([planted], protocol=2),
    }


class _Planted:
    """Asks to be called where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return executed, ("planted",)


PICKLES = Target("pickles", _run, _mutate, _seeds)
