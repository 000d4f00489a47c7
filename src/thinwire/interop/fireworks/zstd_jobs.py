"""zstd as Fireworks' package runs it: with worker threads, in jobs, which cut blocks elsewhere.

Where more than a few bytes changed, that is a little larger or smaller than without. To take a
compressor's memory anew costs as much as its work, so compressors are kept; but each owns a thread,
which a forked process would not have and would wait for. So they are let go before every fork.
"""

from __future__ import annotations

import os
import sys
import threading

from thinwire.codec.threads import MAX_DEFAULT_WORKERS
from thinwire.codec.zstd import compress

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_JOB_BYTES = 512 << 10
"""Up to this size the package's zstd takes one job, and that is as without threads."""

# Of two levels, one for each thread that codes.
_MAX_KEPT = 2 * MAX_DEFAULT_WORKERS
_PARAMETERS = zstd.CompressionParameter
# A libzstd may be built without threads.
_HAS_WORKERS = _PARAMETERS.nb_workers.bounds()[1] > 0


class _Kept:
    """Compressors that nobody uses now, by their level; none while a process is being forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[int, zstd.ZstdCompressor]] = []
        os.register_at_fork(
            before=self._let_go,
            after_in_parent=self._lock.release,
            after_in_child=self._lock.release,
        )

    def take(self, level: int) -> zstd.ZstdCompressor:
        with self._lock:
            for place, (held_level, compressor) in enumerate(self._idle):
                if held_level == level:
                    del self._idle[place]
                    return compressor
        # One worker makes the bytes of any number of them.
        options: dict[int, int] = {_PARAMETERS.compression_level: level, _PARAMETERS.nb_workers: 1}
        return zstd.ZstdCompressor(options=options)

    def put_back(self, level: int, compressor: zstd.ZstdCompressor) -> None:
        with self._lock:
            if len(self._idle) < _MAX_KEPT:
                self._idle.append((level, compressor))

    def _let_go(self) -> None:
        # Held until the fork is done: what other threads use stays out, and is theirs.
        self._lock.acquire()
        self._idle.clear()


_kept = _Kept()


def compress_as_package(data: bytes | memoryview, level: int) -> bytes:
    """One zstd frame, byte for byte the package's where its zstd is of this release."""
    if len(data) <= _JOB_BYTES or not _HAS_WORKERS:
        return compress(data, level)
    compressor = _kept.take(level)
    packed = bytes(compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME))
    # Only once it is done: one that failed half-way is not used again.
    _kept.put_back(level, compressor)
    return packed
