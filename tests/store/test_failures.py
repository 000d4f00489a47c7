"""What servers answer, and what becomes of it: the right error, and nothing secret in it."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    LimitExceeded,
    NotFound,
    StoreError,
    ThinwireError,
    Truncated,
    Unavailable,
    UnsafeStore,
)
from thinwire.store import Store, open_store
from thinwire.store.failures import translated

from .lying_server import KEY, SECRET, TOKEN, Answer, LyingServer, lying_server


@pytest.fixture(scope="module")
def server() -> Iterator[LyingServer]:
    with lying_server() as server:
        yield server


@pytest.fixture
def store(server: LyingServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.asked.clear()
    return open_store("s3://bucket/pre", retry_s=0)


CALLS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("a/b", limit_bytes=99),
    "get_range": lambda store: store.get_range("a/b", 1, 4),
    "look": lambda store: store.get_range("a/b", 0, 0),
    "put": lambda store: store.put("a/b", b"data"),
    "put_if_absent": lambda store: store.put_if_absent("a/b", b"data"),
    "list": lambda store: list(store.list("a/")),
    "delete": lambda store: store.delete(["a/b"]),
}


def s3_error(code: str) -> bytes:
    return (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{KEY} {SECRET}</Message>"
        f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><SignatureProvided>abcdef</SignatureProvided>"
        "</Error>"
    ).encode()


def failure(store: Store, operation: str) -> ThinwireError:
    with pytest.raises(ThinwireError) as caught:
        CALLS[operation](store)
    check_nothing_secret(caught.value)
    return caught.value


def check_nothing_secret(error: BaseException) -> None:
    shown = [str(error), repr(error), repr(getattr(error, "context", ""))]
    shown += traceback.format_exception(error)
    shown.append(str(pickle.dumps(error)))
    for secret in (KEY, SECRET, TOKEN, "Signature=", "AWS4-HMAC", "SignatureProvided", "abcdef"):
        for text in shown:
            assert secret not in text
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "InvalidRequest", StoreError),
        (400, "ExpiredToken", AccessDenied),
        (401, "", AccessDenied),
        (403, "AccessDenied", AccessDenied),
        (403, "SignatureDoesNotMatch", AccessDenied),
        (403, "RequestTimeTooSkewed", AccessDenied),
        (404, "NoSuchBucket", StoreError),
        (405, "MethodNotAllowed", StoreError),
        (409, "OperationAborted", Unavailable),
        (429, "", Unavailable),
        (500, "InternalError", Unavailable),
        (501, "NotImplemented", UnsafeStore),
        (503, "SlowDown", Unavailable),
        (504, "", Unavailable),
        (507, "", Unavailable),
    ],
)
def test_statuses(
    server: LyingServer, store: Store, operation: str, status: int, code: str, expected: type
) -> None:
    if operation == "look":
        # The answer to HEAD has no body, so no code.
        by_status = {"ExpiredToken": StoreError, "NoSuchBucket": NotFound}
        expected = by_status.get(code, expected)
    server.answers = [Answer(status, s3_error(code), echo=True)]
    error = failure(store, operation)
    assert type(error) is expected
    assert error.retryable == (expected is Unavailable)
    assert "s3://bucket/pre" in str(error)
    assert len(server.asked) == 1, "retried although retry_s is 0"
    if operation != "look":
        assert str(status) in str(error)


@pytest.mark.parametrize("operation", ["get", "get_range", "look", "put", "put_if_absent"])
def test_not_found_is_about_the_key(server: LyingServer, store: Store, operation: str) -> None:
    server.answers = [Answer(404, s3_error("NoSuchKey"))]
    error = failure(store, operation)
    assert type(error) is NotFound
    assert "a/b" in str(error)


def test_a_refused_creation(server: LyingServer, store: Store) -> None:
    server.answers = [Answer(412, s3_error("PreconditionFailed"), echo=True)]
    assert type(failure(store, "put_if_absent")) is AlreadyExists
    assert server.asked[0][2].get("if-none-match") == "*"


def test_a_creation_that_met_another_is_not_refused_for_good(
    server: LyingServer, store: Store
) -> None:
    server.answers = [Answer(409, s3_error("ConditionalRequestConflict"))]
    assert type(failure(store, "put_if_absent")) is Unavailable
    server.answers = [Answer(409, s3_error("Whatever"))]
    assert type(failure(store, "put")) is Unavailable


@pytest.mark.parametrize("operation", CALLS)
def test_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, server: LyingServer, store: Store, operation: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    found = failure(open_store("s3://bucket", retry_s=0), operation)
    assert type(found) is Unavailable
    assert "http://127.0.0.1:1 does not answer: the connection was refused" in str(found)


def test_a_name_that_nobody_has() -> None:
    """By obstore's words: some networks resolve every name."""
    text = (
        "Generic S3 error: Error performing GET http://nobody.invalid:8333/b/k in 1ms - HTTP error:"
        " error sending request\n\nDebug source:\nConnectError(dns error: secret)"
    )
    found = translated(Exception(text), "read", "k", "s3://b")
    assert type(found) is Unavailable
    assert "http://nobody.invalid:8333 does not answer: its name is not known" in str(found)
    assert "secret" not in str(found)


