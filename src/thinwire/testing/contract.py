"""What every store must do, as a list of checks, each for a fresh and empty store.

::

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_contract(check, fresh_store):
        check(fresh_store)

Only the standard library and thinwire are needed. A store fails by ``ContractBroken``.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.errors import (
    AlreadyExists,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    StoreError,
    ThinwireError,
    Truncated,
)
from thinwire.store.store import MAX_KEY_BYTES, MAX_SEGMENT_BYTES, Store

_THREADS = 16
_RACED_KEYS = 4
_MANY_KEYS = 1_100
# Several parts of a multipart upload, and the last one not full.
_LARGE_BYTES = (20 << 20) + 12_345
_LIMIT = 1 << 20

UNUSUAL_NAMES = (
    "tokenizer_config.json",
    ".hidden",
    "model-00001-of-00002.safetensors",
    "two words.txt",
    "a+b=c&d?e#f%20g%.json",
    "x#1",
    "gewöhnlich 模型 🙂.json",
    "[brackets]{braces}~tilde'quote\"double*star|bar<less>.txt",
    "..two dots in front",
    "n" * MAX_SEGMENT_BYTES,
)
BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\ud800b",
    "a/.thinwire-writing/b",
    "n" * (MAX_SEGMENT_BYTES + 1),
    "/".join(["n" * 99] * (MAX_KEY_BYTES // 100 + 1)),
)


class ContractBroken(AssertionError):
    """The store does not do what every store must."""


def _expect_equal(found: object, due: object, what: str) -> None:
    if found != due:
        raise ContractBroken(f"{what}: found {str(found)[:300]}, due is {str(due)[:300]}")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ContractBroken(what)


def _expect_error(error: type[ThinwireError], call: Callable[[], Any], what: str) -> ThinwireError:
    try:
        call()
    except error as found:
        return found
    except Exception as other:
        raise ContractBroken(f"{what}: {other!r} instead of {error.__name__}") from other
    raise ContractBroken(f"{what}: no {error.__name__}")


def _keys(store: Store, prefix: str = "", after: str = "") -> list[str]:
    return [entry.key for entry in store.list(prefix, after=after)]


def _put_all(store: Store, keys: Iterable[str], data: bytes = b"x") -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda key: store.put(key, data), keys):
            pass


def check_absent(store: Store) -> None:
    """Nothing is there at first, and asking for it says so."""
    _expect_equal(_keys(store), [], "an empty store's listing")
    _expect_equal(_keys(store, "no/such/"), [], "the listing of a folder that is not there")
    _expect_error(NotFound, lambda: store.get("a/b", limit_bytes=9), "get of nothing")
    _expect_error(NotFound, lambda: store.get_range("a/b", 0, 1), "get_range of nothing")
    _expect_error(NotFound, lambda: store.get_range("a/b", 0, 0), "empty get_range of nothing")
    store.put("a/b/c", b"x")
    _expect_error(NotFound, lambda: store.get("a/b", limit_bytes=9), "get of a folder")
    _expect_error(NotFound, lambda: store.get("a/b/c/d", limit_bytes=9), "get below an object")
    _expect_equal(_keys(store, "a/b/c/"), [], "the listing below an object")


def check_present(store: Store) -> None:
    """What was written is read back, also when it is empty or replaced by something shorter."""
    for data in (b"long enough", b"short", b"", bytes(range(256))):
        store.put("a/b", data)
        _expect_equal(store.get("a/b", limit_bytes=len(data)), data, "get after put")
        _expect_equal([entry.size_bytes for entry in store.list("a/")], [len(data)], "the size")
    _expect_equal(type(store.get("a/b", limit_bytes=999)), bytes, "the type of the data")


def check_create(store: Store) -> None:
    """The second creation fails and changes nothing; after a deletion it succeeds."""
    store.put_if_absent("a/b", b"first")
    _expect_error(AlreadyExists, lambda: store.put_if_absent("a/b", b"second"), "second creation")
    _expect_error(AlreadyExists, lambda: store.put_if_absent("a/b", b"first"), "same bytes again")
    _expect_equal(store.get("a/b", limit_bytes=9), b"first", "get after a refused creation")
    store.put("a/c", b"put")
    _expect_error(AlreadyExists, lambda: store.put_if_absent("a/c", b"second"), "creation over put")
    store.delete(["a/b"])
    store.put_if_absent("a/b", b"third")
    _expect_equal(store.get("a/b", limit_bytes=9), b"third", "get after deletion and creation")


def check_create_race(store: Store) -> None:
    """Of many that create a key at once exactly one wins, and the object is the winner's."""
    start = threading.Barrier(_THREADS)

    def race(number: int) -> list[str]:
        won = []
        # Once only: a server that makes losers queue for a lock would add up the longest waits.
        start.wait()
        for index in range(_RACED_KEYS):
            with suppress(AlreadyExists):
                store.put_if_absent(f"race/{index}", b"%d" % number * 1000)
                won.append(f"race/{index}")
        return won

    with ThreadPoolExecutor(_THREADS) as pool:
        won = list(pool.map(race, range(_THREADS)))
    for index in range(_RACED_KEYS):
        key = f"race/{index}"
        winners = [number for number, keys in enumerate(won) if key in keys]
        _expect_equal(len(winners), 1, f"winners of {key}")
        data = store.get(key, limit_bytes=9000)
        _expect_equal(data, b"%d" % winners[0] * 1000, f"{key} after the race")


