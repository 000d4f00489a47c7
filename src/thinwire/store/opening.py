"""From a URL to a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from thinwire.errors import InvalidArgument
from thinwire.store.aws import s3_options
from thinwire.store.file_store import FileStore
from thinwire.store.hf_buckets import open_bucket
from thinwire.store.object_store import ObjectStore
from thinwire.store.store import Store, key_fault
from thinwire.store.wrappers import RetryingStore, SingleWriterStore

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

# From the start of a request: enough for 64 MiB of parts at 10 Mbit/s, see ObjectStore.
_READ_TIMEOUT = "60s"
_CONNECT_TIMEOUT = "10s"
# Of a whole request with its body. Stalls are found by the read timeout; obstore's default of 30 s
# would break off a large download over a slow link.
_REQUEST_TIMEOUT = "6h"
# obstore's own retries mend a part of an upload without sending the whole file again.
_PART_RETRIES = 3

_memory_lock = threading.Lock()
_memory_stores: dict[str, ObjectStore] = {}


def open_store(url: str, *, single_writer: bool = False, retry_s: float = 60.0) -> Store:
    """The store at a URL, or at a plain path.

    ``file:///path``, ``memory://NAME`` (one per name and process), ``s3://BUCKET/PATH`` (any
    endpoint through ``AWS_ENDPOINT_URL``), ``gs://BUCKET/PATH``, ``az://CONTAINER/PATH``,
    ``abfs[s]://CONTAINER[@ACCOUNT.dfs.core.windows.net]/PATH``,
    ``hf://buckets/NAMESPACE/NAME/PATH`` (no put-if-absent: writers need ``single_writer``),
    ``http[s]://HOST:PORT[/NAME]`` (a relay: to read from, see :mod:`thinwire.store.http_store`).
    Credentials come from the environment, for S3 also from profiles and for ``hf://`` from the
    log-in; never from the URL. Nothing is contacted yet.

    Args:
        url: Where.
        single_writer: Replace put-if-absent by looking and writing, for a store that has none.
            Safe only where there is one publisher at a time.
        retry_s: How long to go on after retryable failures; 0 for not at all.

    Raises:
        InvalidArgument: The URL is of no known kind or holds a secret, or what the environment
            says does not make a client.
    """
    store = _bare_store(url, retry_s)
    if single_writer:
        store = SingleWriterStore(store)
    return RetryingStore(store, retry_s) if retry_s > 0 else store


def _bare_store(url: str, retry_s: float) -> Store:
    if "://" not in url:
        scheme, colon, _ = url.partition(":/")
        if colon and scheme.lower() in _OPENERS:
            raise InvalidArgument(
                f"{scheme}:/ is no URL and hardly a folder", hint=f"Write {scheme}://..."
            )
        return _at_path(url)
    scheme = url.partition("://")[0].lower()
    opener = _OPENERS.get(scheme)
    if opener is None:
        known = ", ".join(f"{name}://" for name in _OPENERS)
        # Only a scheme that looks like one is repeated: a typing error may hold anything.
        shown = f"{scheme!r} " if scheme.isalnum() and len(scheme) < 12 else ""
        raise InvalidArgument(
            f"the store URL's scheme {shown}is not known", hint=f"Use a path or one of {known}"
        )
    return opener(_checked_url(url, scheme), retry_s)


def _checked_url(url: str, scheme: str) -> SplitResult:
    """The parts of a URL that holds no secret; the URL is not repeated in errors.

    A secret with a slash in it moves the "@" into the path, and leaves a colon in the host.
    """
    try:
        parts = urlsplit(url)
        has_password = parts.password is not None
    except ValueError:
        raise InvalidArgument(f"this {scheme}:// URL cannot be read", hint="Check it") from None
    is_bucket = scheme not in ("file", "memory", "http", "https")
    # Azure's own URLs have the container before the "@".
    has_user = parts.username is not None and not scheme.startswith("abfs")
    misplaced = is_bucket and (":" in parts.netloc or "@" in parts.path)
    if has_user or has_password or misplaced or parts.query:
        raise InvalidArgument(
            f"the {scheme}:// URL holds a user, a password or a query",
            hint="Give credentials in the environment or a profile, never in a URL"
            " (and write an '@' in a path as %40)",
        )
    if parts.fragment:
        raise InvalidArgument(f"the {scheme}:// URL has a '#'", hint="Write it as %23")
    return parts


def _at_path(path: str) -> Store:
    if not path or "\0" in path:
        raise InvalidArgument("the store's path is empty or no path", hint="Give a folder or a URL")
    return FileStore(Path(path))


def _open_file(parts: SplitResult, retry_s: float) -> Store:
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidArgument(
            f"{parts.geturl()} is not an absolute file URL",
            hint="Write file:///folder, or just the path",
        )
    return _at_path(unquote(parts.path))


def _open_memory(parts: SplitResult, retry_s: float) -> Store:
    from obstore.store import MemoryStore

    name = f"memory://{parts.netloc}{parts.path.rstrip('/')}"
    with _memory_lock:
        if name not in _memory_stores:
            _memory_stores[name] = ObjectStore(MemoryStore(), name)
        return _memory_stores[name]


def _open_s3(parts: SplitResult, retry_s: float) -> Store:
    from obstore.store import S3Store

    bucket, prefix, url = _bucket(parts)
    options = s3_options(os.environ)
    client_options = _client_options(options.pop("client_options", {}))
    client = _built(
        url,
        lambda: S3Store(
            bucket,
            prefix=prefix,
            client_options=client_options,
            retry_config=_retry_config(retry_s),
            **options,
        ),
    )
    return ObjectStore(client, url)


def _open_google(parts: SplitResult, retry_s: float) -> Store:
    from obstore.store import GCSStore

    bucket, prefix, url = _bucket(parts)
    client = _built(
        url,
        lambda: GCSStore(
            bucket,
            prefix=prefix,
            client_options=_client_options({}),
            retry_config=_retry_config(retry_s),
        ),
    )
    return ObjectStore(client, url)


def _open_azure(parts: SplitResult, retry_s: float) -> Store:
    from obstore.store import AzureStore

    _, prefix, url = _bucket(parts)
    container, _, host = parts.netloc.rpartition("@")
    options: dict[str, Any] = {}
    if container:
        options["account_name"] = host.partition(".")[0]
        if ".fabric.microsoft.com" in host:
            options["use_fabric_endpoint"] = True
    else:
        container = host
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT") or ""
    allow_http = endpoint.lower().startswith("http://")
    client = _built(
        url,
        lambda: AzureStore(
            container,
            prefix=prefix,
            client_options=_client_options({"allow_http": True} if allow_http else {}),
            retry_config=_retry_config(retry_s),
            **options,
        ),
    )
    return ObjectStore(client, url)


def _open_http(parts: SplitResult, retry_s: float) -> Store:
    from thinwire.store.http_store import open_http

    return open_http(parts, os.environ)


def _bucket(parts: SplitResult) -> tuple[str, str | None, str]:
    """The bucket, the path in it, and the URL to show."""
    path = unquote(parts.path).removeprefix("/").removesuffix("/")
    if not parts.netloc:
        raise InvalidArgument(
            f"the {parts.scheme}:// URL names no bucket", hint=f"Write {parts.scheme}://BUCKET/PATH"
        )
    fault = key_fault(path) if path else None
    if fault is not None:
        raise InvalidArgument(
            f"the path of the {parts.scheme}:// URL {fault}",
            hint="Use plain names joined by single slashes",
        )
    url = f"{parts.scheme}://{parts.netloc}"
    return parts.netloc, path or None, f"{url}/{path}" if path else url


def _built(url: str, build: Callable[[], Any]) -> Any:
    """A client; what obstore says of a failure is not repeated, as it may quote a credential."""
    try:
        return build()
    except Exception as error:
        kind = type(error).__name__
    raise InvalidArgument(
        f"no client for {url} can be made of what the environment says ({kind})",
        hint="Check the account, the region, the endpoint and the credentials in the environment",
        url=url,
    )


def _client_options(more: ClientConfig) -> ClientConfig:
    return {
        "connect_timeout": _CONNECT_TIMEOUT,
        "read_timeout": _READ_TIMEOUT,
        "timeout": _REQUEST_TIMEOUT,
        **more,
    }


def _retry_config(retry_s: float) -> RetryConfig:
    return {
        "max_retries": _PART_RETRIES if retry_s > 0 else 0,
        "retry_timeout": timedelta(seconds=min(retry_s, 60.0)),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }


_OPENERS: dict[str, Callable[[SplitResult, float], Store]] = {
    "file": _open_file,
    "memory": _open_memory,
    "s3": _open_s3,
    "gs": _open_google,
    "az": _open_azure,
    "abfs": _open_azure,
    "abfss": _open_azure,
    "hf": lambda parts, _: open_bucket(parts, os.environ),
    "http": _open_http,
    "https": _open_http,
}
