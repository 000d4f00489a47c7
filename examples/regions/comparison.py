"""The same versions as full checkpoints and as arc_v3, in the same bucket, over the same links.

A follower that knows only the bucket rebuilds the last versions of the run, and each is compared
with the trainer's record once more. Of each, its weights file and its arc_v3 delta (as the package
`fireworks-delta-compression` reads it, written by `thinwire.interop.fireworks`) are put beside the
stream. One reader in each region then fetches them, all regions at once. What counts is what the
links counted.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bucket as buckets
from blake3 import blake3
from digests import digest_of, load_folder
from programs import Failed, Process
from records import Fetched
from services import HERE, World

import thinwire
from thinwire.follow import open_stream
from thinwire.interop.fireworks import delta_compress_dirs

FORMAT = "arc_v3"
# Config and tokenizer, which lie beside it in every snapshot, are left out of both.
WEIGHTS = "model.safetensors"


def compare(world: World, commits: Sequence[dict[str, Any]]) -> list[Fetched]:
    """Put both kinds of the last versions into the bucket, and fetch them from every region.

    Args:
        world: Its samplers have stopped.
        commits: The versions, by the trainer's record.
    """
    settings = world.settings
    full: dict[str, str] = {}
    arc: dict[str, str] = {}
    store = buckets.client(world.bucket.host, world.bucket.port)
    versions = [commit["version"] for commit in commits]
    wanted = versions[-1 - settings.arc_versions :]
    for commit, folder, before in rebuilt(world, commits, wanted):
        version = commit["version"]
        if version in versions[-settings.full_versions :]:
            full |= put(store, f"full/{version:012}", [folder / WEIGHTS])
        if before is not None:
            delta = world.work / "arc"
            delta_compress_dirs(str(before), str(folder), str(delta), FORMAT)
            arc |= put(store, f"arc/{version:012}", [delta / WEIGHTS])
            shutil.rmtree(delta)
    return [*fetch(world, "full", full), *fetch(world, FORMAT, arc)]


def rebuilt(
    world: World, commits: Sequence[dict[str, Any]], wanted: Sequence[int]
) -> Iterator[tuple[dict[str, Any], Path, Path | None]]:
    """Each wanted version with a copy of the one before.

    Raises:
        Failed: One is not what the trainer had.
    """
    folder, before = world.work / "rebuilt", world.work / "before"
    stream = open_stream(world.url, trusted_keys=[world.trusted])
    by_version = {commit["version"]: commit for commit in commits}
    with thinwire.Follower(stream, folder) as follower:
        for number, version in enumerate(wanted):
            if number:
                shutil.rmtree(before, ignore_errors=True)
                shutil.copytree(folder, before, ignore=shutil.ignore_patterns(".thinwire*"))
            follower.catch_up(version)
            commit = by_version[version]
            if digest_of(load_folder(folder).items()) != commit["digest"]:
                raise Failed(f"version {version}, rebuilt from the bucket, is WRONG")
            yield commit, folder, before if number else None


def put(store: Any, prefix: str, paths: Sequence[Path]) -> dict[str, str]:
    """Upload files; returns their keys and digests."""
    digests = {}
    for path in paths:
        key = f"{prefix}/{path.name}"
        data = path.read_bytes()
        store.put(key, data)
        digests[key] = blake3(data).hexdigest()
    return digests


def fetch(world: World, kind: str, digests: dict[str, str]) -> list[Fetched]:
    """Fetch all keys from every region at once."""
    readers = {region: start_reader(world, region, kind, list(digests)) for region in world.sites}
    before = {region: crossed(world, region) for region in world.sites}
    for reader in readers.values():
        assert reader.handle.stdin is not None
        print(file=reader.handle.stdin, flush=True)
    found = []
    for region, reader in readers.items():
        lines = [read(reader) for _ in range(len(digests) + 1)]
        is_right = {key: digest for key, _, digest in lines[:-1]} == digests
        world.processes.stop([reader])
        versions = tuple(sorted({int(key.split("/")[1]) for key in digests}))
        crossed_bytes = crossed(world, region) - before[region]
        found.append(Fetched(region, kind, versions, crossed_bytes, lines[-1], is_right))
    return found


def start_reader(world: World, region: str, kind: str, keys: list[str]) -> Process:
    """A reader in a region, ready to begin."""
    host, port = world.sites[region].s3
    command = [sys.executable, str(HERE / "reader.py"), host, str(port), *keys]
    inside = world.place.inside(region, command)
    reader = world.processes.start(f"reader-{region}-{kind}", inside, is_talking=True)
    reader.may_end = True
    read(reader)
    return reader


def read(reader: Process) -> Any:
    """A line of a reader."""
    assert reader.handle.stdout is not None
    line = reader.handle.stdout.readline()
    if not line:
        raise Failed(f"{reader.name} ended:\n{reader.tail()}")
    return json.loads(line)


def crossed(world: World, region: str) -> int:
    """Payload that crossed a region's link to the bucket, both ways."""
    return sum(world.sites[region].line.counts()["s3"].values())
