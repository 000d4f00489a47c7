"""The processes of the soak: a publisher, followers, a maintainer, readers. Any of them is killed
with SIGKILL at any moment and started again with the same folder.

Each writes a journal, one JSON object a line: what it was about to do, and what it saw.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from oracle import HELD_BY_PARTIAL, PARTIAL, SHAPES, Oracle, read_folder, write_folder

from thinwire.errors import (
    CommitConflict,
    Fenced,
    HistoryPruned,
    LineageChanged,
    NotFound,
)
from thinwire.follow import Follower, Stream, open_stream
from thinwire.maintain import Maintainer
from thinwire.publish import Publisher
from thinwire.stream.records import Policy

KEEP_VERSIONS = 12
GRACE_S = 4
_PR_SET_PDEATHSIG = 1
_PAUSE_S = 0.06


class Soak(NamedTuple):
    """What every process knows."""

    url: str
    seed: int
    root: Path

    def stream(self) -> Stream:
        """The stream, as someone who just started opens it."""
        policy = Policy(
            merge_levels=[2, 4, 8],
            keep_versions=KEEP_VERSIONS,
            keep_age_s=0,
            grace_s=GRACE_S,
            anchor_every=(5, 7, 12)[self.seed % 3],
        )
        return open_stream(self.url, model="soak", policy=policy)


class Journal:
    """Told of events, too: it is an observer."""

    def __init__(self, soak: Soak, role: str, life: str) -> None:
        path = soak.root / "journal" / f"{role}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._life = life

    def write(self, do: str, **facts: Any) -> None:
        """One line, in one write: a killed process leaves no half of it."""
        line = {"do": do, "life": self._life, "at": time.time(), **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def on_event(self, event: Any) -> None:
        """Refusals are kept: without faults of the store there is little to refuse."""
        kind = type(event).__name__
        if kind == "Refused":
            self.write("refused", code=event.code, version=event.version, reason=event.reason)
        elif kind == "Maintained":
            self.write("maintained", kind=event.kind, version=event.version)
        elif kind == "Applied":
            self.write("applied", kind=event.kind, version=event.version)


def start(act: Callable[..., None], soak: Soak, role: str, life: str, *args: Any) -> None:
    """What a new process runs. An error that it does not expect ends it, and so the soak."""
    with_parent()
    random.seed(f"{soak.seed} {life}")
    journal = Journal(soak, role, life)
    journal.write("start", pid=os.getpid())
    try:
        act(soak, journal, life, *args)
    except BaseException as error:
        journal.write("error", error=f"{type(error).__name__}: {error}", trace=_trace())
        os._exit(1)


def with_parent() -> None:
    """Die when the process that started this one does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def publisher(
    soak: Soak,
    journal: Journal,
    life: str,
    folder: Path,
    begins: bool,
    maintains: bool,
    limit: int | None,
) -> None:
    """Publish version after version; superseded by a rival, open again and go on."""
    oracle = Oracle(soak.seed)
    while limit is None or limit > 0:
        try:
            with Publisher(
                soak.stream(), folder, new_lineage=begins, maintain=maintains, observer=journal
            ) as made:
                while limit is None or limit > 0:
                    _publish_one(soak, journal, life, oracle, made, begins)
                    begins = False
                    limit = None if limit is None else limit - 1
                    time.sleep(random.expovariate(1 / _PAUSE_S))
        except (CommitConflict, Fenced) as error:
            journal.write("superseded", reason=str(error))
            begins = False
            time.sleep(random.random() * 0.2)
        except LineageChanged as error:
            # Someone, perhaps our former self, began a lineage and was killed before its version.
            journal.write("adopts", reason=str(error))
            begins = True


def _publish_one(
    soak: Soak, journal: Journal, life: str, oracle: Oracle, made: Publisher, begins: bool
) -> None:
    head = made.head
    step = 1 if head is None or head.step is None else head.step + 1
    if begins:
        step = max(1, step - random.randrange(1, 8))
    config = "" if head is None or begins else str(head.metadata["config"])
    source: Any = oracle.tensors(life, step)
    if random.random() < 0.2:
        config = json.dumps({"written": f"{life}@{step}"})
        source = soak.root / "trainer" / life
        words = oracle.words(life, step)
        write_folder(source, {name: w.tobytes() for name, w in words.items()}, config)
    digest = oracle.digest(life, step)
    facts = {"run": life, "digest": digest, "config": config}
    journal.write("publishing", step=step, **facts)
    version = made.publish(source, step=step, metadata=facts)
    journal.write("published", **_facts(version))


def follower(
    soak: Soak, journal: Journal, life: str, folder: Path, is_partial: bool, has_cache: bool
) -> None:
    """Follow for ever."""
    with Follower(
        soak.stream(),
        folder,
        tensors=PARTIAL if is_partial else None,
        accept_new_lineages=True,
        cache_dir=soak.root / "cache" if has_cache else None,
        cache_limit_bytes=3 << 20,
        lease=random.random() < 0.5,
        observer=journal,
    ) as made:
        for version in made.follow(poll_s=0.02):
            journal.write("seen", **_facts(version))


def reader(soak: Soak, journal: Journal, life: str, folder: Path) -> None:
    """Join from nothing, again and again: the newest version, or one that is promised."""
    oracle = Oracle(soak.seed)
    for number in range(1_000_000):
        here = folder / f"{life}-{number}"
        is_partial = random.random() < 0.3
        with Follower(
            soak.stream(),
            here,
            tensors=PARTIAL if is_partial else None,
            cache_dir=soak.root / "cache" if random.random() < 0.3 else None,
            lease=random.random() < 0.3,
            observer=journal,
        ) as made:
            known = _head(made.stream)
            target = random.randint(max(1, known - KEEP_VERSIONS + 1), max(1, known))
            is_latest = random.random() < 0.5
            try:
                version = made.catch_up("latest" if is_latest else target)
            except HistoryPruned:
                # It may be, if the stream went on so far meanwhile.
                if (known if is_latest else target) > _head(made.stream) - KEEP_VERSIONS:
                    raise
                continue
            except NotFound:
                if known:
                    raise
                time.sleep(0.05)
                continue
        journal.write("seen", **_facts(version))
        names = HELD_BY_PARTIAL if is_partial else set(SHAPES)
        run, step = str(version.metadata["run"]), version.step or 0
        if faults := oracle.faults(read_folder(here), run, step, names):
            raise RuntimeError(f"joined {version.version} into {here}: {faults}")
        shutil.rmtree(here)
        time.sleep(random.random() * 0.3)


def maintainer(soak: Soak, journal: Journal, _life: str, folder: Path) -> None:
    """Look after the stream for ever."""
    while True:
        try:
            soak.stream().record()
        except NotFound:
            time.sleep(0.02)
            continue
        with Maintainer(soak.stream(), folder, observer=journal) as made:
            made.watch(every_s=0.05)


def _head(stream: Stream) -> int:
    try:
        head = stream.tip().head
    except NotFound:
        return 0
    return 0 if head is None else head.version


def _facts(version: Any) -> dict[str, Any]:
    return {
        "lineage": version.lineage,
        "version": version.version,
        "step": version.step,
        "digest": version.metadata["digest"],
        "run": version.metadata["run"],
    }


def _trace() -> str:
    return traceback.format_exc()
