"""Hugging Face buckets by huggingface_hub, on a server of ours; the real one is not reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers import free_ports
from thinwire import Follower, Publisher, fsck, open_stream
from thinwire.errors import (
    AccessDenied,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    StoreError,
    ThinwireError,
    Truncated,
    Unavailable,
    UnsafeStore,
)
from thinwire.store import Store, StoreWrapper, hf_buckets, open_store
from thinwire.testing import STORE_CHECKS, ContractBroken, contract, hf_server
from thinwire.testing.hf_xorbs import decode_shard, decode_xorb

pytest.importorskip("huggingface_hub", reason="NOT RUN: pip install 'thinwire[hf]'")
import huggingface_hub

BUCKET = "me/box"
# What the contract asks and the bucket functions cannot give, and why. The S3 gateway gives all.
CANNOT_HOLD = {
    contract.check_create_race: "they have no conditional write: two that look at the same moment"
    " both find nothing and both write",
}
_numbers = count()


class Hub:
    """The local server, and its word on what it was asked."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def open(self, path: str = "", **options: Any) -> Store:
        """A store that retries nothing, in a place of its own."""
        where = path or f"contract/{next(_numbers)}"
        return open_store(f"hf://buckets/{BUCKET}/{where}", retry_s=0, **options)

    def plan(self, **faults: list[Any]) -> None:
        self._test("POST", json.dumps(faults).encode())

    def calls(self) -> Any:
        return self._test("GET")["calls"]

    def _test(self, method: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(f"{self.endpoint}/test", body, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def running_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with (
        pytest.MonkeyPatch.context() as patch,
        hf_server.running(*free_ports(2), BUCKET) as endpoint,
    ):
        # hf-xet reads these once in a process.
        patch.setenv("HF_XET_CACHE", str(tmp_path_factory.mktemp("xet")))
        patch.setenv("HF_XET_TELEMETRY_ENABLED", "0")
        patch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
        yield Hub(endpoint)


@pytest.fixture
def hub(running_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_ENDPOINT", running_hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", hf_server.WRITE_TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    running_hub.plan()
    yield running_hub
    running_hub.plan()


class _PutsInBatches(StoreWrapper):
    """Writes what was put only when something else is asked, by one batch of the same functions.

    One by one, hf-xet takes 15 s of this process for the contract's 1,100 keys.
    """

    def __init__(self, store: Store, path: str) -> None:
        super().__init__(store)
        self._path = path
        self._waiting: list[tuple[bytes, str]] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._waiting.append((data, f"{self._path}/{key}"))

    def list(self, prefix: str, *, after: str = "") -> Any:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        huggingface_hub.HfApi(endpoint=os.environ["HF_ENDPOINT"]).batch_bucket_files(
            BUCKET, add=waiting
        )
        return self._store.list(prefix, after=after)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_the_contract_through_bucket_functions(check: Callable[[Store], None], hub: Hub) -> None:
    path = f"contract/{check.__name__}"
    store = hub.open(path, single_writer=True)
    if check is contract.check_many_keys:
        store = _PutsInBatches(store, path)
    if check in CANNOT_HOLD:
        with pytest.raises(ContractBroken, match="winners"):
            check(store)
    else:
        check(store)


def test_reads_keep_the_token_at_the_hub(hub: Hub) -> None:
    store = hub.open("ranges")
    store.put("a", bytes(range(100)))
    hub.plan()
    assert store.get_range("a", 10, 20) == bytes(range(10, 20))
    asked = [(call["route"], call["range"], call["token"]) for call in hub.calls()]
    assert asked == [
        ("resolve", "bytes=10-19", hf_server.WRITE_TOKEN),
        ("cdn", "bytes=10-19", ""),
    ]


DATA = {
    "zeros": bytes(300_000),
    "text": b"the same words again and again, " * 9_000,
    "floats": np.random.default_rng(1).normal(0, 0.02, 90_001).astype(np.float32).tobytes(),
    "odd": np.arange(50_000, dtype=np.uint32).tobytes()[:-3],
    "noise": np.random.default_rng(2).bytes(200_000),
}


@pytest.mark.parametrize("kind", DATA)
def test_what_hf_xet_compresses_comes_back(kind: str, hub: Hub) -> None:
    store = hub.open("kinds")
    store.put(kind, DATA[kind])
    assert store.get(kind, limit_bytes=1 << 20) == DATA[kind]


@pytest.mark.parametrize(
    "data", [b"\0\5\0\0\0\5\0\0ab", b"\0\4\0\0\1\5\0\0abcd", b"\0\1\0\0\7\1\0\0a"]
)
def test_the_server_refuses_a_broken_xorb(data: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        decode_xorb(data)
    with pytest.raises(ValueError, match="no shard"):
        decode_shard(data)


def test_creating_is_refused_and_reading_is_not(hub: Hub, tmp_path: Path) -> None:
    store = hub.open("refused")
    with pytest.raises(UnsafeStore, match=r"hf://buckets/me/box/refused.*single_writer=True"):
        store.put_if_absent("a", b"x")
    assert list(store.list("")) == []
    with pytest.raises(UnsafeStore, match="no put-if-absent"):
        Publisher(f"hf://buckets/{BUCKET}/refused", tmp_path / "base", maintain=False)
    assert [entry.key for entry in store.list("") if "manifests" in entry.key] == []


def test_a_stream_lives_in_a_bucket(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"hf://buckets/{BUCKET}/run"
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, 0.02, 100_000).astype(np.float16)}
    stream = open_stream(url, single_writer=True)
    with (
        Publisher(stream, tmp_path / "base", maintain=False) as publisher,
        Follower(url, tmp_path / "f") as follower,  # needs no single_writer: it creates nothing
    ):
        for step in range(1, 4):
            weights["w"].view(np.uint16)[rng.random(100_000) < 0.01] += np.uint16(1)
            publisher.publish(weights, step=step)
            assert follower.catch_up().version == step
            assert weights["w"].tobytes() in (tmp_path / "f" / "model.safetensors").read_bytes()
    assert fsck(open_stream(url), deep=True).is_whole
    monkeypatch.setenv("HF_TOKEN", hf_server.READ_TOKEN)
    with Follower(url, tmp_path / "late") as late:
        assert late.catch_up().version == 3


# A fault at a route, what then fails, and how. No 503 where huggingface_hub itself would wait.
FAILURES = [
    ("resolve", 404, "get", NotFound),
    ("resolve", 401, "get", AccessDenied),
    ("resolve", 403, "range", AccessDenied),
    ("resolve", 429, "get", Unavailable),
    ("resolve", 503, "range", Unavailable),
    ("resolve", 418, "get", StoreError),
    ("cdn", 403, "get", Unavailable),
    ("cdn", 404, "range", Unavailable),
    ("paths-info", 403, "look", AccessDenied),
    ("paths-info", 507, "look", Unavailable),
    ("tree", 403, "list", AccessDenied),
    ("tree", 404, "list", StoreError),
    ("tree", 507, "list", Unavailable),
    ("token", 403, "put", AccessDenied),
    ("token", 404, "put", StoreError),
    ("xorb", 403, "put", AccessDenied),
    ("xorb", 400, "put", StoreError),
    ("shard", 500, "put", Unavailable),
    ("batch", 403, "put", AccessDenied),
    ("batch", "fail", "put", Unavailable),
    ("batch", 403, "delete", AccessDenied),
    ("batch", "fail", "delete", Unavailable),
]


@pytest.mark.parametrize(("route", "fault", "call", "error"), FAILURES)
def test_failures(hub: Hub, route: str, fault: Any, call: str, error: type[ThinwireError]) -> None:
    store = hub.open("failures")
    store.put("a", b"abcdefgh")
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("a", limit_bytes=9),
        "range": lambda: store.get_range("a", 1, 3),
        "look": lambda: store.get_range("a", 0, 0),
        "list": lambda: list(store.list("")),
        "put": lambda: store.put("b", np.random.default_rng(next(_numbers)).bytes(99)),
        "delete": lambda: store.delete(["a"]),
    }
    hub.plan(**{route: [fault] * 9})
    with pytest.raises(ThinwireError) as caught:
        calls[call]()
    assert (type(caught.value), caught.value.__context__) == (error, None)
    shown = f"{caught.value!r} {caught.value} {caught.value.context}"
    assert f"hf://buckets/{BUCKET}/failures" in shown
    # The server repeats all headers, and the signed URL.
    assert not any(said in shown for said in (hf_server.WRITE_TOKEN, "earer", "signature"))


@pytest.mark.parametrize("token", [hf_server.READ_TOKEN, "hf_nobody", "hf_two\nlines"])
def test_rights(hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.open("rights").put("a", b"x")
    monkeypatch.setenv("HF_TOKEN", token)
    store = hub.open("rights")
    for call in (lambda: store.put("a", b"y"), lambda: store.delete(["a"])):
        with pytest.raises(StoreError) as caught:
            call()
        assert token not in str(caught.value)
    if token == hf_server.READ_TOKEN:
        assert store.get("a", limit_bytes=1) == b"x"
        return
    with pytest.raises(StoreError, match=r"hf auth login|HF_TOKEN"):
        store.get("a", limit_bytes=1)


def test_no_such_bucket(hub: Hub) -> None:
    store = open_store("hf://buckets/me/none/p", retry_s=0)
    for call in (
        lambda: store.get("a", limit_bytes=1),
        lambda: store.get_range("a", 0, 0),
        lambda: list(store.list("")),
        lambda: store.put("a", b"x"),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StoreError, match="no such bucket") as caught:
            call()
        assert not isinstance(caught.value, NotFound)


def test_hostile_answers(hub: Hub) -> None:
    store = hub.open("hostile")
    store.put("a", bytes(range(200)))
    hub.plan(cdn=["gzip"])
    with pytest.raises(StoreError, match="compressed it unasked"):
        store.get("a", limit_bytes=999)
    hub.plan(cdn=["endless"])
    with pytest.raises(LimitExceeded):
        store.get("a", limit_bytes=3 << 20)
    hub.plan(cdn=["cut"])
    with pytest.raises((Unavailable, Truncated)):
        store.get_range("a", 0, 100)
    hub.plan(cdn=["other-range"])
    with pytest.raises(StoreError, match="another range"):
        store.get_range("a", 5, 9)
    hub.plan(cdn=["no-range", "no-range"])
    with pytest.raises(StoreError, match="ignored the range"):
        store.get_range("a", 5, 9)
    assert store.get_range("a", 0, 9) == bytes(range(9))  # what begins there is the range


@pytest.mark.parametrize(
    "page", [{"error": "no list"}, [{"type": "file"}], [{"type": "file", "size": "x"}], [7], "x"]
)
def test_a_listing_without_sense(hub: Hub, page: Any) -> None:
    hub.plan(tree=[page])
    with pytest.raises(StoreError, match="makes no sense"):
        list(hub.open("nonsense").list(""))


def test_a_listing_holds_only_keys_of_the_folder(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["p/../x", "p/a", "px/b", "other", "p/.thinwire-x", "p//c", "p/b\n"]
    file = {"type": "file", "size": 1, "xetHash": "0" * 64, "mtime": "2026-01-01T00:00:00.000Z"}
    folder = {"type": "directory", "path": "p/d", "uploadedAt": "2026-01-01T00:00:00.000Z"}
    page = [folder, *({**file, "path": path} for path in paths)]
    hub.plan(tree=[page])
    assert [entry.key for entry in hub.open("p").list("")] == ["a"]
    hub.plan(tree=[[{**file, "path": "p/a", "size": -1}], page])
    with pytest.raises(StoreError, match="makes no sense"):
        list(hub.open("p").list(""))
    monkeypatch.setattr(hf_buckets, "MAX_LISTED", 7)
    with pytest.raises(LimitExceeded, match="more than 7"):
        list(hub.open("p").list(""))


def test_a_release_that_tells_no_failures_is_asked_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As huggingface_hub up to 1.28 has it.
    monkeypatch.delattr(huggingface_hub.errors, "BucketBatchError", raising=False)
    store = hub.open("old")
    store.put("a", b"x")
    hub.plan(batch=["drop", "drop"])
    with pytest.raises(Unavailable, match="write b"):
        store.put("b", b"y")
    with pytest.raises(Unavailable, match="delete a"):
        store.delete(["a", "none"])
    store.delete(["a", "none"])
    assert list(store.list("")) == []


def test_uploads_are_silent(hub: Hub, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store, before = hub.open("silent"), huggingface_hub.utils.are_progress_bars_disabled()
    (tmp_path / "f").write_bytes(bytes(1000))
    store.put("a", b"x")
    store.put_file("b", tmp_path / "f")
    assert capfd.readouterr() == ("", "")
    assert huggingface_hub.utils.are_progress_bars_disabled() == before


def test_opening_contacts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    store = open_store("hf://buckets/my-org/some.box/run%201/", single_writer=True)
    assert store.url == "hf://buckets/my-org/some.box/run 1"
    assert "verysecret" not in repr(store)
    with pytest.raises(Unavailable, match="no answer"):
        open_store("hf://buckets/a/b", retry_s=0).get("k", limit_bytes=1)


def test_importing_imports_no_huggingface_hub() -> None:
    code = "import sys, thinwire.store; print('huggingface_hub' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


@pytest.mark.parametrize(
    "url",
    [
        "hf://",
        "hf://buckets/me",
        "hf://buckets/../box",
        "hf://buckets/me/a..b",
        "hf://buckets/me/box/../other",
        "hf://buckets/m%2Fe/x",
        "hf://datasets/me/box",
        "hf://me:hf_secret@buckets/me/box",
        "hf://buckets/me/box?token=hf_secret",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_store(url)
    assert "secret" not in f"{caught.value} {caught.value.context}"


def test_packages_that_are_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    store = hub.open("missing")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hf_xet", None)
        with pytest.raises(InvalidArgument, match=r"thinwire\[hf\]"):
            store.put("a", b"x")
    with monkeypatch.context() as patch:
        patch.delattr(huggingface_hub.HfApi, "batch_bucket_files")
        with pytest.raises(InvalidArgument, match="knows no buckets"):
            hub.open("missing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidArgument, match=r"not installed.*pip install 'thinwire\[hf\]'"):
        hub.open("missing")
