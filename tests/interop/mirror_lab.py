"""A stream of a few versions, mirrors of it, and their destination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.interop.chains import publish, read_tensors, replayed

from thinwire.follow import open_stream
from thinwire.interop.formats import format_named
from thinwire.interop.mirror import Mirror
from thinwire.interop.mirror_record import RECORDS, MirroredVersion
from thinwire.interop.mirror_sink import mirror_sink
from thinwire.store import Store, open_store
from thinwire.stream.version import Version

Told = list[tuple[Version, MirroredVersion]]

RECORD = RECORDS.rstrip("/")


class Died(BaseException):
    """Stands for the death of the process: nothing catches it."""


class Lab:
    """A stream of the first versions, and mirrors of it."""

    def __init__(self, root: Path, versions: list[Path]) -> None:
        self.root = root
        self.versions = versions
        self.chain = root / "chain"
        self.count = 0
        self._replays = 0

    def publish(self, count: int = 1) -> None:
        publish(
            self.root / "stream",
            self.root / "state",
            self.versions[self.count : self.count + count],
            first_step=self.count + 1,
        )
        self.count += count

    def mirror(
        self,
        format: str = "slime",
        *,
        store: Store | None = None,
        copy: str = "copy",
        workers: int = 1,
        full_every: int | None = 0,
        keep_full: int = 0,
        accept_new_lineages: bool | None = None,
    ) -> Mirror:
        stream = open_stream(self.root / "stream")
        sink = mirror_sink(
            stream,
            self.root / copy,
            store or open_store(str(self.chain)),
            format_named(format),
            full_every=full_every,
            keep_full=keep_full,
            workers=workers,
        )
        return Mirror(stream, sink, accept_new_lineages=accept_new_lineages)

    def catch_up(self, **options: object) -> Told:
        with self.mirror(**options) as mirror:  # type: ignore[arg-type]
            return list(mirror.catch_up())

    def states(self) -> dict[int, dict[str, bytes]]:
        self._replays += 1
        return replayed(self.chain, None, self.root / f"work-{self._replays}")

    def wanted(self, *numbers: int) -> dict[int, dict[str, bytes]]:
        return {number: read_tensors(self.versions[number - 1]) for number in numbers}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.chain.iterdir() if path.name[0] != ".")

    def files(self) -> dict[str, bytes]:
        """Everything at the destination; who wrote it last does not count."""
        found = {
            str(path.relative_to(self.chain)): path.read_bytes()
            for path in sorted(self.chain.rglob("*"))
            if path.is_file()
        }
        if records := [name for name in found if name.startswith(RECORDS)]:
            # That of the last holder counts.
            record = json.loads([found.pop(name) for name in records][-1])
            found[RECORD] = json.dumps(record | {"holder": ""}).encode()
        return found

    def record(self) -> dict[str, Any]:
        """What the destination says of itself."""
        record: dict[str, Any] = json.loads(max((self.chain / RECORD).iterdir()).read_text())
        return record

    def write_record(self, record: dict[str, Any]) -> None:
        max((self.chain / RECORD).iterdir()).write_text(json.dumps(record))


def shown(told: Told) -> list[tuple[int, int | None]]:
    """The versions that were written, each with its base."""
    return [(written.version, written.base) for _, written in told]


def copy_of(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def restore(folder: Path, files: dict[str, bytes]) -> None:
    """Have a folder hold exactly these files."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
        else:
            path.rmdir()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
