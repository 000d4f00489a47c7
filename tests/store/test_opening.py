from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.errors import AlreadyExists, InvalidArgument, NotFound
from thinwire.store import RetryingStore, SingleWriterStore, open_store

SECRET = "verysecretvalue"


def test_importing_does_not_import_obstore() -> None:
    code = "import sys, thinwire.store, thinwire.testing; print('obstore' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_memory_stores_are_shared_by_name() -> None:
    open_store("memory://shared").put("a", b"x")
    assert open_store("memory://shared").get("a", limit_bytes=1) == b"x"
    with pytest.raises(NotFound):
        open_store("memory://other").get("a", limit_bytes=1)


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sp ace ü"
    open_store(str(folder)).put("a", b"x")
    assert (folder / "a").read_bytes() == b"x"
    assert open_store(folder.as_uri()).get("a", limit_bytes=1) == b"x"
    assert open_store(folder.as_uri()).url == folder.as_uri()
    monkeypatch.chdir(tmp_path)
    relative = open_store("sp ace ü")
    monkeypatch.chdir("/")
    assert relative.get("a", limit_bytes=1) == b"x"


def test_opening_touches_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "none"))
    assert list(store.list("")) == []
    store.delete(["a"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/path",
        f"s3://{SECRET}@bucket",
        f"s3://key:se/{SECRET}@bucket/path",
        f"s3://{SECRET}/se@bucket/path",
        f"s3://key:{SECRET}",
        f"s3://bucket/path?token={SECRET}",
        f"gs://{SECRET}@bucket",
        f"az://container/p?sig={SECRET}",
        f"abfss://c:{SECRET}@account.dfs.core.windows.net/p",
        f"ftp://bucket.example/{SECRET}",
        f"https://user:{SECRET}@host/run",
        f"https://{SECRET}@host/run",
        f"http://host/run?token={SECRET}",
        f"{SECRET}:x://y",
        f"s3://bucket/a/../{SECRET}",
        f"s3://bucket//{SECRET}",
        f"s3://bucket/p#{SECRET}",
        f"s3://[{SECRET}/p",
        "s3://",
        "s3:///path",
        "file://host/path",
        "",
        "a\0b",
    ],
)
def test_a_bad_url_is_refused_without_repeating_a_secret(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_store(url)
    assert SECRET not in f"{caught.value} {caught.value!r} {caught.value.context}"
    assert caught.value.__cause__ is None


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"'ftp'.*file://, memory://, s3://, gs://, az://"):
        open_store("ftp://host/path")


def test_wrappers_by_argument(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), RetryingStore)
    assert isinstance(open_store(str(tmp_path), single_writer=True, retry_s=0), SingleWriterStore)
    assert "Retrying" not in repr(open_store(str(tmp_path), retry_s=0))


def test_single_writer_refuses_what_it_sees(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), single_writer=True)
    store.put_if_absent("a", b"x")
    with pytest.raises(AlreadyExists, match="a in file://"):
        store.put_if_absent("a", b"y")
    assert store.get("a", limit_bytes=1) == b"x"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("az://box/pre", "az://box/pre"),
        ("abfs://box/pre/", "abfs://box/pre"),
        ("abfss://box@acct.dfs.core.windows.net/pre", "abfss://box@acct.dfs.core.windows.net/pre"),
    ],
)
def test_azure(monkeypatch: pytest.MonkeyPatch, url: str, shown: str) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acct")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0c2VjcmV0")
    store = open_store(url, retry_s=0)
    assert store.url == shown
    assert "c2Vj" not in repr(store)


def test_azure_without_an_account() -> None:
    with pytest.raises(InvalidArgument, match="az://box") as caught:
        open_store("az://box")
    assert caught.value.__context__ is None


def test_google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(key))
    with pytest.raises(InvalidArgument, match="gs://bucket/pre"):
        open_store("gs://bucket/pre")
    key.write_text(
        '{"gcs_base_url": "http://h", "disable_oauth": true, "client_email": "",'
        f' "private_key": "{SECRET}", "private_key_id": ""}}'
    )
    store = open_store("gs://bucket/pre")
    assert store.url == "gs://bucket/pre"
    assert SECRET not in repr(store)
