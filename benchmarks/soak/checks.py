"""The invariants, checked from outside: on copies of folders as a kill leaves them, on the journals
of all processes, and on the stream itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors import KEEP_VERSIONS, Soak
from oracle import HELD_BY_PARTIAL, PARTIAL, SHAPES, Oracle, read_folder

from thinwire.checkpoint import Checkpoint
from thinwire.errors import BaseUnusable, NotFound
from thinwire.follow import CheckpointSink, Follower
from thinwire.maintain import fsck
from thinwire.store import open_store

_MANIFEST_BYTES = 1 << 24
# What is refused though nobody tampers would be a bug that a second try hides.
_SUSPECT = {"checksum-mismatch", "corrupt", "truncated", "base-mismatch", "version-gap", "format"}


class Violation(Exception):
    """An invariant does not hold."""


class Manifests:
    """Every manifest ever seen, read as plain JSON."""

    def __init__(self, soak: Soak) -> None:
        self._store = open_store(soak.url)
        self._bytes: dict[tuple[str, int], bytes] = {}
        self.by_place: dict[tuple[str, int], dict[str, Any]] = {}
        self.chain: list[str] = []

    def refresh(self) -> None:
        """Read what is new; what is known must not have changed, and nothing may be missing."""
        try:
            record = self._store.get("stream.json", limit_bytes=_MANIFEST_BYTES)
        except NotFound:
            return
        lineage, self.chain = json.loads(record)["lineage"], []
        while lineage:
            self.chain.append(lineage)
            lineage = self._refresh_lineage(lineage)

    def versions(self) -> list[dict[str, Any]]:
        """All versions in order."""
        found = [m for m in self.by_place.values() if m["kind"] != "end"]
        return sorted(found, key=lambda m: int(m["version"]))

    def _refresh_lineage(self, lineage: str) -> str:
        prefix = f"{lineage}/manifests/"
        listed = {entry.key: entry for entry in self._store.list(prefix)}
        known = {place: data for place, data in self._bytes.items() if place[0] == lineage}
        for (_, version), data in known.items():
            key = f"{prefix}{version:012d}.json"
            if key not in listed or self._get(key) != data:
                raise Violation(f"the manifest {key} was removed or replaced")
        places = []
        for key in sorted(listed):
            version = int(key.removeprefix(prefix).removesuffix(".json"))
            places.append(version)
            if (lineage, version) not in known:
                data = self._get(key)
                self._bytes[lineage, version] = data
                self.by_place[lineage, version] = json.loads(data)
        if places and places != list(range(places[0], places[0] + len(places))):
            raise Violation(f"lineage {lineage} has holes: {places}")
        last = self.by_place[lineage, places[-1]] if places else {}
        return str(last.get("successor", "")) if last.get("kind") == "end" else ""

    def _get(self, key: str) -> bytes:
        return self._store.get(key, limit_bytes=_MANIFEST_BYTES)


class Checker:
    """Checks one soak; every method raises Violation."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self._oracle = Oracle(soak.seed)
        self.manifests = Manifests(soak)
        self._read: dict[Path, int] = {}
        self._last_seen: dict[tuple[str, str], int] = {}
        self._intents: set[tuple[str, int, str]] = set()
        self.counts: dict[str, int] = {}
        self.folder_count = 0
        self.mid_update_count = 0

    def folder(self, copy: Path, *, is_partial: bool, config: bool = True) -> int:
        """A folder as a kill left it: an open reader, and then a recovery, find one version.

        Returns:
            The version; 0: none.
        """
        self.folder_count += 1
        names = HELD_BY_PARTIAL if is_partial else set(SHAPES)
        raw = copy / ".thinwire-mark"
        try:
            Checkpoint.open(copy, ignore_subfolders=True)
        except BaseUnusable:
            self.mid_update_count += 1
        except Exception:
            if raw.exists():
                raise
        else:
            if raw.exists():
                self._held(copy, json.loads(raw.read_bytes()), names, config)
        mark = CheckpointSink(copy).mark()
        if mark is None:
            return 0
        self._held(copy, json.loads(raw.read_bytes()), names, config)
        return mark.version

    def _held(self, copy: Path, mark: dict[str, Any], names: set[str], config: bool) -> None:
        place = (mark["lineage"], mark["version"])
        if place not in self.manifests.by_place:
            self.manifests.refresh()
        manifest = self.manifests.by_place.get(place)
        if manifest is None:
            raise Violation(f"{copy} is marked as {place}, which has no manifest")
        facts = manifest["metadata"]
        if (mark["metadata"], mark["step"]) != (facts, manifest["step"]):
            raise Violation(f"{copy}: its mark says other things of {place} than the manifest")
        held = read_folder(copy)
        if faults := self._oracle.faults(held, facts["run"], manifest["step"], names):
            raise Violation(f"{copy} is marked as {place}, but: {'; '.join(faults)}")
        path = copy / "config.json"
        found = path.read_text() if path.exists() else ""
        if config and found != facts["config"]:
            raise Violation(f"{copy} at {place}: config.json is {found!r}, not {facts['config']!r}")

    def journals(self) -> None:
        """Nobody saw what was not published, or went backwards; what was published is there."""
        self.manifests.refresh()
        for path in sorted((self._soak.root / "journal").glob("*.jsonl")):
            for line in self._new_lines(path):
                self._line(path.stem, line)
        for manifest in self.manifests.versions():
            self._version(manifest)

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        yield from map(json.loads, whole.splitlines())

    def _line(self, role: str, line: dict[str, Any]) -> None:
        do = line["do"]
        if do == "error":
            raise Violation(f"{role} ({line['life']}) failed: {line['error']}\n{line['trace']}")
        if do == "publishing":
            self._intents.add((line["run"], line["step"], line["digest"]))
        elif do == "refused":
            self._count(f"refused {line['code']}")
            if line["code"] in _SUSPECT:
                raise Violation(f"{role} ({line['life']}) refused {line}")
        elif do in ("applied", "maintained"):
            self._count(f"{do} {line['kind']}")
        elif do == "wiped":
            self._last_seen = {k: v for k, v in self._last_seen.items() if k[0] != role}
        if do in ("seen", "published"):
            self._seen(role, line)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _seen(self, role: str, line: dict[str, Any]) -> None:
        manifest = self.manifests.by_place.get((line["lineage"], line["version"]))
        if manifest is None:
            raise Violation(f"{role} saw a version that has no manifest: {line}")
        facts = manifest["metadata"]
        if (manifest["step"], facts["digest"]) != (line["step"], line["digest"]):
            raise Violation(f"{role} saw another version than was published: {line}")
        if role.startswith("reader"):
            return
        # A publisher's life may come to see the versions of rivals; it does not go back either.
        who = (role, line["life"] if role.startswith("publisher") else "")
        if line["version"] <= self._last_seen.get(who, 0) and role.startswith("publisher"):
            raise Violation(f"{role} published {line['version']} twice")
        if line["version"] < self._last_seen.get(who, 0):
            raise Violation(f"{role} went back to {line}")
        self._last_seen[who] = line["version"]

    def _version(self, manifest: dict[str, Any]) -> None:
        facts = manifest["metadata"]
        if (facts["run"], manifest["step"], facts["digest"]) not in self._intents:
            raise Violation(f"nobody meant to publish {manifest['lineage']}/{manifest['version']}")
        before = self.manifests.by_place.get((manifest["lineage"], manifest["version"] - 1))
        if before is not None and manifest["step"] != before["step"] + 1:
            raise Violation(f"version {manifest['version']} does not go on from the one before")

    def stream(self) -> int:
        """Whole, and whatever retention promises can be joined from nothing.

        Nobody else may be at it. Returns how many versions were joined.
        """
        self.manifests.refresh()
        versions = self.manifests.versions()
        if not versions:
            return 0
        report = fsck(self._soak.stream(), deep=True, work_dir=self._soak.root / "fsck")
        if not report.is_whole:
            shown = "\n".join(map(str, report.problems[:8]))
            raise Violation(f"fsck: {len(report.problems)} problems\n{shown}")
        if report.version_count != len(versions):
            raise Violation(f"fsck saw {report.version_count} of {len(versions)} versions")
        head = versions[-1]["version"]
        promised = [m for m in versions if m["version"] > head - KEEP_VERSIONS]
        for manifest in promised:
            self._join(manifest, is_partial=manifest["version"] % 3 == 0)
        return len(promised)

    def catches_up(self, copy: Path, *, is_partial: bool) -> None:
        """From wherever a kill left a folder, the head can be reached."""
        with Follower(
            self._soak.stream(),
            copy,
            tensors=PARTIAL if is_partial else None,
            accept_new_lineages=True,
            lease=False,
        ) as follower:
            version = follower.catch_up()
        newest = self.manifests.versions()[-1]
        if (version.lineage, version.version) != (newest["lineage"], newest["version"]):
            raise Violation(f"{copy} caught up to {version}, not to {newest['version']}")
        self.folder(copy, is_partial=is_partial)

    def _join(self, manifest: dict[str, Any], *, is_partial: bool) -> None:
        folder = self._soak.root / "join"
        shutil.rmtree(folder, ignore_errors=True)
        with Follower(
            self._soak.stream(), folder, tensors=PARTIAL if is_partial else None, lease=False
        ) as follower:
            version = follower.catch_up(manifest["version"])
        if version.lineage != manifest["lineage"]:
            raise Violation(f"joined version {version} of another lineage than {manifest}")
        if self.folder(folder, is_partial=is_partial) != manifest["version"]:
            raise Violation(f"joined {manifest['version']}, but the mark says otherwise")
        shutil.rmtree(folder)
