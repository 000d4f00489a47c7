"""A large zstd frame, unpacked into an unnamed file through which it is mapped.

A frame of a few kilobytes may claim to hold terabytes. Nothing is written beyond what the caller
allows, and memory holds one piece at a time.
"""

from __future__ import annotations

import sys
from tempfile import gettempdir
from typing import Any

from thinwire.checkpoint.disk import ByteArray
from thinwire.codec.zstd import WINDOW_LOG_MAX
from thinwire.errors import Corrupt, FormatError, LimitExceeded, Truncated
from thinwire.interop.foreign import MAX_DESCRIPTION_BYTES, rule_broken
from thinwire.interop.payload_files import check_window
from thinwire.interop.unnamed import map_written, unnamed_file

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_EXPANSION = 64
"""How many times its own size a frame may hold where nothing else bounds it: more than any delta
of real weights, whose new bits hardly repeat."""

SMALL_BYTES = 64 << 20
"""What a frame may hold however small it is."""

SMALL_DESCRIPTION_BYTES = 1 << 20
"""How long a description may be however small its frame is."""

MAX_DESCRIPTION_EXPANSION = 32
"""How many times the bytes of its frame a longer one may have. That of 20,000 tensors that are all
alike but for their names packs to a fifteenth, and the changes that it describes come on top."""

_PIECE_BYTES = 1 << 20


def expansion_limit(frame_bytes: int) -> int:
    """What a frame may hold where its size is all that is known."""
    return max(SMALL_BYTES, MAX_EXPANSION * frame_bytes)


def description_limit(frame_bytes: int) -> int:
    """How long a description inside of a frame may be, which is parsed before anything else is.

    What it becomes takes up to thirty times its bytes of memory; a small file may not ask for that.
    """
    return min(
        MAX_DESCRIPTION_BYTES, SMALL_DESCRIPTION_BYTES + MAX_DESCRIPTION_EXPANSION * frame_bytes
    )


class FrameReader:
    """The bytes in one zstd frame, from its beginning; ``frame`` stays mapped.

    Args:
        system: Whose frame it is, for messages.
        file: Where it lies.
        frame: All of its bytes: nothing may follow it.
    """

    def __init__(self, system: str, file: object, frame: ByteArray) -> None:
        self._system = system
        self._file = file
        self._frame = frame
        self._at = 0
        self._unpacker: Any = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX}
        )

    def read(self, size_bytes: int) -> bytes:
        """The next bytes: ``size_bytes`` of them, fewer only where the frame ends.

        Raises:
            Corrupt: It is no valid frame, or other bytes follow it.
            Truncated: It has no end.
            LimitExceeded: It needs more memory than any frame up to zstd's level 19.
        """
        pieces = []
        while size_bytes and (piece := self._piece(size_bytes)):
            pieces.append(piece)
            size_bytes -= len(piece)
        return b"".join(pieces)

    def unpack(self, limit_bytes: int) -> ByteArray:
        """All that is left, mapped from an unnamed file, read-only.

        Raises:
            LimitExceeded: It is more than ``limit_bytes``; no more than that was written.
            FormatError: As :meth:`read`.
            StoreError: The disk is full.
        """
        with unnamed_file(gettempdir()) as spool:
            size_bytes = 0
            while piece := self._piece(_PIECE_BYTES):
                size_bytes += len(piece)
                if size_bytes > limit_bytes:
                    raise LimitExceeded(
                        f"{self._file}: it unpacks to more than {limit_bytes} bytes"
                        f" ({self._system} format)",
                        hint="Check that this is the file that you meant",
                        file=str(self._file),
                        limit=limit_bytes,
                    )
                spool.write(piece)
            return map_written(spool)

    def _piece(self, size_bytes: int) -> bytes:
        """Some of the next bytes; none only at the end of the frame."""
        unpacker = self._unpacker
        while not unpacker.eof:
            given = b""
            if unpacker.needs_input:
                given = self._frame[self._at : self._at + _PIECE_BYTES].tobytes()
                self._at += len(given)
                if not given:
                    raise self._fault("the zstd frame has no end", Truncated)
            try:
                piece = bytes(unpacker.decompress(given, max_length=size_bytes))
            except zstd.ZstdError as error:
                check_window(self._system, self._file, self._frame)
                raise self._fault(f"it is no valid zstd frame: {error}") from None
            if piece:
                return piece
        if unpacker.unused_data or self._at < self._frame.size:
            raise self._fault("other bytes follow the zstd frame")
        return b""

    def _fault(self, rule: str, error: type[FormatError] = Corrupt) -> FormatError:
        return rule_broken(self._system, rule, file=self._file, error=error)
