"""Hugging Face's S3 gateway as any S3 endpoint, with the real one's limits on a server of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from thinwire.errors import AccessDenied
from thinwire.store import Store, open_store
from thinwire.testing import STORE_CHECKS

from .conftest import S3Server, set_environment
from .hf_gateway import Gateway, hf_gateway


@pytest.fixture(scope="module")
def running_gateway(seaweedfs_server: S3Server) -> Iterator[Gateway]:
    with hf_gateway(seaweedfs_server) as gateway:
        yield gateway


@pytest.fixture
def gateway(running_gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    set_environment(monkeypatch, running_gateway.server)
    for noted in (running_gateway.broken_rules, running_gateway.redirected):
        noted.clear()
    running_gateway.cdn_headers.clear()
    return running_gateway


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_the_contract_through_the_s3_gateway(
    check: Callable[[Store], None], gateway: Gateway
) -> None:
    check(open_store(f"{gateway.server.url}/contract/{check.__name__}", retry_s=0))
    assert gateway.broken_rules == []
    assert not any("authorization" in headers for headers in gateway.cdn_headers)


def test_the_gateway_redirects_ranges_without_the_signature(gateway: Gateway) -> None:
    store = open_store(f"{gateway.server.url}/ranges", retry_s=0)
    store.put("a", b"0123456789")
    assert store.get_range("a", 3, 6) == b"345"
    assert store.get("a", limit_bytes=10) == b"0123456789"
    assert len(gateway.redirected) == 2
    assert [headers.get("range") for headers in gateway.cdn_headers] == ["bytes=3-5", None]


def test_the_gateway_notices_what_it_does_not_have(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore
    from obstore.store import S3Store

    server = gateway.server
    client = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=server.key,
        secret_access_key=server.secret,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    with pytest.raises(obstore.exceptions.BaseError):
        obstore.put(client, "a", b"x", attributes={"step": "7"}, use_multipart=False)
    assert [rule.rpartition(" ")[2] for rule in gateway.broken_rules] == ["UserMetadata"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "notTheRightOne")
    with pytest.raises(AccessDenied):
        open_store(server.url, retry_s=0).put("a", b"x")
