from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import AlreadyExists, NotFound, Truncated, Unavailable
from thinwire.store import Store, open_store
from thinwire.testing import FaultStore, Rates


@pytest.fixture
def memory(tmp_path: Path) -> Store:
    return open_store(f"memory://{tmp_path.name}", retry_s=0)


def faulty(store: Store, seed: int = 1, **rates: float) -> FaultStore:
    return FaultStore(store, random.Random(seed), rates=Rates(**rates))


def test_without_rates_nothing_fails(memory: Store) -> None:
    store = faulty(memory)
    store.put("a", b"x")
    assert store.get("a", limit_bytes=1) == b"x"
    assert store.injected() == {}


WRITES: dict[str, Callable[[Store, Path], Any]] = {
    "put": lambda store, path: store.put("new", b"x"),
    "put_file": lambda store, path: store.put_file("new", path),
    "put_if_absent": lambda store, path: store.put_if_absent("new", b"x"),
}


@pytest.mark.parametrize("operation", WRITES)
def test_failing_before_and_after(memory: Store, operation: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(Unavailable, match="injected"):
        WRITES[operation](faulty(memory, fail_before=1), tmp_path / "f")
    assert list(memory.list("")) == []
    store = faulty(memory, fail_after=1)
    with pytest.raises(Unavailable, match="injected"):
        WRITES[operation](store, tmp_path / "f")
    assert memory.get("new", limit_bytes=1) == b"x"
    assert store.injected() == {f"{operation}.fail_after": 1}


def test_a_lost_answer_hides_a_refusal_too(memory: Store) -> None:
    memory.put("a", b"x")
    with pytest.raises(Unavailable):
        faulty(memory, fail_after=1).put_if_absent("a", b"y")
    with pytest.raises(AlreadyExists):
        faulty(memory).put_if_absent("a", b"y")


def test_deletion(memory: Store) -> None:
    memory.put("a", b"x")
    with pytest.raises(Unavailable):
        faulty(memory, fail_before=1).delete(["a"])
    assert memory.get("a", limit_bytes=1) == b"x"
    with pytest.raises(Unavailable):
        faulty(memory, fail_after=1).delete(["a"])
    with pytest.raises(NotFound):
        memory.get("a", limit_bytes=1)


def test_truncation(memory: Store) -> None:
    memory.put("a", b"0123456789")
    store = faulty(memory, truncate=1)
    lengths = set()
    for _ in range(50):
        data = store.get("a", limit_bytes=10)
        assert b"0123456789".startswith(data)
        lengths.add(len(data))
    assert lengths == set(range(10))
    with pytest.raises(Truncated):
        store.get_range("a", 0, 5)


def test_torn_listings(memory: Store) -> None:
    keys = [f"a/{index:03d}" for index in range(200)]
    for key in keys:
        memory.put(key, b"")
    found = [entry.key for entry in faulty(memory, drop=0.3, duplicate=0.3).list("a/")]
    assert found == sorted(found)
    assert set(found) < set(keys)
    assert len(found) > len(set(found))
    assert [e.key for e in faulty(memory).list("a/", after="a/190")] == keys[191:]


def test_rates_by_operation(memory: Store) -> None:
    store = FaultStore(memory, random.Random(1), rates={"put": Rates(fail_before=1)})
    store.put_if_absent("a", b"x")
    with pytest.raises(Unavailable):
        store.put("a", b"y")
    store.set_rates({"get": Rates(fail_before=1)})
    store.put("a", b"y")
    with pytest.raises(Unavailable):
        store.get("a", limit_bytes=1)
    with pytest.raises(ValueError, match="copy"):
        store.set_rates({"copy": Rates()})


def test_the_same_seed_gives_the_same_faults(memory: Store) -> None:
    def outcomes(seed: int) -> list[str]:
        store = faulty(memory, seed, fail_before=0.3, fail_after=0.3)
        shown = []
        for index in range(60):
            try:
                store.put(f"a/{index}", b"x")
                shown.append("done")
            except Unavailable:
                shown.append("failed")
        return [*shown, str(store.injected())]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)


class _Killed(BaseException):
    pass


def test_a_hook_sees_every_step_and_may_kill_at_any(memory: Store) -> None:
    seen: list[tuple[str, str, str]] = []
    store = FaultStore(
        memory,
        random.Random(1),
        rates=Rates(delay=1),
        hook=lambda *step: seen.append(step),
    )
    store.put("a", b"x")
    store.delete(["a", "b"])
    assert seen == [
        ("before", "put", "a"),
        ("delay", "put", "a"),
        ("after", "put", "a"),
        ("before", "delete", "a"),
        ("delay", "delete", "a"),
        ("before", "delete", "b"),
        ("after", "delete", "a"),
    ]

    def kill(when: str, operation: str, key: str) -> None:
        if (when, key) == ("after", "c"):
            raise _Killed

    store.hook = kill
    with pytest.raises(_Killed):
        store.put("c", b"x")
    assert memory.get("c", limit_bytes=1) == b"x"
