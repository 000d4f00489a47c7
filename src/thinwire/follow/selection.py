"""Which tensors a follower wants."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.codec.plan import SMALL_WORDS
from thinwire.errors import InvalidArgument

# Together; they are kept in the sink's mark.
MAX_PATTERN_BYTES = 1 << 14


class Selection:
    """Shell patterns over tensor names, such as ``model.layers.0.*``; none: everything.

    Attributes:
        patterns: The patterns, sorted.
        is_all: Whether everything is wanted.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        if isinstance(patterns, str) or "" in patterns:
            raise InvalidArgument(
                "tensors is not a list of patterns", hint='Give for example ["model.layers.0.*"]'
            )
        size = sum(len(pattern.encode()) + 4 for pattern in patterns)
        if size > MAX_PATTERN_BYTES:
            raise InvalidArgument(
                f"the patterns of tensors take {size} bytes; the limit is {MAX_PATTERN_BYTES}",
                hint="Use wider patterns",
            )
        self.patterns = sorted(set(patterns))
        self.is_all = not self.patterns

    def wants(self, name: str) -> bool:
        """Whether a tensor is wanted."""
        return self.is_all or any(fnmatchcase(name, pattern) for pattern in self.patterns)


def is_held(name: str, dtype: str, shape: Sequence[int], selection: Selection) -> bool:
    """Whether a follower holds a tensor: it is wanted, or small.

    Small tensors are coded together, so that one cannot be decoded without the others.
    """
    words = byte_count(dtype, shape) // dtype_named(dtype).word_bytes
    return selection.wants(name) or words < SMALL_WORDS