def check_ranges(store: Store) -> None:
    """Ranges are exact, and one that reaches beyond the end is Truncated."""
    data = bytes(range(256)) * 40
    store.put("a/b", data)
    size = len(data)
    for start, stop in ((0, 1), (0, size), (1, 2), (255, 300), (size - 1, size), (5, 5), (0, 0)):
        _expect_equal(store.get_range("a/b", start, stop), data[start:stop], f"[{start}, {stop})")
    _expect_equal(store.get_range("a/b", size, size), b"", "the empty range at the end")
    for start, stop in (
        (0, size + 1),
        (size - 1, size + 1),
        (size, size + 1),
        (size + 9, size + 99),
    ):
        _expect_error(
            Truncated,
            lambda start=start, stop=stop: store.get_range("a/b", start, stop),  # type: ignore[misc]
            f"[{start}, {stop}) of {size} bytes",
        )
    store.put("empty", b"")
    _expect_error(Truncated, lambda: store.get_range("empty", 0, 1), "a range of an empty object")
    _expect_error(InvalidArgument, lambda: store.get_range("a/b", -1, 1), "a negative start")
    _expect_error(InvalidArgument, lambda: store.get_range("a/b", 2, 1), "a reversed range")


def check_limit(store: Store) -> None:
    """An object larger than the limit is refused, one as large is not."""
    store.put("a", bytes(1000))
    _expect_equal(len(store.get("a", limit_bytes=1000)), 1000, "get at the limit")
    _expect_equal(len(store.get("a", limit_bytes=1 << 50)), 1000, "get with a huge limit")
    _expect_error(LimitExceeded, lambda: store.get("a", limit_bytes=999), "get above the limit")
    _expect_error(LimitExceeded, lambda: store.get("a", limit_bytes=0), "get with limit 0")


