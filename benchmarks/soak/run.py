"""Kill real processes at random moments, again and again, and check that nothing was lost.

    python benchmarks/soak/run.py [--rounds 500] [--seed N] [--url URL] [--root FOLDER]

A publisher, three followers, a maintainer and a reader work on one stream. A round kills one of
them with SIGKILL, checks its folder and those of others as a kill would have left them, and starts
it again: with its folder, an empty one, or another's; a publisher at times in a new lineage, or
beside a rival. Every few rounds all of them are killed at once and the whole stream is checked.

Exits with 1, naming the seed and the folder that was kept, when an invariant does not hold. The
seed fixes every choice, but not the moments: the same seed finds a rare fault again only by luck.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import actors
from actors import Soak
from checks import Checker, Violation

from thinwire.store import open_store

_CHECK_EVERY = 25
# Whom a round kills, by weight.
_VICTIMS = {"publisher": 8, "full": 4, "partial": 3, "cached": 3, "maintainer": 5, "reader": 1}
_FOLLOWERS = ("full", "partial", "cached")
# What lies in a folder before an update is certain, and while it is carried out.
_AMID = (".thinwire-staging", ".thinwire-redo", ".thinwire-redo")
# A fresh interpreter that has the imports, and has never used them, makes each process cheap.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["thinwire.publish", "thinwire.maintain", "thinwire.testing"])


class Actor:
    """A process and the folder that outlives it."""

    def __init__(self, soak: Soak, role: str) -> None:
        self._soak = soak
        self.role = role
        self.folder = soak.root / role
        self._process: ForkServerProcess | None = None
        self._lives = 0

    def start(self, act: Callable[..., None], *args: Any) -> None:
        """Begin another life."""
        self._lives += 1
        life = f"{self.role}.{self._lives}"
        everything = (act, self._soak, self.role, life, *args)
        self._process = _CONTEXT.Process(target=actors.start, args=everything)
        self._process.start()

    def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def is_running(self) -> bool:
        """Whether it was started and did not end."""
        return self._process is not None and self._process.is_alive()

    def exit_code(self) -> int | None:
        """Of a process that ended by itself."""
        return None if self._process is None else self._process.exitcode

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Hold it still: its folder is then as a kill would leave it."""
        pid = None if self._process is None else self._process.pid
        if pid is None or not self.is_running():
            yield
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            while _state(pid) not in "TtZX":
                time.sleep(0.0005)
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


