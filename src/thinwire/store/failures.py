"""What an obstore exception means here, told without anything secret.

Servers echo requests, and obstore quotes servers: access keys, signatures and whole headers end up
in its messages. So nothing of such a message is passed on but the HTTP status and the server's
error code, and where there is no status one of a few reasons written down here. The exception is
not chained either: a traceback would print it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeVar

from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    StoreError,
    ThinwireError,
    Unavailable,
    UnsafeStore,
)

T = TypeVar("T")

# The only operation that may find out that something exists.
CREATE = "create"

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z][A-Za-z0-9_]{2,59})</Code>|\(code: ([A-Za-z]{3,60})\)")
_RETRYABLE_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 529}
_RETRYABLE_CODES = {
    "ConditionalRequestConflict",  # S3: two conditional writes met; neither was refused for good
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
}
_DENIED_CODES = {
    "AccessDenied",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_DENIED_NAMES = ("PermissionDeniedError", "UnauthenticatedError")
_NO_BUCKET_CODES = {"NoSuchBucket", "ContainerNotFound"}
# Error texts of obstore without an HTTP status that no retry would mend.
_FINAL_REASONS = {
    "non-partial response": "the server ignored the range that was asked for",
    "redirect without LOCATION": "the server redirects without saying where (a wrong region?)",
    "builder error": "the request cannot be made (plain http where https is due, or a bad URL?)",
    "Requested ": "the server answered with another range than was asked for",
}
# Why a server was not reached, by words of obstore's chain of errors.
_CAUSES = {
    "dns error": "its name is not known here",
    "ConnectionRefused": "the connection was refused",
    "invalid peer certificate": "its certificate is not trusted (SSL_CERT_FILE)",
}
_ADDRESS = re.compile(r"Error performing [A-Z]{3,7} (https?://[A-Za-z0-9.:\[\]-]{1,200})/")
_PAST_THE_END = ("StartTooLarge", "Wanted range starting at", "Requested range was invalid")
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class RangeBeyondEnd(StoreError):
    """The object ends before the range starts; ``get_range`` makes it ``Truncated``."""


def calling(doing: str, key: str, url: str, call: Callable[[], T]) -> T:
    """The result of ``call``, an obstore operation, or the ``StoreError`` for what it raised.

    Raises:
        StoreError: The operation failed.
        RangeBeyondEnd: It failed because the object ends before the range starts.
    """
    _refuse_forked(doing, url)
    try:
        return call()
    except ThinwireError:
        raise
    # obstore raises its own exceptions, ValueError, FileNotFoundError and other OSErrors.
    except Exception as error:
        failure = translated(error, doing, key, url)
    # Outside of the handler, so that not even __context__ holds what obstore said.
    raise failure


_used_by_process: int | None = None


def _refuse_forked(doing: str, url: str) -> None:
    """Fail where obstore would hang for ever: its threads do not live on in a forked process."""
    global _used_by_process
    if _used_by_process is None:
        _used_by_process = os.getpid()
    elif _used_by_process != os.getpid():
        raise StoreError(
            f"cannot {doing} in {url}: this process was forked from one that had used a store",
            hint="Start processes by spawn or forkserver, or use stores in the child only",
            url=url,
        )


def translated(error: Exception, doing: str, key: str, url: str) -> StoreError:
    """The error to raise for what obstore raised."""
    text = str(error)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else None
    code = _error_code(text)
    cls, reason, hint = _verdict(error, text, doing, status, code)
    if status is not None:
        reason = f"{reason} (HTTP {status}{f', {code}' if code else ''})"
    target = f"{key} in {url}" if key else url
    return cls(
        f"cannot {doing} {target}: {reason}",
        hint=hint,
        operation=doing,
        key=key,
        url=url,
        status=status,
        error_code=code,
    )


def _error_code(text: str) -> str | None:
    # Only the first line and only a word: a hostile server could put anything here.
    found = _CODE.search(text.partition("\n\nDebug source")[0])
    return (found.group(1) or found.group(2)) if found else None


def _verdict(
    error: Exception, text: str, doing: str, status: int | None, code: str | None
) -> tuple[type[StoreError], str, str]:
    name = type(error).__name__
    if status == 416 or (status is None and any(part in text for part in _PAST_THE_END)):
        return RangeBeyondEnd, "it ends before the range starts", "Fetch or write it again"
    if code in _RETRYABLE_CODES or status in _RETRYABLE_STATUS:
        return Unavailable, "the store is busy or failing", "Try again later"
    if code in _NO_BUCKET_CODES:
        return StoreError, "there is no such bucket", "Create the bucket, or check the URL"
    if status in (401, 403) or name in _DENIED_NAMES or code in _DENIED_CODES:
        return (
            AccessDenied,
            "the store refused access",
            "Check the credentials, their rights on this bucket, and this machine's clock",
        )
    if any(host in text for host in _METADATA_SERVERS):
        return (
            AccessDenied,
            "no credentials were found, and this machine's metadata service gave none",
            "Set the usual variables, e.g. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if name in ("AlreadyExistsError", "PreconditionError"):
        if doing != CREATE:
            # HTTP 409 and 412 also say that another request for the key was under way.
            return Unavailable, "another request got in the way", "Try again later"
        return AlreadyExists, "it exists already", ""
    if isinstance(error, FileNotFoundError):
        return NotFound, "there is no such object", "Check the URL and the key"
    if name == "NotSupportedError" or status == 501:
        return UnsafeStore, "the store does not support this operation", "Use another store"
    return _generic_verdict(text, status)


def _no_answer(text: str) -> str:
    """Who does not answer, and why: the address is the client's own word."""
    cause = next((cause for part, cause in _CAUSES.items() if part in text), "")
    address = _ADDRESS.search(text.partition("\n")[0])
    if not cause or address is None:
        return "no answer, or the connection broke"
    return f"{address.group(1)} does not answer: {cause}"


def _generic_verdict(text: str, status: int | None) -> tuple[type[StoreError], str, str]:
    if status is not None:
        return StoreError, "the store refused the request", "Check the URL and the endpoint"
    for part, reason in _FINAL_REASONS.items():
        if part in text:
            return StoreError, reason, "Check the URL, the region and the endpoint"
    if "error sending request" in text or "body error" in text or "timed out" in text:
        return Unavailable, _no_answer(text), "Check the endpoint and the network, then retry"
    if "invalid list response" in text or "DeleteObjects" in text:
        return StoreError, "the server's answer makes no sense", "Check the endpoint"
    return Unavailable, "the request failed", "Check the endpoint and the credentials, then retry"
