"""Objects by URL: folders, memory, S3, Google and Azure behind one small protocol.

``open_store`` gives a ``Store``; wrappers add retries, counting and throttling. Whatever a commit
rests on is ``put_if_absent``; ``prove_put_if_absent`` asks a store whether it honours it.
"""

from thinwire.store.opening import open_store
from thinwire.store.proof import prove_put_if_absent
from thinwire.store.store import Entry, Store
from thinwire.store.throttling import ThrottledStore
from thinwire.store.wrappers import (
    CountingStore,
    RetryingStore,
    SingleWriterStore,
    StoreWrapper,
)

__all__ = [
    "CountingStore",
    "Entry",
    "RetryingStore",
    "SingleWriterStore",
    "Store",
    "StoreWrapper",
    "ThrottledStore",
    "open_store",
    "prove_put_if_absent",
]
