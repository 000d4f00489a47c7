"""In place, all or nothing: whatever stops it, the base is old or new, and never between."""

from __future__ import annotations

import io
import signal
import threading
from types import FrameType
from typing import Any

import numpy as np
import pytest

import thinwire
from thinwire.codec import _native
from thinwire.codec import delta as delta_module
from thinwire.codec.delta import Delta
from thinwire.codec.write import Pair, write_delta
from thinwire.errors import InvalidArgument


def pair(word_count: int = 3_000_000) -> tuple[np.ndarray, np.ndarray, bytes]:
    rng = np.random.default_rng(5)
    base = rng.integers(0, 1 << 16, word_count).astype(np.uint16)
    new = base ^ (rng.random(word_count) < 0.2).astype(np.uint16)
    return base, new, thinwire.encode(base, new, dtype="BF16")


class Interrupted(Exception):
    pass


def test_interrupted_anywhere() -> None:
    base, new, payload = pair()

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, stop)
    old_count = new_count = 0
    try:
        for delay_ms in range(0, 80, 4):
            target = base.copy()
            main = threading.main_thread().ident
            assert main is not None
            timer = threading.Timer(delay_ms / 1000, signal.pthread_kill, (main, signal.SIGUSR1))
            try:
                timer.start()
                thinwire.decode_into(target, payload)
                timer.join()
            except Interrupted:
                pass
            is_old, is_new = np.array_equal(target, base), np.array_equal(target, new)
            assert is_old or is_new
            old_count += is_old
            new_count += is_new
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert old_count > 0


def test_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    base, _, payload = pair(3 << 20)
    target = base.copy()
    real = delta_module.decode_changes
    calls = 0

    def decode_changes(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(delta_module, "decode_changes", decode_changes)
    with pytest.raises(MemoryError):
        thinwire.decode_into(target, payload)
    assert np.array_equal(target, base)


def test_swap_is_all_or_nothing() -> None:
    base = np.arange(8, dtype=np.uint8)
    good = (base[:4], np.array([0], np.uint32), np.array([9], np.uint8), 1)
    for bad in (
        (base, np.array([8], np.uint32), np.array([9], np.uint8), 1),
        (base, np.array([0], np.uint32), np.array([9, 9], np.uint8), 1),
        (base, np.array([0], np.uint32), np.array([9, 9, 9], np.uint8), 3),
    ):
        with pytest.raises(ValueError, match=r"word|position"):
            _native.swap_words([good, bad])
        assert np.array_equal(base, np.arange(8))
    words = np.array([9], np.uint8)
    _native.swap_words([(base, np.array([7], np.uint32), words, 1)])
    assert (base[7], words[0]) == (9, 7)


def test_arrays_that_would_be_copied_are_refused() -> None:
    base, new, payload = pair(1000)
    data = base.view(np.uint8)
    out = io.BytesIO()
    write_delta(out, [Pair("t", "BF16", (1000,), data, new.view(np.uint8))])
    with Delta.open(out.getvalue()) as delta:
        room = np.zeros((data.size, 2), np.uint8)
        frozen = data.copy()
        frozen.flags.writeable = False
        for target in (room[:, 0], room.reshape(-1)[: data.size].reshape(2, -1), frozen):
            with pytest.raises(InvalidArgument):
                delta.apply({"t": data}, lambda _, target=target: target)  # type: ignore[misc]
            room[:, 0] = data
        with pytest.raises(InvalidArgument):
            delta.apply_in_place({"t": frozen})
        with pytest.raises(InvalidArgument):
            delta.apply_in_place({"t": room[:, 0]})
    assert payload


def test_many_empty_sections_cost_little() -> None:
    from thinwire.codec.container import MAX_SECTIONS, Index, TensorRecord, pack_head
    from thinwire.errors import LimitExceeded

    shape = [(MAX_SECTIONS + 1) << 20]
    with pytest.raises(LimitExceeded):
        pack_head(
            Index([TensorRecord("t", "U8", shape, sizes=[0] * (MAX_SECTIONS + 1))]), [1, 2], 0
        )