def test_a_range_that_is_ignored_costs_no_memory(server: LyingServer, store: Store) -> None:
    server.sent_bytes = 0
    server.answers = [
        Answer(200, bytes(1 << 16), {"Content-Length": str(1 << 40)}, forever=True, cut=True)
    ]
    assert type(failure(store, "get_range")) is StoreError
    assert server.sent_bytes < 64 << 20


def test_a_range_answered_by_more_is_cut_off(server: LyingServer, store: Store) -> None:
    server.sent_bytes = 0
    headers = {"Content-Range": "bytes 1-3/10", "Content-Length": str(1 << 40)}
    server.answers = [Answer(206, bytes(1 << 16), headers, forever=True, cut=True)]
    assert type(failure(store, "get_range")) is StoreError
    assert server.sent_bytes < 64 << 20


@pytest.mark.parametrize("answered", ["bytes 0-2/10", "bytes 2-4/10", "bytes 1-9/10", "nonsense"])
def test_another_range_than_asked_for(server: LyingServer, store: Store, answered: str) -> None:
    server.answers = [Answer(206, b"abc", {"Content-Range": answered})]
    assert isinstance(failure(store, "get_range"), StoreError)


def test_a_shorter_range_is_truncated(server: LyingServer, store: Store) -> None:
    server.answers = [Answer(206, b"ab", {"Content-Range": "bytes 1-2/3"})]
    assert type(failure(store, "get_range")) is Truncated
    server.answers = [Answer(416, s3_error("InvalidRange"))]
    assert type(failure(store, "get_range")) is Truncated


def test_a_body_that_breaks_off_can_be_fetched_again(server: LyingServer, store: Store) -> None:
    server.answers = [Answer(200, b"abc", {"Content-Length": "10"}, cut=True)]
    assert type(failure(store, "get")) is Unavailable
    server.answers = [
        Answer(206, b"a", {"Content-Length": "3", "Content-Range": "bytes 1-3/9"}, cut=True)
    ]
    assert type(failure(store, "get_range")) is Unavailable


def test_a_large_object_is_refused_before_its_body(server: LyingServer, store: Store) -> None:
    server.sent_bytes = 0
    server.answers = [
        Answer(200, bytes(1 << 16), {"Content-Length": str(1 << 40)}, forever=True, cut=True)
    ]
    error = failure(store, "get")
    assert type(error) is LimitExceeded
    assert error.context["size_bytes"] == 1 << 40
    assert server.sent_bytes < 64 << 20


@pytest.mark.parametrize("body", [b"", b"<html>", b"<ListBucketResult><Contents>", b"\xff\xfe"])
def test_a_listing_that_is_none(server: LyingServer, store: Store, body: bytes) -> None:
    server.answers = [Answer(200, body)]
    assert type(failure(store, "list")) is StoreError


def test_keys_that_no_one_may_use_are_left_out_of_listings(
    server: LyingServer, store: Store
) -> None:
    keys = ["pre/a/good", "pre/a/../../etc/passwd", "pre/a//x", "pre/b/other", "pre/a/&#10;x"]
    items = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2030-01-01T00:00:00Z"
        "</LastModified><ETag>x</ETag></Contents>"
        for key in keys
    )
    server.answers = [Answer(200, f"<ListBucketResult>{items}</ListBucketResult>".encode())]
    try:
        found = [entry.key for entry in store.list("a/")]
    except StoreError as error:
        check_nothing_secret(error)
    else:
        assert found == ["a/good"]


def test_a_failed_deletion_in_a_200(server: LyingServer, store: Store) -> None:
    body = (
        "<DeleteResult><Error><Key>pre/a/b</Key><Code>AccessDenied</Code>"
        f"<Message>{SECRET}</Message></Error></DeleteResult>"
    )
    server.answers = [Answer(200, body.encode())]
    assert type(failure(store, "delete")) is AccessDenied


def test_retries_and_their_end(server: LyingServer, store: Store) -> None:
    busy, found = Answer(503, s3_error("SlowDown")), Answer(200, b"abc")
    server.answers = [busy, busy, found]
    again = open_store("s3://bucket", retry_s=30)
    assert again.get("a", limit_bytes=9) == b"abc"
    assert len(server.asked) == 3
    server.answers = [busy]
    short = open_store("s3://bucket", retry_s=0.3)
    assert type(failure(short, "get")) is Unavailable
    server.answers = [Answer(403, s3_error("AccessDenied"))]
    server.asked.clear()
    assert type(failure(again, "get")) is AccessDenied
    assert len(server.asked) == 1


def test_a_forked_process_is_told_instead_of_hanging(store: Store, server: LyingServer) -> None:
    server.answers = [Answer(200, b"abc")]
    store.get("a", limit_bytes=9)
    child = os.fork()
    if child == 0:
        try:
            store.get("a", limit_bytes=9)
        except StoreError as error:
            os._exit(7 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
