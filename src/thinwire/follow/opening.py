"""Opening a stream by its URL."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from thinwire.errors import InvalidArgument
from thinwire.follow.key_files import read_signing_key
from thinwire.follow.relayed import RelayedStore
from thinwire.follow.relays import open_relay
from thinwire.follow.stream import Stream
from thinwire.store import Store, open_store
from thinwire.store.http_token import is_near
from thinwire.stream.records import Policy
from thinwire.stream.signing import SigningKey

_LOG = logging.getLogger("thinwire")


def open_stream(
    url: str | os.PathLike[str] | Store,
    *,
    model: str = "",
    policy: Policy | None = None,
    signing_key: SigningKey | str | os.PathLike[str] | None = None,
    trusted_keys: Collection[str] = (),
    single_writer: bool = False,
    retry_s: float = 60.0,
    relay: str | Store | None = None,
) -> Stream:
    """Open the stream at ``url``, which need not exist yet: its first publisher makes it.

    Args:
        url: ``file://``, ``memory://``, ``s3://``, ``gs://``, ``az://``, ``hf://``, a folder's
            ``http[s]://`` (a relay's), path, or a :class:`thinwire.store.Store`. Credentials come
            from the usual environment only.
        model: The model's name, kept in the stream when it is made.
        policy: How the stream is looked after, kept in it when it is made; later on
            :func:`thinwire.set_policy` changes it.
        signing_key: For publishers and maintainers: they sign with it. A key, or the path of a file
            that ``thinwire keygen`` made.
        trusted_keys: Public keys to pin: whatever is not signed by one of them is refused. With a
            signing key and none of these, its own public key is pinned.
        single_writer: The caller vouches that only one process ever writes, so that a store
            without put-if-absent will do.
        retry_s: How long to retry what may be a passing failure of the store.
        relay: The URL of a relay nearby to read through; see
            :class:`thinwire.follow.relayed.RelayedStore`. Without ``trusted_keys`` only what
            manifests name comes through it.

    Raises:
        InvalidArgument: The URL, the relay's, the policy or a key is malformed; or a stream is to
            be read over plain HTTP from another machine with nothing that proves it.
        AccessDenied: Others than its owner may read the file of the signing key.
    """
    if isinstance(signing_key, str | os.PathLike):
        signing_key = read_signing_key(Path(signing_key))
    if signing_key is not None and not trusted_keys:
        trusted_keys = [signing_key.public]
    if isinstance(url, str | os.PathLike):
        if not trusted_keys:
            _check_way(os.fspath(url))
        own_retry_s = retry_s if relay is None else 0.0
        url = open_store(os.fspath(url), single_writer=single_writer, retry_s=own_retry_s)
    if relay is not None:
        before = open_relay(relay) if isinstance(relay, str) else relay
        url = RelayedStore(before, url, trusted_keys=trusted_keys, retry_s=retry_s)
    return Stream(
        url,
        model=model,
        policy=policy,
        signing_key=signing_key,
        trusted_keys=trusted_keys,
    )


def _check_way(url: str) -> None:
    """Refuse to believe whoever is in between: of a stream without pinned keys nothing else does.

    Raises:
        InvalidArgument: It is plain HTTP to another machine.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        return
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        # Whoever opens it says what is wrong.
        return
    if is_near(host):
        return
    if scheme == "http":
        raise InvalidArgument(
            f"what comes from {host} over plain HTTP could be anybody's: no keys are pinned",
            hint="Pin the stream's keys (--trust, trusted_keys=), or read it from its bucket and"
            " name the relay beside (--relay, relay=)",
        )
    _LOG.warning(
        "no keys are pinned: %s alone says what the stream is (pin its keys with --trust, or read"
        " it from its bucket, with --relay)",
        host,
    )
