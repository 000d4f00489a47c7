"""Clients that do nothing, rubbish, or half of what they began, beside good ones."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from thinwire.store import open_store
from thinwire.store.file_store import FileStore

from .making import bits, caught_up, data_keys, history, large, publish, until
from .processes import options_for, running

IDLE = 1_000
SLOW = 60


def test_many_that_do_nothing_or_rubbish(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    publish(bucket, tmp_path / "baseline", history(1))
    with running(*options_for(bucket, tmp_path)) as relay:
        assert relay.is_well()
        before = relay.rss_bytes
        idle = [relay.connect() for _ in range(IDLE)]
        try:
            for number in range(1_000):
                rubbish = (
                    os.urandom(30) + b"\r\n\r\n",
                    b"GET /o/%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * (number % 900)),
                    b"GET /o/head.json HTTP/1.1\r\nHost: localhost\r\nRange: bytes=%d-\r\n\r\n"
                    % number,
                    b"PUT /o/leases/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\nx",
                )[number % 4]
                with relay.connect() as connection, suppress(OSError):
                    connection.sendall(rubbish)
            assert relay.is_well()
            assert caught_up(relay.url, tmp_path / "f") == bits(history(1)[0])
            assert relay.rss_bytes - before < 100 << 20
        finally:
            for connection in idle:
                connection.close()
        assert relay.is_well()


def test_readers_that_stop_in_the_middle(tmp_path: Path) -> None:
    """Each holds a block of its own and takes no more; some go, some stay."""
    bucket = FileStore(tmp_path / "bucket")
    model = large(size_bytes=40 << 20)
    publish(bucket, tmp_path / "baseline", [model])
    key = max(data_keys(bucket, 1))
    with running(*options_for(bucket, tmp_path)) as relay:
        assert relay.is_well()
        before = relay.rss_bytes
        slow = [relay.connect() for _ in range(SLOW)]
        try:
            for number, connection in enumerate(slow):
                head = f"GET /bucket/o/{key} HTTP/1.1\r\nHost: localhost\r\n"
                head += f"Range: bytes={number * 500_000}-\r\n\r\n"
                connection.sendall(head.encode())
                assert connection.recv(1000).startswith(b"HTTP/1.1 206")
            for connection in slow[::2]:
                connection.close()
            for _ in range(3):
                got = open_store(relay.url, retry_s=0).get(key, limit_bytes=1 << 30)
                assert len(got) > 40 << 20
            assert caught_up(relay.url, tmp_path / "f") == bits(model)
            # Blocks in memory and in flight are bounded; 60 whole objects would be 2.4 GB.
            assert relay.rss_bytes - before < 350 << 20
        finally:
            for connection in slow:
                connection.close()
        until(lambda: relay.metric("sending_bytes") == 0)
        assert relay.is_well()
