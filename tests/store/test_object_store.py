from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import obstore
import pytest

from thinwire.errors import InvalidArgument
from thinwire.store import open_store
from thinwire.store.object_store import server_offset

SEGMENTS = ("a", "ab", "a-b", "a.b", "a.", ".a", "-", "a0", "b", "ba", "~", "é", "a/b")


def folder_server(keys: Sequence[str], offset: str | None) -> set[str]:
    """What a server lists that compares name by name and skips the folder it starts behind."""
    if offset is None:
        return set(keys)
    marker = offset.split("/")
    return {
        key for key in keys if key.split("/") > marker and key.split("/")[: len(marker)] != marker
    }


def test_no_server_order_makes_a_listing_leave_out_keys() -> None:
    dice = random.Random(7)
    for _ in range(20_000):
        prefix = dice.choice(["", "p/", "p/q/"])
        keys = [
            prefix + "/".join(dice.choices(SEGMENTS, k=dice.randrange(1, 4))) for _ in range(12)
        ]
        after = dice.choice([*keys, prefix, dice.choice(keys) + "/", dice.choice(keys)[:-1]])
        due = {key for key in keys if key > after}
        offset = server_offset(prefix, after)
        assert offset is None or offset < after
        # A server that goes by whole keys, and one that goes by folders.
        assert due <= {key for key in keys if offset is None or key > offset}
        assert due <= folder_server(keys, offset), (prefix, after, offset)


@pytest.mark.parametrize(
    ("prefix", "after", "offset"),
    [
        ("m/", "m/000000000012.json", "m/00000000001"),
        ("", "", None),
        ("m/", "m/", None),
        ("m/", "a", None),
        ("m/", "m/x", None),
        ("m/", "m/xy/z", "m/x"),
    ],
)
def test_offsets(prefix: str, after: str, offset: str | None) -> None:
    assert server_offset(prefix, after) == offset


def test_stores_that_stop_a_deletion_at_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = obstore.delete

    def stops(client: Any, keys: Sequence[str]) -> None:
        for key in keys:
            if key == "none":
                raise FileNotFoundError(key)
            real(client, [key])

    store = open_store("memory://stops", retry_s=0)
    for key in ("a", "b", "c"):
        store.put(key, b"x")
    monkeypatch.setattr(obstore, "delete", stops)
    store.delete(["a", "none", "b"])
    assert [entry.key for entry in store.list("")] == ["c"]


def test_a_bad_key_among_many_deletes_none() -> None:
    store = open_store("memory://bad-key", retry_s=0)
    store.put("a", b"x")
    with pytest.raises(InvalidArgument):
        store.delete(["a", "../b"])
    assert [entry.key for entry in store.list("")] == ["a"]
