from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.errors import AlreadyExists
from thinwire.store import CountingStore, RetryingStore, Store, StoreWrapper, open_store
from thinwire.store.clock import VirtualClock
from thinwire.store.throttling import ThrottledStore
from thinwire.testing import STORE_CHECKS, ContractBroken, FaultStore, contract

WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "plain": StoreWrapper,
    "retrying": RetryingStore,
    "counting": CountingStore,
    "throttled": lambda store: ThrottledStore(
        store, bits_per_s=1e6, latency_s=0.1, clock=VirtualClock()
    ),
    "without-faults": lambda store: FaultStore(store, random.Random(1)),
}


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_every_store(check: Callable[[Store], None], fresh_store: Store) -> None:
    check(fresh_store)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper(wrapper: str, check: Callable[[Store], None]) -> None:
    store = open_store(f"memory://wrapped-{wrapper}-{check.__name__}", retry_s=0)
    check(WRAPPERS[wrapper](store))


class _LastOneWins(StoreWrapper):
    def put_if_absent(self, key: str, data: bytes) -> None:
        self._store.put(key, data)


class _LooksFirst(StoreWrapper):
    """Creates in two steps with a gap between: both of two racers may find nothing."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        if any(entry.key == key for entry in self._store.list("race/")):
            raise AlreadyExists(key)
        time.sleep(0.005)
        self._store.put(key, data)


class _Torn(StoreWrapper):
    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data[: len(data) // 2])
        time.sleep(0.005)
        self._store.put(key, data)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (_LastOneWins, contract.check_create),
        (_LastOneWins, contract.check_create_race),
        (_LooksFirst, contract.check_create_race),
        (_Torn, contract.check_no_torn_reads),
    ],
)
def test_the_contract_notices_a_bad_store(
    broken: type[StoreWrapper], check: Callable[[Store], None]
) -> None:
    store = open_store(f"memory://broken-{broken.__name__}-{check.__name__}", retry_s=0)
    with pytest.raises(ContractBroken):
        check(broken(store))


def test_the_list_of_checks_is_complete() -> None:
    named = [getattr(contract, name) for name in dir(contract) if name.startswith("check_")]
    assert set(named) == set(STORE_CHECKS)


def test_file_and_path_are_the_same_store(tmp_path: Path) -> None:
    open_store(str(tmp_path / "s")).put("a/b", b"x")
    assert open_store((tmp_path / "s").as_uri()).get("a/b", limit_bytes=1) == b"x"
