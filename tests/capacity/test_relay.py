"""What a real relay asks for is what the model says."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from thinwire import Publisher, open_stream
from thinwire.capacity import relays
from thinwire.capacity.payload import Objects
from thinwire.relay.blocks import Block
from thinwire.relay.relay import Folders, StreamRelay
from thinwire.store import CountingStore, open_store
from thinwire.stream.places import objects_of


def test_spans(tmp_path: Path) -> None:
    bucket = open_store(str(tmp_path / "bucket"), retry_s=0)
    words = np.random.default_rng(0).integers(0, 1 << 15, 9 << 20, dtype=np.uint16)
    with Publisher(open_stream(bucket), tmp_path / "baseline", maintain=False) as publisher:
        publisher.publish({"w": words.view(np.float16)})
    stream = open_stream(bucket)
    manifest = stream.manifest(stream.record().lineage, 1)
    assert manifest is not None
    key, record = max(objects_of(manifest).items())
    counting = CountingStore(bucket)
    relay = StreamRelay("run", counting, Folders.at(tmp_path / "cache", 64 << 20), fetches=False)
    try:
        for number in range(len(record.blocks)):
            relay.blocks.want(Block(key, record, number), len(record.blocks)).result(60)
    finally:
        relay.stop()
    assert counting.counts().requests["get_range"] == relays.span_count(Objects(1, record.size))
    assert relays.span_count(Objects(1, record.size)) == 10
