"""What a relay answers, request by request."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.errors import AccessDenied, StoreError
from thinwire.follow import Follower, open_stream
from thinwire.relay.ranges import Span, span_of
from thinwire.store import StoreWrapper
from thinwire.stream import keys
from thinwire.stream.encoding import encode
from thinwire.stream.records import Lease
from thinwire.web import Role, Tokens

from .making import (
    DictStore,
    Running,
    Upstream,
    data_keys,
    history,
    large,
    maintained,
    manifest_of,
    publish,
    relaying,
    until,
)

HOLDER = "ab" * 16


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> DictStore:
    store = DictStore()
    publish(store, tmp_path_factory.mktemp("baseline"), [large(size_bytes=1 << 20)])
    return store


@pytest.fixture(scope="module")
def relay(stored: DictStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with relaying(Upstream(stored), tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest.fixture(scope="module")
def key(stored: DictStore) -> str:
    (found,) = [key for key, size in data_keys(stored, 1).items() if size > 1 << 19]
    return found


# RFC 9110, section 14: what is asked of 1000 bytes, and what is due (None: 416).
RANGES = [
    ("bytes=0-0", (0, 1)),
    ("bytes=0-999", (0, 1000)),
    ("bytes=500-", (500, 1000)),
    ("bytes=-1", (999, 1000)),
    ("bytes=-1000", (0, 1000)),
    ("bytes=-5000", (0, 1000)),
    ("bytes=990-5000", (990, 1000)),
    ("Bytes=1-2", (1, 3)),
    ("bytes= 1-2 ", (1, 3)),
    ("bytes=1000-", None),
    ("bytes=1000-2000", None),
    ("bytes=9999999999999999999-", None),
    ("bytes=-0", None),
    # Several ranges are refused.
    ("bytes=0-1,5-6", None),
    ("bytes=-1, 0-1", None),
    # What is no range is as if it were not there.
    ("bytes=2-1", "whole"),
    ("bytes=-", "whole"),
    ("bytes=a-b", "whole"),
    ("bytes=0-99999999999999999999", "whole"),
    ("lines=0-1", "whole"),
    ("bytes 0-1", "whole"),
    ("", "whole"),
]


@pytest.mark.parametrize(("header", "due"), RANGES)
def test_ranges(header: str, due: tuple[int, int] | str | None) -> None:
    found = span_of(header, 1000)
    if due is None:
        assert found is None
    elif due == "whole":
        assert found == Span(0, 1000, is_part=False)
    else:
        assert isinstance(due, tuple)
        assert found == Span(*due, is_part=True)


@given(st.text(max_size=40), st.integers(0, 1 << 40))
def test_any_text_is_some_range(header: str, size_bytes: int) -> None:
    found = span_of(header, size_bytes)
    assert found is None or 0 <= found.start <= found.stop <= size_bytes


def test_nothing_of_an_empty_object() -> None:
    assert span_of("bytes=0-0", 0) is None
    assert span_of("bytes=-1", 0) is None
    assert span_of(None, 0) == Span(0, 0, is_part=False)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_ranges_of_an_object(
    data: st.DataObject, relay: Running, key: str, stored: DictStore
) -> None:
    whole = stored.get(key, limit_bytes=1 << 30)
    start = data.draw(st.integers(0, len(whole) - 1))
    last = data.draw(st.integers(start, len(whole) + 10))
    answer = relay.get(f"/o/{key}", range=f"bytes={start}-{last}")
    assert answer.status_code == 206
    assert answer.content == whole[start : last + 1]
    stop = min(last, len(whole) - 1)
    assert answer.headers["content-range"] == f"bytes {start}-{stop}/{len(whole)}"


def test_whole_objects_and_heads(relay: Running, key: str, stored: DictStore) -> None:
    whole = stored.get(key, limit_bytes=1 << 30)
    answer = relay.get(f"/o/{key}")
    assert (answer.status_code, answer.content) == (200, whole)
    assert answer.headers["accept-ranges"] == "bytes"
    for path in (f"/o/{key}", "/o/stream.json"):
        got, head = relay.get(path), relay.ask("HEAD", path)
        assert head.status_code == 200
        assert head.content == b""
        # As RFC 9110 has it: the same fields as for GET.
        for name in ("content-length", "etag", "accept-ranges", "content-type"):
            assert head.headers[name] == got.headers[name]
        # A Range is for GET alone.
        assert relay.ask("HEAD", path, range="bytes=0-0").status_code == 200


def test_a_range_that_is_not_there(relay: Running, key: str, stored: DictStore) -> None:
    size = len(stored.get(key, limit_bytes=1 << 30))
    for header in (f"bytes={size}-", "bytes=0-1,3-4"):
        answer = relay.get(f"/o/{key}", range=header)
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{size}"
        assert answer.json()["error"]["code"] == "range"


def test_if_range(relay: Running, key: str) -> None:
    etag = relay.ask("HEAD", f"/o/{key}").headers["etag"]
    fits = {"range": "bytes=0-3", "if-range": etag}
    assert relay.get(f"/o/{key}", **fits).status_code == 206
    for other in ('"other"', f"W/{etag}", "Wed, 21 Oct 2015 07:28:00 GMT"):
        answer = relay.get(f"/o/{key}", **(fits | {"if-range": other}))
        assert answer.status_code == 200
        assert len(answer.content) > 1 << 19


def test_nothing_else_of_the_bucket_can_be_read(
    relay: Running, key: str, stored: DictStore
) -> None:
    lineage = manifest_of(stored, 1).lineage
    secret = {
        "secret.txt": b"1",
        f"{lineage}/secret.json": b"2",
        f"{lineage}/deltas/{1:012d}-{2:012d}/{'a' * 16}-0000-{'b' * 32}.tw": b"3",
        f"{lineage}/anchors/{1:012d}-{'c' * 16}/model.safetensors": b"4",
        f"{lineage}/anchors/{1:012d}-{key.split('-')[1].split('/')[0]}/other": b"5",
        f"leases/{1:012d}-{HOLDER}.json": b"6",
        "leases/maintainer.json": b"7",
        f"{lineage}/manifests/x.json": b"8",
    }
    for name, data in secret.items():
        stored.put(name, data)
    try:
        for name in secret:
            assert relay.get(f"/o/{name}").status_code in (404, 405), name
        listed = [entry[0] for entry in relay.get("/list?prefix=&after=").json()["entries"]]
        assert f"leases/{1:012d}-{HOLDER}.json" not in listed
        assert "secret.txt" not in listed
        assert key in listed
    finally:
        stored.delete(secret)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/o",
        "/o/",
        "/o//head.json",
        "/o/../head.json",
        "/o/%2e%2e/head.json",
        "/o/%2fhead.json",
        "/o/head.json%00",
        "/o/HEAD.json",
        "/o/" + "a" * 5000,
        "/other",
        "/list/x",
    ],
)
def test_paths_that_are_none(relay: Running, path: str) -> None:
    answer = relay.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not-found"


def test_methods_that_are_none(relay: Running, key: str) -> None:
    for method, path, allowed in (
        ("POST", f"/o/{key}", "GET, HEAD"),
        ("PUT", "/o/head.json", "GET, HEAD"),
        ("DELETE", f"/o/{key}", "GET, HEAD"),
        ("GET", f"/o/leases/{1:012d}-{HOLDER}.json", "PUT, DELETE"),
        ("POST", "/list", "GET, HEAD"),
    ):
        answer = relay.ask(method, path, b"x")
        assert answer.status_code == 405, path
        assert answer.headers["allow"] == allowed


def test_lists_page_by_page(tmp_path: Path) -> None:
    store = DictStore()
    lineage = "ab" * 16
    names = [keys.manifest(lineage, version) for version in range(1, 2_502)]
    for name in names:
        store.put(name, b"x")
    with relaying(store, tmp_path / "cache") as relay:
        found, after = [], ""
        for _ in range(3):
            answer = relay.get(f"/list?prefix={lineage}/manifests/&after={after}").json()
            found += [entry[0] for entry in answer["entries"]]
            after = answer["next"]
        assert found == names
        assert after is None
        for query in ("prefix=x", "prefix=../", "prefix=%ff/", "prefix=a//", "a=1&" * 20):
            assert relay.get(f"/list?{query}").status_code == 400, query


def lease(version: int, holder: str = HOLDER) -> tuple[str, bytes]:
    data = encode(Lease(1, holder, "cd" * 16, version, 1800))
    return f"/o/{keys.lease(holder, version)}", data


def leased(store: DictStore) -> list[str]:
    return store.find("leases/")


def wait_for_lease(store: DictStore, version: int | None) -> list[str]:
    due = [] if version is None else [version]
    until(lambda: [keys.leased_version(key) for key in leased(store)] == due)
    return leased(store)


def test_one_lease_for_all_followers(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", history(2))
    with relaying(store, tmp_path / "cache", poll_s=0.05) as relay:
        for number, version in enumerate((7, 5, 9)):
            path, data = lease(version, f"{number:032x}")
            assert relay.ask("PUT", path, data).status_code == 204
        wait_for_lease(store, 5)
        # An older version is needed now; the other lease goes once this one is written.
        path, data = lease(3, f"{9:032x}")
        assert relay.ask("PUT", path, data).status_code == 204
        (own,) = wait_for_lease(store, 3)
        assert HOLDER not in own
        # One that goes on takes its old one back, which by then is another version's.
        path, data = lease(4, f"{9:032x}")
        assert relay.ask("PUT", path, data).status_code == 204
        old, _ = lease(3, f"{9:032x}")
        assert relay.ask("DELETE", old).status_code == 204
        assert relay.metric("leases") == 4
        oldest = relay.one.needs.oldest()
        assert oldest is not None
        assert oldest.version == 4
    # It stays where the relay is started again: followers say what they need after minutes only.
    assert [keys.leased_version(key) for key in leased(store)] == [3]


def test_a_relay_that_may_not_write_leases_says_so(tmp_path: Path) -> None:
    class ReadOnly(StoreWrapper):
        def put(self, key: str, data: bytes) -> None:
            raise AccessDenied(f"cannot write {key}")

    store = DictStore()
    publish(store, tmp_path / "baseline", history(1))
    with relaying(ReadOnly(store), tmp_path / "cache") as relay:
        # Also the very first one.
        for number in range(3):
            path, data = lease(5, f"{number:032x}")
            answer = relay.ask("PUT", path, data)
            assert answer.status_code == 403
            assert "may not write leases" in answer.json()["error"]["message"]
        assert relay.metric("leases") == 0
        with Follower(open_stream(store, relay=relay.url), tmp_path / "f") as follower:
            follower.catch_up()
            # So a follower that may writes its own.
            assert [keys.leased_version(key) for key in leased(store)] == [1]


def test_a_name_that_is_none_is_told_from_an_object_that_is_not_there(relay: Running) -> None:
    answer = httpx.get(f"{relay.root}/nope/o/head.json", trust_env=False)
    assert answer.status_code == 421
    assert "thinwire-absent" not in answer.headers
    assert "no such stream here" in answer.json()["error"]["message"]
    assert "run" in answer.json()["error"]["hint"]
    gone = relay.get(f"/o/{keys.manifest('ef' * 16, 3)}")
    assert (gone.status_code, gone.headers["thinwire-absent"]) == (404, "1")
    # Where a person looks who has read a key in a log.
    below = relay.get("/head.json")
    assert (below.status_code, "thinwire-absent" in below.headers) == (404, False)
    assert "/run/o/" in below.json()["error"]["hint"]


def test_leases_that_are_none(relay: Running) -> None:
    path, data = lease(5)
    other, _ = lease(6)
    for body in (b"", b"{}", b"x" * 70_000, data + b" ", data.replace(b"cdcd", b"CDCD")):
        assert relay.ask("PUT", path, body).status_code in (400, 413), body[:50]
    assert relay.ask("PUT", other, data).status_code == 400
    assert relay.metric("leases") == 0


def test_leases_go_through_the_follower(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", history(2))
    with relaying(store, tmp_path / "cache", poll_s=0.05) as relay:
        with Follower(open_stream(relay.url), tmp_path / "f") as follower:
            follower.catch_up()
            # It began its way with version 1.
            wait_for_lease(store, 1)
        wait_for_lease(store, None)


def test_tokens(stored: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.store import open_store

    tokens = {role: secrets.token_hex(16) for role in Role}
    known = Tokens({token: role for role, token in tokens.items()})
    with relaying(stored, tmp_path / "cache", tokens=known) as relay:
        bearer = {role: {"authorization": f"Bearer {token}"} for role, token in tokens.items()}
        assert httpx.get(f"{relay.root}/health", trust_env=False).json() == {"status": "ok"}
        paths = ["/o/head.json", "/list?prefix=", "/o/nothing"]
        for path in paths:
            nobody = relay.get(path)
            assert nobody.status_code == 401
            assert nobody.headers["www-authenticate"] == "Bearer"
            assert relay.get(path, authorization="Bearer " + "x" * 32).status_code == 401
            for role in (Role.READ, Role.PUBLISH):
                assert relay.get(path, **bearer[role]).status_code == 403
            assert relay.get(path, **bearer[Role.FOLLOW]).status_code in (200, 404)
        metrics = f"{relay.root}/metrics"
        assert httpx.get(metrics, trust_env=False).status_code == 401
        assert httpx.get(metrics, trust_env=False, headers=bearer[Role.READ]).status_code == 200
        # A follower brings it from the environment, and without it is told what is missing.
        monkeypatch.delenv("THINWIRE_HTTP_TOKEN", raising=False)
        with pytest.raises(AccessDenied, match="Set THINWIRE_HTTP_TOKEN"):
            open_store(relay.url, retry_s=0).get("head.json", limit_bytes=999)
        # One that is set, and wrong or of another role, is not to be set.
        monkeypatch.setenv("THINWIRE_HTTP_TOKEN", "x" * 32)
        with pytest.raises(AccessDenied, match="no token that is known") as wrong:
            open_store(relay.url, retry_s=0).get("head.json", limit_bytes=999)
        assert "x" * 32 not in str(wrong.value)
        assert "Set " not in wrong.value.hint
        monkeypatch.setenv("THINWIRE_HTTP_TOKEN", tokens[Role.READ])
        with pytest.raises(AccessDenied, match=r"HTTP 403: .* of the role follow"):
            open_store(relay.url, retry_s=0).get("head.json", limit_bytes=999)
        monkeypatch.setenv("THINWIRE_HTTP_TOKEN", tokens[Role.FOLLOW])
        assert open_store(relay.url, retry_s=0).get("head.json", limit_bytes=999)
        file = tmp_path / "token"
        file.write_text(tokens[Role.FOLLOW] + "\n")
        monkeypatch.delenv("THINWIRE_HTTP_TOKEN")
        monkeypatch.setenv("THINWIRE_HTTP_TOKEN_FILE", str(file))
        assert open_store(relay.url, retry_s=0).get("head.json", limit_bytes=999)


def test_records_and_data_share_connections(
    relay: Running, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand followers are a thousand connections, not two thousand."""
    from thinwire.follow.relays import open_relay
    from thinwire.store.http_client import HttpClient

    made: list[object] = []
    make = HttpClient._made
    monkeypatch.setattr(HttpClient, "_made", lambda self: made.append(0) or make(self))
    store = open_relay(relay.url)
    for _ in range(3):
        store.get("head.json", limit_bytes=9999)
        store.get_range(key, 0, 10)
    assert len(made) == 1