def check_large_file(store: Store) -> None:
    """A file of several upload parts arrives whole, replaces, and can be read in ranges."""
    block = b"".join(hashlib.sha256(b"%d" % index).digest() for index in range(4096))
    data = (block * (_LARGE_BYTES // len(block) + 1))[:_LARGE_BYTES]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large"
        path.write_bytes(data)
        store.put("a/large", b"small")
        store.put_file("a/large", path)
        _expect_equal([entry.size_bytes for entry in store.list("a/")], [len(data)], "its size")
        _expect(store.get("a/large", limit_bytes=len(data)) == data, "put_file changed the bytes")
        _expect_error(
            LimitExceeded, lambda: store.get("a/large", limit_bytes=_LIMIT), "get of a large object"
        )
        middle = len(data) // 2
        found = store.get_range("a/large", middle, middle + 3 * _LIMIT)
        _expect(found == data[middle : middle + 3 * _LIMIT], "a large range differs")
        path.write_bytes(b"")
        store.put_file("a/large", path)
        _expect_equal(store.get("a/large", limit_bytes=0), b"", "put_file of an empty file")
        _expect_error(NotFound, lambda: store.put_file("a", Path(folder) / "none"), "no such file")
        _expect_error(InvalidArgument, lambda: store.put_file("a", Path(folder)), "a folder")
    store.put("a/large", data)
    _expect(store.get("a/large", limit_bytes=len(data)) == data, "a large put changed the bytes")


def check_listing(store: Store) -> None:
    """Listings are whole keys in order, of exactly one folder, beyond ``after``."""
    names = ("A", "a-b", "a.b", "a/x", "a/y", "a/z/q", "a0", "ab", "b", "é", "🙂")
    keys = sorted(f"p/{name}" for name in names)
    _put_all(store, [*keys, "other", "p.x", "p0", "pp/a"])
    _expect_equal(_keys(store, "p/"), keys, "the listing of p/")
    _expect_equal(_keys(store), sorted([*keys, "other", "p.x", "p0", "pp/a"]), "the whole listing")
    _expect_equal(_keys(store, "p/a/"), ["p/a/x", "p/a/y", "p/a/z/q"], "the listing of p/a/")
    for after in [*keys, "p/", "p/a", "p/a/", "p/a/x.", "p/aa", "a", "p", "z", "p/a/z"]:
        due = [key for key in keys if key > after]
        _expect_equal(_keys(store, "p/", after), due, f"the listing of p/ after {after!r}")
    _expect_error(InvalidArgument, lambda: _keys(store, "p"), "a prefix that is no folder")
    _expect_error(InvalidArgument, lambda: _keys(store, "../"), "a prefix above")


def check_many_keys(store: Store) -> None:
    """More keys than one page are listed and deleted."""
    keys = [f"many/{index:012d}.json" for index in range(_MANY_KEYS)]
    _put_all(store, keys)
    _expect_equal(_keys(store, "many/"), keys, "the listing of many keys")
    for start in (0, 1, 998, 999, 1000, _MANY_KEYS - 1):
        found = _keys(store, "many/", keys[start])
        _expect_equal(found, keys[start + 1 :], f"the listing after key {start}")
    store.delete(keys[:-1])
    _expect_equal(_keys(store, "many/"), keys[-1:], "the listing after deleting all but one")


def check_times(store: Store) -> None:
    """A later object is not older than an earlier one, and the same object keeps its time."""
    store.put("a/1", b"x")
    store.put("a/2", b"x")
    first, second = store.list("a/")
    _expect(first.modified_s <= second.modified_s, "a later object is older")
    _expect(first.modified_s > 1.6e9, "times are not unix seconds")
    _expect_equal(next(iter(store.list("a/"))), first, "the same object listed again")


def check_delete(store: Store) -> None:
    """Deletion takes exactly what it names; what is missing does not stop it."""
    _put_all(store, ["a/1", "a/2", "a/3/x", "b"])
    store.delete([])
    store.delete(["a/none", "a/1", "none", "a/2/x", "b"])
    _expect_equal(_keys(store), ["a/2", "a/3/x"], "the listing after a deletion")
    _expect_error(NotFound, lambda: store.get("a/1", limit_bytes=9), "get of a deleted object")
    store.delete(["a/1"])
    store.delete(["a/3"])
    _expect_equal(_keys(store), ["a/2", "a/3/x"], "the listing after deleting a folder's name")
    store.delete(key for key in ["a/2", "a/3/x"])
    _expect_equal(_keys(store), [], "the listing after deleting all")
    store.put("a/3/x", b"again")
    _expect_equal(_keys(store), ["a/3/x"], "the listing after writing there again")


def check_names(store: Store) -> None:
    """File names as people make them work everywhere, and come back as they were."""
    keys = sorted(f"anchor/{name}" for name in UNUSUAL_NAMES)
    for key in keys:
        store.put_if_absent(key, key.encode())
        _expect_error(AlreadyExists, lambda key=key: store.put_if_absent(key, b""), key)  # type: ignore[misc]
        _expect_equal(store.get(key, limit_bytes=999), key.encode(), f"get of {key!r}")
        _expect_equal(store.get_range(key, 0, 1), key.encode()[:1], f"get_range of {key!r}")
    _expect_equal(_keys(store, "anchor/"), keys, "the listing of unusual names")
    for key in keys:
        due = [other for other in keys if other > key]
        _expect_equal(_keys(store, "anchor/", key), due, f"the listing after {key!r}")
    store.delete(keys)
    _expect_equal(_keys(store), [], "the listing after deleting unusual names")


def check_bad_keys(store: Store) -> None:
    """A key that leads elsewhere, or that some store would take for another, is refused by all."""
    with tempfile.NamedTemporaryFile() as file:
        for key in BAD_KEYS:
            calls: dict[str, Callable[[str], Any]] = {
                "get": lambda key: store.get(key, limit_bytes=9),
                "get_range": lambda key: store.get_range(key, 0, 1),
                "put": lambda key: store.put(key, b"x"),
                "put_file": lambda key: store.put_file(key, Path(file.name)),
                "put_if_absent": lambda key: store.put_if_absent(key, b"x"),
                "delete": lambda key: store.delete([key]),
            }
            for name, call in calls.items():
                what = f"{name} of the key {key[:40]!r}"
                _expect_error(InvalidArgument, lambda call=call, key=key: call(key), what)  # type: ignore[misc]
    _expect_equal(_keys(store), [], "the listing after refused keys")


def check_errors(store: Store) -> None:
    """Errors name the key and the store, and are errors of files as well."""
    missing = _expect_error(NotFound, lambda: store.get("a/none", limit_bytes=9), "get of nothing")
    store.put("a/b", b"x")
    exists = _expect_error(AlreadyExists, lambda: store.put_if_absent("a/b", b""), "creation")
    for error, key in ((missing, "a/none"), (exists, "a/b")):
        _expect(isinstance(error, StoreError | OSError), f"{error!r} is no StoreError")
        _expect(key in str(error) and store.url in str(error), f"{error!r} does not say where")
        _expect(not error.retryable, f"{error!r} says it may be retried")


def check_no_torn_reads(store: Store) -> None:
    """Whoever reads while an object is replaced sees the old one or the new one, whole."""
    versions = [bytes([65 + index]) * (200_000 + index) for index in range(4)]
    store.put("a", versions[0])
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set() or reads == 0:
            _expect(store.get("a", limit_bytes=_LIMIT) in versions, "a reader saw a torn object")
            reads += 1
        return reads

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(4)]
        try:
            for index in range(20):
                store.put("a", versions[index % len(versions)])
        finally:
            done.set()
        for reader in readers:
            reader.result()


def check_no_half_created(store: Store) -> None:
    """Whoever waits for an object to be created never sees a part of it."""
    data = bytes(300_000)
    made = [f"made/{index}" for index in range(10)]

    def wait_for(key: str) -> bytes:
        while True:
            with suppress(NotFound):
                return store.get(key, limit_bytes=_LIMIT)

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(wait_for, key) for key in made]
        for key in made:
            store.put_if_absent(key, data)
        for key, future in zip(made, found, strict=True):
            _expect(future.result() == data, f"a reader saw a part of {key}")


STORE_CHECKS: tuple[Callable[[Store], None], ...] = (
    check_absent,
    check_present,
    check_create,
    check_create_race,
    check_ranges,
    check_limit,
    check_large_file,
    check_listing,
    check_many_keys,
    check_times,
    check_delete,
    check_names,
    check_bad_keys,
    check_errors,
    check_no_torn_reads,
    check_no_half_created,
)
