"""What every writer of another system's deltas does: asks whether the format can carry a change,
and codes it tensor after tensor, on several threads.

What is written is the same for any number of threads, byte for byte. However many there are, what
is in work, or coded and waiting for its turn, takes about ``MEMORY_BYTES`` at most: the bytes of
its tensors, times what a format takes for each where every word changed. What takes more is in work
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from thinwire.checkpoint.disk import ByteArray, map_file
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.dtypes import byte_count
from thinwire.codec.write import Pair
from thinwire.errors import InvalidArgument, TensorMismatch, Unsupported
from thinwire.interop.change import Change
from thinwire.interop.unnamed import map_written, unnamed_file

MEMORY_BYTES = 4 << 30
"""How much memory may be taken by what is in work at once."""

# Of a tensor that is decoded.
_READ_TIMES = 8

_SHOWN_CHARS = 200
_NO_BYTES = np.empty(0, np.uint8)

_T = TypeVar("_T")


def require_consecutive(system: str, version: int, base_version: int) -> None:
    """Refuse to write a delta that leaves versions out: receivers take one after the other.

    Raises:
        InvalidArgument: A number is negative.
        Unsupported: ``version`` is not the one after ``base_version``.
    """
    if base_version < 0:
        raise InvalidArgument(f"the base's version is {base_version}", hint="Give 0 or more")
    if version != base_version + 1:
        raise Unsupported(
            f"no delta from version {base_version} to {version}: receivers of the {system} format"
            " go from each version to the very next",
            hint="Write the versions between, or full weights",
            version=version,
            base_version=base_version,
        )


def refuse_other_changes(system: str, change: Change) -> None:
    """Refuse what a delta of tensors cannot carry: another config or tokenizer.

    The free-form metadata of weights files does not count: trainers write their step there.

    Raises:
        Unsupported: One differs; the message names it.
        StoreError: A file cannot be read.
    """
    base, names = change.base, set(change.file_names) - {INDEX_NAME}
    for name in sorted(names ^ (base.files.keys() - {INDEX_NAME})):
        raise _not_carried(system, f"the file {name[:_SHOWN_CHARS]!r} came or went", name)
    for name in sorted(names):
        if change.read_file(name) != map_file(base.files[name]).data:
            raise _not_carried(system, f"the file {name[:_SHOWN_CHARS]!r} changed", name)


def _not_carried(system: str, what: str, name: str) -> Unsupported:
    return Unsupported(
        f"{what}: deltas of the {system} format carry tensors alone",
        hint="Write full weights for this version",
        file=name,
    )


def code_tensors(
    change: Change,
    names: Sequence[str],
    code: Callable[[str], _T],
    workers: int,
    *,
    memory_times: int,
) -> Iterator[_T]:
    """What ``code`` makes of each tensor's name, in order, on ``workers`` threads.

    Args:
        change: Whose tensors they are.
        names: Theirs.
        code: Called for each.
        workers: Threads.
        memory_times: How many bytes of memory that takes for each byte of a tensor, at most.

    Raises:
        InvalidArgument: ``workers`` is below 1.
        ThinwireError: What ``code`` raises: of several the one of the first tensor.
    """
    if workers < 1:
        raise InvalidArgument(f"workers is {workers}", hint="Choose 1 or more")
    if workers == 1:
        yield from map(code, names)
        return
    waiting: deque[tuple[int, Future[_T]]] = deque()
    ahead_bytes = 0
    with ThreadPoolExecutor(workers, "thinwire-code") as pool:
        try:
            for name in names:
                old = change.base.tensors.get(name)
                size = 0 if old is None else memory_times * old.data.size
                is_over = ahead_bytes + size > MEMORY_BYTES
                while waiting and (len(waiting) >= 2 * workers or is_over):
                    done_bytes, future = waiting.popleft()
                    yield future.result()
                    ahead_bytes -= done_bytes
                    is_over = ahead_bytes + size > MEMORY_BYTES
                waiting.append((size, pool.submit(code, name)))
                ahead_bytes += size
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            for _, future in waiting:
                future.cancel()


def code_changes(
    change: Change,
    code: Callable[[str, StoredTensor, StoredTensor], _T],
    workers: int,
    *,
    memory_times: int,
) -> Iterator[tuple[str, _T]]:
    """Name, and what ``code`` makes of base and new tensor, of each tensor whose bits differ.

    They come in the order of the layout. For formats that know tensors by name alone: which must
    be the same on both sides.

    Raises:
        TensorMismatch: Tensors came or went, or changed dtype or shape.
        ThinwireError: As :func:`code_tensors`.
    """
    names = [name for names in change.layout.values() for name in names]
    odd = [name for name in names if name not in change.base.tensors]
    odd += sorted(change.base.tensors.keys() - set(names))
    if odd:
        raise _other_layout(odd[0], "came or went")

    def code_one(name: str) -> tuple[str, _T] | None:
        old, new = change.base.tensors[name], change.new_tensor(name)
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise _other_layout(name, "changed dtype or shape")
        if np.array_equal(old.data, new.data):
            return None
        return name, code(name, old, new)

    touched = [name for name in names if name in change.touched]
    for coded in code_tensors(change, touched, code_one, workers, memory_times=memory_times):
        if coded is not None:
            yield coded


@contextmanager
def spooled_pairs(change: Change, folder: Path, *, workers: int = 1) -> Iterator[list[Pair]]:
    """All tensors of both sides for thinwire's own encoder.

    New tensors wait in an unnamed file in ``folder``, through which they are mapped: no model is
    held in memory.

    Raises:
        StoreError: The disk is full.
        ThinwireError: What the change raises.
    """
    names = [name for names in change.layout.values() for name in names if name in change.touched]
    with unnamed_file(folder) as spool:
        spans: dict[str, tuple[int, StoredTensor]] = {}
        size = 0
        new_tensors = code_tensors(
            change, names, change.new_tensor, workers, memory_times=_READ_TIMES
        )
        for name, new in zip(names, new_tensors, strict=True):
            spool.write(new.data.data)
            spans[name] = size, new._replace(data=_NO_BYTES)
            size += new.data.size
        mapped = map_written(spool)
        yield list(_pairs(change, spans, mapped))


def _pairs(
    change: Change, spans: Mapping[str, tuple[int, StoredTensor]], mapped: ByteArray
) -> Iterator[Pair]:
    held: set[str] = set()
    for names in change.layout.values():
        for name in names:
            held.add(name)
            old = change.base.tensors.get(name)
            if name not in spans:
                assert old is not None
                yield Pair(name, old.dtype, old.shape, old.data, old.data)
                continue
            start, new = spans[name]
            data = mapped[start : start + byte_count(new.dtype, new.shape)]
            fits = old is not None and (old.dtype, old.shape) == (new.dtype, new.shape)
            yield Pair(name, new.dtype, new.shape, old.data if old and fits else None, data)
    for name, old in change.base.tensors.items():
        if name not in held:
            yield Pair(name, old.dtype, old.shape, old.data, None)


def _other_layout(name: str, what: str) -> TensorMismatch:
    return TensorMismatch(
        f"tensor {name[:200]!r} {what}: this format has no delta for that",
        hint="Write full weights for this version",
        tensor=name,
    )