def test_https_to_a_port_without_is_no_passing_failure(relay: Running) -> None:
    from thinwire.store import open_store

    url = relay.url.replace("http:", "https:")
    # With retries, as whoever follows has them: they would go on for a minute.
    with pytest.raises(StoreError, match="plain HTTP") as refused:
        open_store(url).get("head.json", limit_bytes=999)
    assert not refused.value.retryable


def test_a_merged_delta_that_was_made_again(tmp_path: Path) -> None:
    """A maintainer takes one back and makes it anew: the old manifest must not be held for good."""
    from stream_units.making import joined

    store = DictStore()
    versions = history(6)
    publish(store, tmp_path / "baseline", versions)
    maintained(store, tmp_path / "work")
    with relaying(store, tmp_path / "cache") as relay:
        (merge, *_) = store.find("/merges/")
        old = relay.get(f"/o/{merge}").content
        lineage, base, version = merge.split("/")[0], *map(int, (merge[-30:-18], merge[-17:-5]))
        store.delete([merge, *store.find(f"{lineage}/deltas/{base:012d}-{version:012d}/")])
        maintained(store, tmp_path / "work-2")
        new = store.get(merge, limit_bytes=1 << 20)
        assert new != old
        for shard in store.find(f"{lineage}/deltas/{base:012d}-{version:012d}/"):
            relay.one.records._held[merge] = relay.one.records._held[merge]._replace(
                read_s=relay.one.records._held[merge].read_s - 2
            )
            assert relay.get(f"/o/{shard}").content == store.get(shard, limit_bytes=1 << 20)
        assert relay.get(f"/o/{merge}").content == new
        assert joined(store, tmp_path / "f")


def test_a_web_page_under_another_name_gets_nothing(stored: DictStore, tmp_path: Path) -> None:
    """DNS rebinding: the browser asks here, and lets the page read what is answered."""
    with relaying(stored, tmp_path / "cache") as relay:
        for path in ("/o/head.json", "/list?prefix=", "/o/stream.json"):
            assert relay.get(path, host="evil.example").status_code == 421
        assert relay.get("/o/head.json", host="localhost:99").status_code == 200


def test_asking_for_what_nothing_names_keeps_nobody_out(stored: DictStore, tmp_path: Path) -> None:
    lineage = manifest_of(stored, 1).lineage
    with relaying(stored, tmp_path / "cache") as relay:
        assert relay.get("/o/head.json").status_code == 200
        with httpx.Client(base_url=relay.url, trust_env=False) as client:
            # More than a second is allowed of those; they are quick.
            found = [
                client.get(f"/o/{number:032x}/manifests/{1:012d}.json").status_code
                for number in range(200)
            ]
            assert {404, 503} >= set(found)
            answer = client.get(f"/o/{lineage}/manifests/{1:012d}.json")
        assert answer.status_code == 200
