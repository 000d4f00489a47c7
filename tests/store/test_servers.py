"""Against real servers: what the contract does not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.errors import AccessDenied, UnsafeStore
from thinwire.store import open_store, prove_put_if_absent

from .conftest import S3Server, set_environment


def test_seaweedfs_proves_safe(seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, seaweedfs_server)
    store = open_store(f"{seaweedfs_server.url}/proof")
    store.put("probe", b"same")
    prove_put_if_absent(store, "probe", b"same")


def test_rclone_is_refused(rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, rclone_server)
    store = open_store(f"{rclone_server.url}/proof")
    store.put("probe", b"same")
    with pytest.raises(UnsafeStore, match="s3://thinwire/proof ignores put-if-absent"):
        prove_put_if_absent(store, "probe", b"same")
    assert store.get("probe", limit_bytes=4) == b"same"
    single = open_store(f"{rclone_server.url}/proof", single_writer=True)
    prove_put_if_absent(single, "probe", b"same")


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_bad_credentials(
    seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch, wrong: str, tmp_path: Path
) -> None:
    set_environment(monkeypatch, seaweedfs_server)
    monkeypatch.setenv(wrong, "notTheRightOne")
    store = open_store(f"{seaweedfs_server.url}/denied")
    (tmp_path / "f").write_bytes(bytes(9 << 20))
    calls = {
        "read": lambda: store.get("a", limit_bytes=9),
        "range": lambda: store.get_range("a", 0, 1),
        "look": lambda: store.get_range("a", 0, 0),
        "write": lambda: store.put("a", b"x"),
        "upload": lambda: store.put_file("a", tmp_path / "f"),
        "create": lambda: store.put_if_absent("a", b"x"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete(["a"]),
    }
    for name, call in calls.items():
        with pytest.raises(AccessDenied, match=r"s3://thinwire/denied") as caught:
            call()
        shown = f"{caught.value!r} {caught.value} {caught.value.context}"
        for secret in ("notTheRightOne", seaweedfs_server.key, seaweedfs_server.secret):
            assert secret not in shown, name
