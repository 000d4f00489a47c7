"""Readers and updates: many or one, an update before new readers, nobody forever."""

from __future__ import annotations

import importlib.util
import threading
import time
import warnings

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: TorchSink was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

from thinwire.errors import Deadline, InvalidArgument
from thinwire.torch import UpdateLock

from .training import wait_until


def test_readers_read_at_once() -> None:
    lock = UpdateLock()
    barrier = threading.Barrier(3, timeout=10)

    def read() -> None:
        with lock.reading():
            barrier.wait()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not barrier.broken


def test_a_constant_load_of_readers_does_not_hold_an_update_off() -> None:
    lock = UpdateLock()
    is_over = threading.Event()
    counts = [0, 0, 0, 0]

    def read(number: int) -> None:
        while not is_over.is_set():
            with lock.reading():
                counts[number] += 1
                time.sleep(0.002)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(counts))
        for _ in range(20):
            with lock.writing(5):
                before = list(counts)
                time.sleep(0.001)
                assert counts == before
        wait_until(lambda: all(a > b for a, b in zip(counts, before, strict=True)))
    finally:
        is_over.set()
        for thread in threads:
            thread.join(10)


def test_what_takes_too_long_is_told_and_harms_nobody() -> None:
    lock = UpdateLock()
    with lock.reading():
        found: list[BaseException] = []

        def write() -> None:
            try:
                with lock.writing(0.05):
                    raise AssertionError
            except Deadline as error:
                found.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        wait_until(lambda: lock.is_wanted)
        # A reader that comes while an update waits.
        late = threading.Thread(target=lambda: found.append(_refused(lock)))
        late.start()
        thread.join(10)
        late.join(10)
        assert [type(error) for error in found] == [Deadline, Deadline]
    assert not lock.is_wanted
    with lock.writing(0), lock.reading(0):
        pass
    with lock.reading(0):
        pass


def _refused(lock: UpdateLock) -> BaseException:
    try:
        with lock.reading(0.01):
            raise AssertionError
    except Deadline as error:
        return error


def test_a_reader_may_read_inside_also_while_an_update_waits() -> None:
    lock = UpdateLock()
    is_written = threading.Event()

    def write() -> None:
        with lock.writing(10):
            is_written.set()

    with lock.reading():
        thread = threading.Thread(target=write)
        thread.start()
        wait_until(lambda: lock.is_wanted)
        with lock.reading(0):
            assert not is_written.is_set()
    thread.join(10)
    assert is_written.is_set()


def test_an_update_inside_a_reading_is_refused() -> None:
    lock = UpdateLock()
    with lock.reading(), pytest.raises(InvalidArgument), lock.writing():
        raise AssertionError
    with lock.writing(), pytest.raises(InvalidArgument), lock.writing():
        raise AssertionError
    with lock.writing(0):
        pass
