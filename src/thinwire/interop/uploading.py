"""Several uploads at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from thinwire.interop.foreign import OutFile

_UPLOADS = 4


def upload_all(
    files: Sequence[OutFile], upload: Callable[[OutFile], None], between: Callable[[], None]
) -> None:
    """Upload files; once one failed, no other is begun, as each may be tried again for long.

    Args:
        files: What to upload.
        upload: Uploads one; on several threads.
        between: Called after each.

    Raises:
        Exception: That of the first one that failed, once all that were begun have ended.
    """
    has_failed = threading.Event()

    def act(file: OutFile) -> None:
        if has_failed.is_set():
            return
        try:
            upload(file)
        except BaseException:
            has_failed.set()
            raise

    with ThreadPoolExecutor(_UPLOADS) as pool:
        for _ in pool.map(act, files):
            between()
