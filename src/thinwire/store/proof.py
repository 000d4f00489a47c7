"""Whether a store really refuses to create what exists."""

from __future__ import annotations

from thinwire.errors import AlreadyExists, UnsafeStore
from thinwire.store.store import Store


def prove_put_if_absent(store: Store, key: str, data: bytes) -> None:
    """Try to create ``key`` again, which exists with exactly ``data``.

    Nothing is harmed where the store lets it through: the bytes are the same.

    Raises:
        UnsafeStore: The store let it through, so two publishers could both win a version.
        StoreError: It could not be tried.
    """
    try:
        store.put_if_absent(key, data)
    except AlreadyExists:
        return
    raise UnsafeStore(
        f"{store.url} ignores put-if-absent: it let {key} be created twice",
        hint="Use a store that honours If-None-Match, or open it with single_writer=True"
        " when there is only ever one publisher",
        key=key,
        url=store.url,
    )
