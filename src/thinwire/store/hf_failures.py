"""What an exception of huggingface_hub or hf-xet means here, told without anything secret.

Servers echo requests, and huggingface_hub quotes servers: a token can end up in its messages. So
nothing of such a message is passed on but the HTTP status and the Hub's error code, and the
exception is not chained: a traceback would print it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from thinwire.errors import (
    AccessDenied,
    InvalidArgument,
    NotFound,
    StoreError,
    ThinwireError,
    Unavailable,
)

T = TypeVar("T")

# What the Hub answers to a batch of which it did nothing.
ALL_FAILED = 422
_RETRYABLE_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 529}
# hf-xet tells the status in words only.
_XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})\b")
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_]{2,59}")
# Of httpx and httpx2: below TransportError, but no retry would mend them.
_BAD_REQUESTS = {"UnsupportedProtocol", "LocalProtocolError", "InvalidURL", "TooManyRedirects"}
_LOG_IN = "Log in (hf auth login) or set HF_TOKEN, to a token that has rights on this bucket"
_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def calling(doing: str, key: str, url: str, call: Callable[[], T]) -> T:
    """The result of ``call``, or the error of ours for what it raised.

    Raises:
        StoreError: The operation failed.
        InvalidArgument: A package that it needs is missing.
    """
    try:
        return call()
    except ThinwireError:
        raise
    # huggingface_hub, httpx and hf-xet have no common root of their errors.
    except Exception as error:
        failure = _translated(error, doing, key, url)
    # Outside of the handler, so that not even __context__ holds what was said.
    raise failure


def refusal(
    doing: str,
    key: str,
    url: str,
    status: int | None,
    code: str | None,
    *,
    is_elsewhere: bool = False,
) -> StoreError:
    """The error for a refusal by the Hub.

    Args:
        doing: The operation.
        key: Of which object, or of what.
        url: The store's.
        status: The HTTP status; None: it was listed as failed among others that were done.
        code: The Hub's word for what is wrong, if it gave one.
        is_elsewhere: Not by the Hub, but by the place it redirected to.
    """
    if code is not None and not _CODE.fullmatch(code):
        code = None
    cls, reason, hint = _verdict(doing, status, code, is_elsewhere)
    if status is not None:
        reason += f" (HTTP {status}{f', {code}' if code else ''})"
    return _failure(cls, reason, hint, doing, key, url, status, code)


def _verdict(
    doing: str, status: int | None, code: str | None, is_elsewhere: bool
) -> tuple[type[StoreError], str, str]:
    if status is None or status == ALL_FAILED:
        return Unavailable, "the Hub tells that it failed, not why", "Try again later"
    if is_elsewhere:
        # The Hub knows the object, and signs a new URL each time.
        return Unavailable, "where the Hub redirected to, it is not given out", "Try again later"
    if status in _RETRYABLE_STATUS:
        return Unavailable, "the Hub is busy or failing", "Try again later"
    if status in (401, 403):
        return AccessDenied, "the Hub refused access", _LOG_IN
    if code == "EntryNotFound" or (status == 404 and doing == "read" and code is None):
        return NotFound, "there is no such object", "Check the URL and the key"
    if status == 404:
        return (
            StoreError,
            "there is no such bucket, or this token may not see it",
            f"Create it (hf buckets create NAMESPACE/NAME), or check the URL. {_LOG_IN}",
        )
    return StoreError, "the Hub refused the request", "Check the URL, the key and HF_ENDPOINT"


def _translated(error: Exception, doing: str, key: str, url: str) -> ThinwireError:
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ImportError):
        return InvalidArgument(
            f"cannot {doing} in {url}: a package that huggingface_hub needs for it is missing",
            hint="pip install 'thinwire[hf]'",
        )
    if "OfflineModeIsEnabled" in names:
        hint = "Unset HF_HUB_OFFLINE"
        return _failure(StoreError, "huggingface_hub is set offline", hint, doing, key, url)
    if getattr(error, "failures", None):
        return refusal(doing, key, url, None, None)
    response = getattr(error, "response", None)
    if response is not None:
        code = response.headers.get("X-Error-Code")
        return refusal(doing, key, url, response.status_code, code)
    found = _XET_STATUS.search(str(error))
    if found:
        return refusal(doing, key, url, int(found[1]), None)
    if isinstance(error, PermissionError) or "XetAuthorizationError" in names:
        return _failure(AccessDenied, "access was refused", _LOG_IN, doing, key, url)
    if names & _BAD_REQUESTS:
        hint = "Check HF_ENDPOINT, HF_TOKEN and the proxies"
        return _failure(StoreError, "the request cannot be made", hint, doing, key, url)
    if isinstance(error, _NONSENSE):
        hint = "Check HF_ENDPOINT, and the versions of huggingface_hub and hf-xet"
        return _failure(StoreError, "the Hub's answer makes no sense", hint, doing, key, url)
    reason = "no answer, or the connection broke"
    return _failure(Unavailable, reason, "Check the network, then retry", doing, key, url)


def _failure(
    cls: type[StoreError],
    reason: str,
    hint: str,
    doing: str,
    key: str,
    url: str,
    status: int | None = None,
    code: str | None = None,
) -> StoreError:
    return cls(
        f"cannot {doing} {f'{key} in {url}' if key else url}: {reason}",
        hint=hint,
        operation=doing,
        key=key,
        url=url,
        status=status,
        error_code=code,
    )