class Runner:
    """The rounds."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self._choose = random.Random(soak.seed)
        self._checker = Checker(soak)
        self._actors = {role: Actor(soak, role) for role in (*_VICTIMS, "publisher-rival")}
        self._store = open_store(soak.url)
        self.counts: dict[str, int] = {}

    def run(self, rounds: int) -> None:
        """Raises Violation."""
        for folder in ("journal", "trainer", "copies"):
            (self._soak.root / folder).mkdir(parents=True)
        for role in _VICTIMS:
            self._start(role)
        for number in range(1, rounds + 1):
            self._round()
            if number % _CHECK_EVERY == 0 or number == rounds:
                self._stop_the_world()
                print(f"round {number}: {self._progress()}", flush=True)
                if number < rounds:
                    for role in _VICTIMS:
                        self._start(role)
        count = len(self._checker.manifests.versions())
        if count < rounds // 10:
            raise Violation(f"hardly anything was published: {count} versions")

    def close(self) -> None:
        """Kill everything."""
        for actor in self._actors.values():
            actor.kill()

    def _round(self) -> None:
        role = self._choose.choices(list(_VICTIMS), list(_VICTIMS.values()))[0]
        others = [other for other in (*_FOLLOWERS, "publisher") if other != role]
        other = self._choose.choice(others)
        self._wait(role)
        self._check_running(role)
        self._actors[role].kill()
        with self._actors[other].stopped():
            copy = self._copy(other)
        self._count(f"kill {role}")
        self._check_folder(role)
        self._check_copy(other, copy)
        if self._choose.random() < 0.2:
            self._end_leases()
        self._start(role, is_varied=True)

    def _wait(self, role: str) -> None:
        """For any moment, one shortly after something began, or one amid an update."""
        choose = self._choose.random()
        time.sleep(self._choose.random() ** 2 * (0.4 if choose < 0.4 else 0.1))
        if choose < 0.4:
            return
        if choose < 0.6 and role not in ("maintainer", "reader"):
            folder = self._actors[role].folder
            _wait_until((folder / self._choose.choice(_AMID)).exists)
            return
        # What a publisher is about to do, or has done, sets its followers to work.
        begins = role if role in ("maintainer", "reader") else "publisher"
        journal = self._soak.root / "journal" / f"{begins}.jsonl"
        size = journal.stat().st_size if journal.exists() else 0
        _wait_until(lambda: journal.exists() and journal.stat().st_size > size)
        time.sleep(self._choose.random() * 0.025)

    def _start(self, role: str, *, is_varied: bool = False) -> None:
        actor, choose = self._actors[role], self._choose
        variant = choose.random() if is_varied else 1.0
        if role == "publisher":
            self._start_publisher(variant)
        elif role == "maintainer":
            if variant < 0.15:
                self._wipe(role)
            if variant < 0.7:
                self._store.delete(["leases/maintainer.json"])
            actor.start(actors.maintainer, actor.folder)
        elif role == "reader":
            actor.start(actors.reader, actor.folder)
        else:
            if variant < 0.1:
                self._wipe(role)
            actor.start(actors.follower, actor.folder, role == "partial", role != "full")

    def _start_publisher(self, variant: float) -> None:
        actor, full = self._actors["publisher"], self._actors["full"]
        begins = variant < 0.12
        if 0.12 <= variant < 0.25:
            self._wipe("publisher")
            self._count("publisher from nothing")
        elif 0.25 <= variant < 0.4:
            full.kill()
            for folder in (actor.folder, full.folder):
                folder.mkdir(exist_ok=True)
            swapped = self._soak.root / "swapped"
            actor.folder.rename(swapped)
            full.folder.rename(actor.folder)
            swapped.rename(full.folder)
            # That folder was ahead of the follower, or behind it.
            actors.Journal(self._soak, "full", "runner").write("wiped")
            self._start("full")
            self._count("publisher from a follower's folder")
        elif 0.4 <= variant < 0.55:
            rival = self._actors["publisher-rival"]
            self._check_ended(rival)
            rival.kill()
            self._check_folder("publisher-rival")
            if self._choose.random() < 0.5:
                shutil.rmtree(rival.folder, ignore_errors=True)
            rival.start(actors.publisher, rival.folder, False, False, 5)
            self._count("rival")
        if begins:
            self._count("new lineage")
        maintains = self._choose.random() < 0.3
        actor.start(actors.publisher, actor.folder, begins, maintains, None)

    def _stop_the_world(self) -> None:
        for role in _VICTIMS:
            self._check_running(role)
        for actor in self._actors.values():
            actor.kill()
        self._checker.journals()
        copies = {role: self._check_folder(role) for role in self._actors}
        self._checker.journals()
        self.counts["joined"] = self.counts.get("joined", 0) + self._checker.stream()
        if self._checker.manifests.versions():
            for role in (*_FOLLOWERS, "publisher"):
                copy = copies[role]
                if copy is not None:
                    self._checker.catches_up(copy, is_partial=role == "partial")
        self._end_leases()

    def _end_leases(self) -> None:
        """As if half an hour had passed: no lease is valid for longer."""
        leases = [entry.key for entry in self._store.list("leases/")]
        # A maintainer reads the store's clock off these.
        self._store.delete([key for key in leases if "/clock-" not in key])

    def _check_folder(self, role: str) -> Path | None:
        """Check a dead process's folder, on a copy: the next life must recover it by itself."""
        copy = self._copy(role)
        self._check_copy(role, copy)
        return copy

    def _copy(self, role: str) -> Path | None:
        folder = self._actors[role].folder
        if role == "reader" or not folder.is_dir():
            return None
        copy = self._soak.root / "copies" / role
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, symlinks=True)
        return copy

    def _check_copy(self, role: str, copy: Path | None) -> None:
        if copy is None:
            return
        if role == "maintainer":
            for trail in copy.glob("*/*"):
                self._checker.folder(trail, is_partial=False)
            return
        self._checker.folder(copy, is_partial=role == "partial")

    def _wipe(self, role: str) -> None:
        shutil.rmtree(self._actors[role].folder, ignore_errors=True)
        actors.Journal(self._soak, role, "runner").write("wiped")

    def _check_running(self, role: str) -> None:
        if not self._actors[role].is_running():
            # Its journal says why.
            self._checker.journals()
            raise Violation(f"{role} ended by itself with {self._actors[role].exit_code()}")

    def _check_ended(self, actor: Actor) -> None:
        if actor.exit_code() not in (None, 0):
            self._checker.journals()
            raise Violation(f"{actor.role} ended with {actor.exit_code()}")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _progress(self) -> str:
        checker = self._checker
        versions = checker.manifests.versions()
        lineages = len(checker.manifests.chain)
        return (
            f"{len(versions)} versions in {lineages} lineages, "
            f"{checker.folder_count} folders checked, {checker.mid_update_count} of them amid an "
            f"update, {self.counts.get('joined', 0)} joins; whole"
        )

    def summary(self) -> str:
        """What happened, in counts."""
        counts = {**self.counts, **self._checker.counts}
        return ", ".join(f"{what}: {count}" for what, count in sorted(counts.items()))


def _wait_until(is_so: Callable[[], bool], timeout_s: float = 0.3) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.0003)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--url", help="an empty place; default: file:// below the root")
    parser.add_argument(
        "--root", type=Path, help="a folder to make and work in; default: a temporary one"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder in any case")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    root = (given.root or Path(tempfile.mkdtemp(prefix="thinwire-soak-")) / "soak").resolve()
    root.mkdir(parents=True)
    soak = Soak(given.url or (root / "store").as_uri(), seed, root)
    print(f"seed {seed}, {soak.url}", flush=True)
    start_s = time.monotonic()
    runner = Runner(soak)
    try:
        runner.run(given.rounds)
    except Exception as error:
        if not isinstance(error, Violation):
            traceback.print_exc()
        print(f"VIOLATED: {error}\nseed {seed}; everything is kept in {root}", flush=True)
        return 1
    finally:
        runner.close()
    print(f"{given.rounds} kills in {time.monotonic() - start_s:.0f} s. {runner.summary()}")
    if not given.keep:
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
