"""A store in a Hugging Face bucket, through huggingface_hub's bucket functions.

Uploads, deletions and listings are those functions. Reads are not: they know no ranges, and write
files. So an object is read by a plain GET of its ``resolve`` URL over huggingface_hub's own client,
as its file system does it; the Hub redirects to its CDN by a signed URL named after the content, so
nobody reads a mix of two objects, and the token stays at the Hub.

There is no put-if-absent: ``put_if_absent`` says so, and ``SingleWriterStore`` looks and writes.
Reading and plain writing need neither. The bucket functions set no timeout of their own and try
again five times (half a minute in all) before they fail.

huggingface_hub itself is imported inside: importing thinwire must stay cheap.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

from thinwire.errors import (
    InvalidArgument,
    LimitExceeded,
    NotFound,
    StoreError,
    UnsafeStore,
)
from thinwire.store.hf_failures import ALL_FAILED, calling, refusal
from thinwire.store.store import (
    Entry,
    check_key,
    check_prefix,
    check_range,
    key_fault,
    regular_size,
    too_large,
    too_short,
)

T = TypeVar("T")

# A listing is held in memory while it is sorted.
MAX_LISTED = 5_000_000
_DELETE_PAGE = 1_000
_PAST_THE_END = 416
_READ_BYTES = 1 << 20
# To connect, to read on, to write on, and to get a connection.
_TIMEOUTS_S = (10.0, 60.0, 60.0, 60.0)
# Both go into URLs as they are.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,95}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(?:\d{1,19}|\*)")
_INSTALL = "pip install 'thinwire[hf]'"


def open_bucket(parts: SplitResult, environment: Mapping[str, str]) -> BucketStore:
    """The store at ``hf://buckets/NAMESPACE/NAME/PATH``.

    Args:
        parts: The URL's, which hold no secret.
        environment: ``HF_ENDPOINT`` names another Hub.

    Raises:
        InvalidArgument: It is no such URL, or huggingface_hub is missing or too old.
    """
    names = parts.path.removeprefix("/").removesuffix("/").split("/", 2)
    is_bucket = parts.netloc == "buckets" and len(names) > 1
    if not (is_bucket and all(_NAME.fullmatch(name) for name in names[:2])):
        raise InvalidArgument(
            "the hf:// URL names no bucket", hint="Write hf://buckets/NAMESPACE/NAME/PATH"
        )
    path = unquote("".join(names[2:]))
    fault = key_fault(path) if path else None
    if fault is not None:
        raise InvalidArgument(
            f"the path of the hf:// URL {fault}", hint="Use plain names joined by single slashes"
        )
    try:
        api = importlib.import_module("huggingface_hub").HfApi
    except ImportError:
        raise InvalidArgument(
            "hf:// needs huggingface_hub, which is not installed", hint=_INSTALL
        ) from None
    if not hasattr(api, "batch_bucket_files"):
        raise InvalidArgument(
            "this huggingface_hub knows no buckets", hint=f"Version 1.5 or later does: {_INSTALL}"
        )
    return BucketStore("/".join(names[:2]), path, environment.get("HF_ENDPOINT"))


class BucketStore:
    """Objects of one bucket below ``path``; the token is huggingface_hub's affair.

    Args:
        bucket: NAMESPACE/NAME.
        path: Where in it, or "".
        endpoint: The Hub's URL; None: huggingface_hub's own.
    """

    def __init__(self, bucket: str, path: str = "", endpoint: str | None = None) -> None:
        self._bucket = bucket
        self._prefix = f"{path}/" if path else ""
        self._url = f"hf://buckets/{bucket}" + (f"/{path}" if path else "")
        self._hub = importlib.import_module("huggingface_hub")
        endpoint = (endpoint or "").rstrip("/") or None
        self._api = self._hub.HfApi(endpoint=endpoint, library_name="thinwire")
        # Before it had this error it passed over what the server had listed as failed.
        self._tells_failures = hasattr(self._hub.errors, "BucketBatchError")

    @property
    def url(self) -> str:
        """The store's address; it never holds a token."""
        return self._url

    def __repr__(self) -> str:
        return f"BucketStore({self._url!r})"

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        check_key(key)

        def read() -> bytes:
            with self._opened(key, {}, (200,)) as response:
                size = response.headers.get("Content-Length", "")
                if size.isdecimal() and int(size) > limit_bytes:
                    raise too_large(self._url, key, int(size), limit_bytes)
                data = _read_at_most(response, limit_bytes)
                if len(data) > limit_bytes:
                    raise too_large(self._url, key, len(data), limit_bytes)
                return data

        return self._calling("read", key, read)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        check_key(key)
        check_range(start, stop)
        if start == stop:
            return self._look(key, stop)

        def read() -> bytes:
            headers = {"Range": f"bytes={start}-{stop - 1}"}
            with self._opened(key, headers, (200, 206, _PAST_THE_END)) as response:
                if response.status_code == _PAST_THE_END:
                    return b""
                self._check_answered(response, key, start, stop)
                return _read_at_most(response, stop - start)

        data = self._calling("read", key, read)
        if len(data) < stop - start:
            raise too_short(self._url, key, start, stop)
        # More comes only where the whole object was sent, which begins with the range.
        return data[: stop - start]

    def _check_answered(self, response: Any, key: str, start: int, stop: int) -> None:
        """Refuse an answer about other bytes than those asked for."""
        reason = ""
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status_code != 206:
            reason = "the server ignored the range that was asked for" if start else ""
        elif found is None or int(found[1]) != start or int(found[2]) >= stop:
            reason = "the server answered with another range than was asked for"
        if reason:
            raise StoreError(
                f"cannot read {key} in {self._url}: {reason}",
                hint="Check HF_ENDPOINT, and proxies between here and the Hub",
                key=key,
                url=self._url,
            )

    def _look(self, key: str, stop: int) -> bytes:
        sizes = self._calling("read", key, lambda: self._sizes([key]))
        if key not in sizes:
            raise NotFound(
                f"cannot read {key} in {self._url}: there is no such object",
                hint="Check the URL and the key",
                key=key,
                url=self._url,
            )
        if sizes[key] < stop:
            raise too_short(self._url, key, stop, stop)
        return b""

    def _sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """The sizes of those objects that exist."""
        asked = {self._prefix + key: key for key in keys}
        found = self._api.get_bucket_paths_info(self._bucket, list(asked))
        return {asked[file.path]: _size(file) for file in found if file.path in asked}

    @contextmanager
    def _opened(
        self, key: str, headers: dict[str, str], expected: tuple[int, ...]
    ) -> Iterator[Any]:
        """The answer to a GET of an object, of an expected status, its body not yet read."""
        path = quote(self._prefix + key)
        url = f"{self._api.endpoint}/buckets/{self._bucket}/resolve/{path}"
        headers |= self._hub.utils.build_hf_headers(library_name="thinwire")
        # Compressed, its length would say nothing about what it takes in memory.
        headers["Accept-Encoding"] = "identity"
        with self._hub.get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUTS_S
        ) as response:
            is_elsewhere = urlsplit(str(response.url)).netloc != urlsplit(url).netloc
            if response.status_code not in expected:
                raise refusal(
                    "read", key, self._url, response.status_code,
                    response.headers.get("X-Error-Code"), is_elsewhere=is_elsewhere,
                )  # fmt: skip
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise StoreError(
                    f"cannot read {key} in {self._url}: the server compressed it unasked",
                    hint="Check HF_ENDPOINT, and proxies between here and the Hub",
                    key=key,
                    url=self._url,
                )
            yield response

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        check_key(key)
        self._upload(key, data, len(data))

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``; hf-xet reads the file piece by piece."""
        check_key(key)
        self._upload(key, path, regular_size(path))

    def _upload(self, key: str, source: bytes | Path, size_bytes: int) -> None:
        target = self._prefix + key

        def write() -> None:
            with _quiet_progress():
                self._api.batch_bucket_files(self._bucket, add=[(source, target)])

        self._calling("write", key, write)
        if not self._tells_failures:
            sizes = self._calling("write", key, lambda: self._sizes([key]))
            if sizes.get(key) != size_bytes:
                raise refusal("write", key, self._url, None, None)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``: always refused.

        Raises:
            UnsafeStore: The bucket functions have no conditional write.
        """
        check_key(key)
        raise UnsafeStore(
            f"cannot create {key} in {self._url}: the Hub's bucket functions have no put-if-absent",
            hint="Open it with single_writer=True (--single-writer) when there is only ever one"
            " publisher, or use the Hub's S3 gateway, which has it (s3://NAME with"
            " AWS_ENDPOINT_URL=https://s3.hf.co/NAMESPACE)",
            key=key,
            url=self._url,
        )

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``; the whole listing is taken and sorted before the first entry."""
        check_prefix(prefix)
        try:
            entries = self._calling("list", prefix, lambda: self._listing(prefix, after))
        except NotFound:
            # What some versions of the Hub may say of a folder that is not there.
            return
        yield from entries

    def _listing(self, prefix: str, after: str) -> Sequence[Entry]:
        if prefix < after and not after.startswith(prefix):
            return []
        # Without the slash, as huggingface_hub asks: the Hub takes it for the beginning of a path.
        where = (self._prefix + prefix).rstrip("/")
        found = self._api.list_bucket_tree(self._bucket, where or None, recursive=True)
        entries: list[Entry] = []
        for number, item in enumerate(found):
            if number == MAX_LISTED:
                raise LimitExceeded(
                    f"{self._url} lists more than {MAX_LISTED} objects",
                    hint="Use one bucket, or a path of its own, for each stream",
                    url=self._url,
                )
            key = item.path.removeprefix(self._prefix)
            is_ours = item.path.startswith(self._prefix + prefix) and key > after
            if item.type == "file" and is_ours and key_fault(key) is None:
                # By the Hub's clock where it tells; older releases only pass on the writer's.
                moment = getattr(item, "uploaded_at", None) or item.mtime
                entries.append(Entry(key, _size(item), moment.timestamp()))
        return sorted(entries)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        left = iter(keys)
        while batch := list(islice(left, _DELETE_PAGE)):
            for key in batch:
                check_key(key)
            self._delete_batch(list(dict.fromkeys(batch)))

    def _delete_batch(self, batch: Sequence[str]) -> None:
        what = batch[0] if len(batch) == 1 else f"{len(batch)} objects ({batch[0]}, ...)"

        def remove() -> bool:
            """Whether every object is surely gone."""
            try:
                self._api.batch_bucket_files(
                    self._bucket, delete=[self._prefix + key for key in batch]
                )
            except Exception as error:
                # Some objects failed, perhaps only because they were missing. Only later releases
                # of huggingface_hub make an error of their own of it.
                status = getattr(getattr(error, "response", None), "status_code", None)
                if getattr(error, "failures", None) is None and status != ALL_FAILED:
                    raise
                return False
            return self._tells_failures

        if self._calling("delete", what, remove):
            return
        kept = self._calling("delete", what, lambda: self._sizes(batch))
        if kept:
            raise refusal("delete", next(iter(kept)), self._url, None, None)

    def _calling(self, doing: str, key: str, call: Callable[[], T]) -> T:
        return calling(doing, key, self._url, call)


def _size(file: Any) -> int:
    if not isinstance(file.size, int) or file.size < 0:
        raise ValueError("a size that is none")
    return file.size


def _read_at_most(response: Any, limit_bytes: int) -> bytes:
    """The body, or as much of it as shows that it is longer than ``limit_bytes``."""
    pieces = []
    read_bytes = 0
    for piece in response.iter_raw(_READ_BYTES):
        pieces.append(piece)
        read_bytes += len(piece)
        if read_bytes > limit_bytes:
            break
    return b"".join(pieces)


_quiet_lock = threading.Lock()
_quiet_count = 0
_quiet_restores = False


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """No progress bars meanwhile, unless ``HF_HUB_DISABLE_PROGRESS_BARS=0`` asks for them.

    They are a setting of the whole process, so the first upload turns them off and the last one on.
    """
    hub = importlib.import_module("huggingface_hub")
    global _quiet_count, _quiet_restores
    if hub.constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    with _quiet_lock:
        _quiet_count += 1
        if _quiet_count == 1:
            _quiet_restores = not hub.utils.are_progress_bars_disabled()
            hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_count -= 1
            if _quiet_count == 0 and _quiet_restores:
                hub.utils.enable_progress_bars()
