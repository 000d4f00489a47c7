"""The store of a relay is a folder, and goes away: moved, or with an empty one in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from thinwire.follow import leases, open_stream
from thinwire.relay import upstream as upstream_room
from thinwire.relay import watch as watch_room
from thinwire.store import open_store
from thinwire.stream import keys
from thinwire.stream.encoding import encode
from thinwire.stream.records import FORMAT, LEASE_TTL_S, Lease

from .making import DictStore, Running, bits, caught_up, history, publish, relaying, until

VERSIONS = history(3)
EMPTY = pytest.mark.parametrize("is_empty", [False, True], ids=["moved", "an empty one"])


@pytest.fixture(autouse=True)
def _quick_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_room, "_WAITS_S", (0.01,))
    monkeypatch.setattr(leases, "_EVERY_S", 0.0)


@contextmanager
def away(folder: Path, is_empty: bool) -> Iterator[None]:
    """It is away meanwhile, and nothing may be made in its place."""
    folder.rename(folder.with_name("away"))
    if is_empty:
        folder.mkdir()
    yield
    assert not [*folder.glob("*")]
    if is_empty:
        folder.rmdir()
    assert not folder.exists()
    folder.with_name("away").rename(folder)


def is_away(relay: Running) -> bool:
    return relay.metric("upstream_up") == 0


def tell_need(relay: Running) -> None:
    """As a follower does."""
    holder, lineage = "ab" * 16, open_stream(relay.url).record().lineage
    lease = Lease(FORMAT, holder, lineage, 1, LEASE_TTL_S)
    assert relay.ask("PUT", f"/o/{keys.lease(holder, 1)}", encode(lease)).status_code < 300


@EMPTY
def test_it_is_told_and_what_is_held_is_served(
    is_empty: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bucket"
    publish(open_store(str(folder)), tmp_path / "baseline", VERSIONS[:2])
    with relaying(open_store(str(folder), retry_s=0), tmp_path / "cache", poll_s=0.05) as relay:
        assert caught_up(relay.url, tmp_path / "before") == bits(VERSIONS[1])
        tell_need(relay)
        assert not is_away(relay)
        with away(folder, is_empty):
            until(lambda: is_away(relay))
            until(lambda: relay.metric("upstream_away_seconds") > 0)
            tell_need(relay)
            assert caught_up(relay.url, tmp_path / "meanwhile") == bits(VERSIONS[1])
            assert "thinwire-age-s" in relay.get("/o/stream.json").headers
            assert is_away(relay)
        publish(open_store(str(folder)), tmp_path / "baseline", VERSIONS[2:])
        until(lambda: not is_away(relay))
        until(lambda: caught_up(relay.url, tmp_path / "meanwhile") == bits(VERSIONS[2]))
    told = [record.message for record in caplog.records if record.name == "thinwire"]
    assert len([line for line in told if " is away: " in line and "held is served" in line]) == 1
    assert len([line for line in told if "is back after" in line]) == 1
    assert not [line for line in told if "replaced" in line]


@EMPTY
def test_a_relay_that_is_started_meanwhile(is_empty: bool, tmp_path: Path) -> None:
    """Its cache says that there was a stream."""
    folder = tmp_path / "bucket"
    publish(open_store(str(folder)), tmp_path / "baseline", VERSIONS[:2])
    with relaying(open_store(str(folder), retry_s=0), tmp_path / "cache") as relay:
        caught_up(relay.url, tmp_path / "before")
    with (
        away(folder, is_empty),
        relaying(open_store(str(folder), retry_s=0), tmp_path / "cache", poll_s=0.05) as relay,
    ):
        until(lambda: is_away(relay))
        tell_need(relay)
        assert caught_up(relay.url, tmp_path / "meanwhile") == bits(VERSIONS[1])


def test_a_relay_that_waits_for_the_first_version(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    with relaying(open_store(str(folder), retry_s=0), tmp_path / "cache", poll_s=0.02) as relay:
        assert relay.get("/o/stream.json").status_code == 404
        assert not is_away(relay)
        publish(open_store(str(folder)), tmp_path / "baseline", VERSIONS[:1])
        until(lambda: relay.metric("version") == 1)
        assert not is_away(relay)


def test_a_bucket_that_looks_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its address is another's by now."""
    monkeypatch.setattr(watch_room, "_CHECK_S", 0.0)
    store = DictStore()
    publish(store, tmp_path / "baseline", VERSIONS[:2])
    with relaying(store, tmp_path / "cache", poll_s=0.02) as relay:
        assert caught_up(relay.url, tmp_path / "before") == bits(VERSIONS[1])
        objects, store.objects = store.objects, {}
        until(lambda: is_away(relay))
        assert caught_up(relay.url, tmp_path / "meanwhile") == bits(VERSIONS[1])
        store.objects = objects
        until(lambda: not is_away(relay))
