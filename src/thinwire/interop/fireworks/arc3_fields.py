"""The tables in an arc_v3 payload, asked for one thing at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from thinwire.checkpoint.disk import ByteArray
from thinwire.errors import Corrupt, FormatError, LimitExceeded, Unsupported
from thinwire.interop.fireworks.layout import ITEM_BYTES
from thinwire.interop.foreign import rule_broken

SYSTEM = "Fireworks arc_v3"
Numbers = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Fields(NamedTuple):
    """A table of the payload; what is asked of it must be there, and of that type."""

    table: dict[str, Any]
    where: str

    def number(self, key: str, limit: int) -> int:
        """A count of at most ``limit``; it must be there, as must all that follow."""
        value = self._get(key)
        if type(value) is not int or value < 0:
            raise self.fault(f"its {key} is no count")
        if value > limit:
            raise self.fault(f"its {key} is {value}, beyond {limit}", LimitExceeded)
        return value

    def text(self, key: str) -> str:
        """A text."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self.fault(f"its {key} is no text")
        return value

    def data(self, key: str) -> ByteArray:
        """A run of bytes: a view of the payload."""
        value = self._get(key)
        if not isinstance(value, memoryview):
            raise self.fault(f"its {key} is no run of bytes")
        return np.frombuffer(value, np.uint8)

    def fields(self, key: str) -> Fields:
        """A table in this one."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.fault(f"its {key} is no table")
        return Fields(value, self.where)

    def item_bytes(self, key: str) -> int:
        """How wide the unsigned integers are whose name is there."""
        name = self.text(key)
        if name not in ITEM_BYTES:
            raise self.fault(f"its {key} is {name[:40]!r}, no unsigned integer", Unsupported)
        return ITEM_BYTES[name]

    def numbers(self, count: int) -> Numbers:
        """The ``count`` numbers in ``data``, as they lie there, of the type in ``dtype``."""
        width, data = self.item_bytes("dtype"), self.data("data")
        if data.size != count * width:
            raise self.fault(f"{data.size} bytes of numbers are not {count} of {width} bytes")
        return data.view(f"<u{width}")

    def fault(self, rule: str, error: type[FormatError] = Corrupt) -> FormatError:
        """The error for a payload that breaks a rule of the format."""
        return rule_broken(SYSTEM, rule, file=self.where, error=error)

    def _get(self, key: str) -> Any:
        if key not in self.table:
            raise self.fault(f"it has no {key}")
        return self.table[key]
