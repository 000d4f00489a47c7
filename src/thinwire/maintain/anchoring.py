"""Anchors: the whole model of one version, as a checkpoint that any loader reads."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from thinwire.errors import AlreadyExists
from thinwire.follow import Stream
from thinwire.maintain.merging import keep_if_whole
from thinwire.maintain.trails import Trail
from thinwire.maintain.upload import file_record, put_files
from thinwire.stream import keys
from thinwire.stream.encoding import encode, seal
from thinwire.stream.records import FORMAT, Anchor


def make_anchor(stream: Stream, trail: Trail, give_way: Callable[[], None]) -> Anchor | None:
    """Upload what a copy holds as an anchor.

    Returns:
        The anchor; None where another maintainer had made one of this version.

    Raises:
        ThinwireError: Nothing was made.
    """
    # Proved in full: whoever joins begins with these bytes.
    trail.follower.prove()
    mark = trail.sink.mark()
    assert mark is not None
    checkpoint = trail.sink.checkpoint()
    paths = {name: file.path for name, file in checkpoint.weights.items()} | dict(checkpoint.files)
    records = []
    for name, path in paths.items():
        give_way()
        records.append(file_record(name, path))
    anchor = Anchor(
        format=FORMAT,
        type=Anchor.TYPE,
        stream=mark.stream,
        created_ms=time.time_ns() // 1_000_000,
        lineage=mark.lineage,
        session=secrets.token_hex(16),
        target=mark.link,
        weights=mark.weights,
        layout=mark.layout,
        files=records,
    )
    anchor, data = seal(anchor, stream.signing_key)
    names = [keys.anchor_file(mark.lineage, mark.version, anchor.session, name) for name in paths]
    for key, path in zip(names, paths.values(), strict=True):
        give_way()
        put_files(stream.store, [(key, path)])
    try:
        stream.store.put_if_absent(keys.anchor(mark.lineage, mark.version), data)
    except AlreadyExists:
        found = stream.anchor(mark.lineage, mark.version)
        if found is None or encode(found) != data:
            stream.store.delete(names)
            return None
    keep_if_whole(stream, keys.anchor(mark.lineage, mark.version), names)
    return anchor
