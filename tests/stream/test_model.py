"""Publishers, followers, maintainers and a failing store against a model of what must hold.

The model knows two things only: what was handed to each publish, told apart by its step, and which
manifests lie in the bucket, read without thinwire. From these follows what every folder must hold.

``THINWIRE_MODEL_EXAMPLES`` sets how many runs there are; more than the default are also random.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import InvalidArgument
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from thinwire.errors import (
    CommitConflict,
    Fenced,
    HistoryPruned,
    LineageChanged,
    NotFound,
    TensorMismatch,
    ThinwireError,
    Unavailable,
)
from thinwire.follow import Follower, open_stream
from thinwire.maintain import Maintainer, fsck
from thinwire.maintain.maintainer import Work
from thinwire.publish import Publisher
from thinwire.store import open_store
from thinwire.stream.events import Event, Refused
from thinwire.stream.records import Policy
from thinwire.testing.faults import NO_FAULTS, FaultStore, Rates

from .making import (
    MORE,
    SHAPES,
    Arrays,
    ClockStore,
    Content,
    KeyedRandom,
    blake3_of,
    content_of,
    first_arrays,
    read_checkpoint,
    read_mark,
    stepped,
    write_checkpoint,
)

EXAMPLES = int(os.environ.get("THINWIRE_MODEL_EXAMPLES", "0"))
# Nothing here is about power cuts: a folder that need not reach a disk.
SHARED_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# Shrinking takes up to five minutes: only where time was asked for.
SHRINK = [Phase.shrink] if EXAMPLES and not os.environ.get("THINWIRE_MODEL_NO_SHRINK") else []
_numbers = itertools.count()

WEATHER: dict[str, Rates | dict[str, Rates]] = {
    "calm": NO_FAULTS,
    "flaky": Rates(fail_before=0.05, fail_after=0.05),
    "stormy": Rates(fail_before=0.2, fail_after=0.15, truncate=0.1, drop=0.2, duplicate=0.2),
    "lost answers": {
        "put": Rates(fail_after=0.4),
        "put_file": Rates(fail_after=0.2),
        "put_if_absent": Rates(fail_after=0.6),
        "delete": Rates(fail_after=0.4),
    },
    "no commits": {"put_if_absent": Rates(fail_before=0.7)},
    "torn listings": {"list": Rates(drop=0.4, duplicate=0.3)},
    "cut reads": {"get": Rates(truncate=0.2), "get_range": Rates(truncate=0.2)},
}
# Which tensors a checkpoint has, and over how many files they are spread.
LAYOUTS: dict[str, tuple[list[str], int]] = {
    "plain": ([*SHAPES], 1),
    "spread": ([*SHAPES], 2),
    "more": ([*SHAPES, *MORE], 2),
    "less": ([name for name in SHAPES if name not in ("scale", "norm")], 1),
}
STORMS = sorted(set(WEATHER) - {"calm"})


@dataclass
class Attempt:
    """What was handed to a publish."""

    arrays: Arrays
    files: dict[str, bytes] | None
    session: object
    file_count: int = 1


@dataclass
class Known:
    """A manifest in the bucket."""

    digest: str
    lineage: str
    version: int
    kind: str
    step: int | None
    record: dict[str, Any]


@dataclass
class Sink:
    """A folder with what the model knows of it."""

    folder: Path
    tensors: list[str] | None = None
    cache: Path | None = None
    follower: Follower | None = None
    last: tuple[int, str] | None = None
    refused: list[Refused] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Refused):
            self.refused.append(event)


@dataclass
class Trainer:
    folder: Path
    publisher: Publisher | None = None
    retry: int | None = None
    sink: Sink | None = None
    is_fenced: bool = False


class Killed(BaseException):
    """The process ends here: nothing of it reaches the bucket any more."""


class Machine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        tokens = itertools.count()
        self.stack.enter_context(
            mock.patch.object(
                secrets, "token_hex", lambda n=32: blake3_of(b"%d" % next(tokens))[: 2 * n]
            )
        )
        self.folders = itertools.count()
        self.steps = itertools.count(1)
        self.attempts: dict[int, Attempt] = {}
        self.seen: dict[str, bytes] = {}
        self.chain: list[Known] = []
        self.contents: dict[str, Content] = {}
        self.interrupt: tuple[int, Callable[[], object]] | None = None
        self.lives: int | None = None
        self.base: Path | None = None
        self.is_amid = False
        self.is_done = False

    @initialize(
        seed=st.integers(0, 2**32),
        levels=st.sampled_from([(2, 4, 8), (2,), ()]),
        anchor_every=st.sampled_from([0, 1, 3]),
        keep_versions=st.sampled_from([1, 2, 4, 1000]),
        grace_s=st.sampled_from([0, 1, 100]),
        shard_raw_bytes=st.sampled_from([1 << 30, 100_000]),
        by_reference=st.booleans(),
        weather=st.sampled_from(sorted(WEATHER)),
    )
    def begin(
        self,
        seed: int,
        levels: tuple[int, ...],
        anchor_every: int,
        keep_versions: int,
        grace_s: int,
        shard_raw_bytes: int,
        by_reference: bool,
        weather: str,
    ) -> None:
        name = f"memory://model-{next(_numbers)}"
        self.raw = open_store(name, retry_s=0)
        self.clock = ClockStore(self.raw, 2e9)
        self.dice = KeyedRandom(seed)
        self.faults = FaultStore(self.clock, self.dice, hook=self._hook)
        self.policy = Policy(
            merge_levels=levels,
            anchor_every=anchor_every,
            keep_versions=keep_versions,
            keep_age_s=0,
            grace_s=grace_s,
        )
        self.shard_raw_bytes = shard_raw_bytes
        self.weights = first_arrays(seed % 1000, {**SHAPES, **MORE})
        self.trainers = [Trainer(self._folder("trainer")) for _ in range(3)]
        self.sinks = [
            Sink(self._folder("sink")),
            Sink(self._folder("sink"), cache=self.root / "cache"),
            Sink(self._folder("sink"), tensors=["layers.0.*"]),
            Sink(self._folder("sink"), tensors=["layers.1.*"], cache=self.root / "cache"),
        ]
        self.maintainers: list[Maintainer | None] = [None, None]
        # One version to begin with, so that short runs do something.
        if by_reference:
            self._publish_reference(self._opened(self.trainers[0], False))
        else:
            self._publish(self._opened(self.trainers[0], False), 0.01, None)
        self.faults.set_rates(WEATHER[weather])

    # What happens

    @rule(weather=st.sampled_from(sorted(WEATHER)))
    def set_weather(self, weather: str) -> None:
        self.faults.set_rates(WEATHER[weather])

    @rule(who=st.integers(0, 2), new_lineage=st.sampled_from([False, False, False, True]))
    def open_trainer(self, who: int, new_lineage: bool) -> None:
        self._opened(self.trainers[who], new_lineage)

    @rule(who=st.integers(0, 2), whole=st.booleans())
    def lose_trainer(self, who: int, whole: bool) -> None:
        trainer = self.trainers[who]
        self._close_trainer(trainer)
        if whole:
            trainer.folder, trainer.sink = self._folder("trainer"), None

    @rule(who=st.integers(0, 2), sink=st.integers(0, 1))
    def restart_from_follower(self, who: int, sink: int) -> None:
        """A follower's folder becomes a baseline."""
        trainer, taken = self.trainers[who], self.sinks[sink]
        self._close_trainer(trainer)
        self._close_follower(taken)
        if taken.folder == trainer.folder:
            return
        trainer.folder = taken.folder
        self.sinks[sink] = Sink(self._folder("sink"), cache=taken.cache)
        self._opened(trainer, False)

    @rule(
        who=st.integers(0, 2),
        share=st.sampled_from([0.0, 0.001, 0.3]),
        layout=st.sampled_from([None, None, None, *LAYOUTS]),
    )
    def publish(self, who: int, share: float, layout: str | None) -> None:
        self._publish(self._opened(self.trainers[who], False), share, layout)

    @rule(
        who=st.integers(0, 2),
        at=st.integers(1, 12),
        layout=st.sampled_from([None, "more"]),
        new_lineage=st.sampled_from([False, False, True]),
    )
    def die_in_publish(self, who: int, at: int, layout: str | None, new_lineage: bool) -> None:
        trainer = self._opened(self.trainers[who], new_lineage)
        with self._dying(at, lambda: self._close_trainer(trainer)):
            self._publish(trainer, 0.01, layout)
        self._check_folder(trainer.folder, None)

    @rule(who=st.integers(0, 3), at=st.integers(1, 12))
    def die_in_catch_up(self, who: int, at: int) -> None:
        sink = self.sinks[who]
        with self._dying(at, lambda: self._close_follower(sink)):
            self._catch_up(sink, "latest")
        self._catch_up(sink, "latest")

    @rule(who=st.integers(0, 1), at=st.integers(1, 40))
    def die_in_maintenance(self, who: int, at: int) -> None:
        with self._dying(at, lambda: self._close_maintainer(who)):
            self._maintain(who)

    @rule(who=st.integers(0, 2), weather=st.sampled_from(STORMS), times=st.integers(1, 3))
    def publish_in_a_storm(self, who: int, weather: str, times: int) -> None:
        """And again when it is over: what was not answered may be there or not."""
        trainer = self._opened(self.trainers[who], False)
        before = self.faults._rates
        self.faults.set_rates(WEATHER[weather])
        for _ in range(times):
            self._publish(trainer, 0.01, None)
        self.faults.set_rates(before)
        if trainer.publisher is not None and trainer.retry is not None:
            self._try_publish(trainer, trainer.retry)

    @rule(who=st.integers(0, 3), weather=st.sampled_from(STORMS), restart=st.booleans())
    def catch_up_in_a_storm(self, who: int, weather: str, restart: bool) -> None:
        before = self.faults._rates
        self.faults.set_rates(WEATHER[weather])
        if restart:
            self._close_follower(self.sinks[who])
        self._catch_up(self.sinks[who], "latest")
        self.faults.set_rates(before)
        self._catch_up(self.sinks[who], "latest")

    @rule(who=st.integers(0, 1), weather=st.sampled_from(STORMS))
    def maintain_in_a_storm(self, who: int, weather: str) -> None:
        before = self.faults._rates
        self.faults.set_rates(WEATHER[weather])
        self._maintain(who)
        self.faults.set_rates(before)

    @rule(who=st.integers(0, 2))
    def publish_again(self, who: int) -> None:
        """The same step again, after one that was not answered."""
        trainer = self.trainers[who]
        if trainer.publisher is not None and trainer.retry is not None:
            self._try_publish(trainer, trainer.retry)

    @rule(
        who=st.integers(0, 2),
        rival=st.integers(0, 2),
        at=st.integers(1, 9),
        new_lineage=st.booleans(),
    )
    def publish_amid(self, who: int, rival: int, at: int, new_lineage: bool) -> None:
        """One publisher acts in the middle of what another does."""
        if who == rival:
            return
        other = self.trainers[rival]

        def act() -> None:
            if new_lineage:
                self._close_trainer(other)
            self._publish(self._opened(other, new_lineage), 0.01, None)

        first = self._opened(self.trainers[who], False)
        with self._interrupted(at, act):
            self._publish(first, 0.01, None)

    @rule(who=st.integers(0, 2), at=st.integers(1, 9))
    def maintain_amid(self, who: int, at: int) -> None:
        """A maintainer runs in the middle of a publish."""
        trainer = self._opened(self.trainers[who], False)
        with self._interrupted(at, lambda: self._maintain(0)):
            self._publish(trainer, 0.01, None)

    @rule(who=st.integers(0, 3), at=st.integers(1, 12))
    def prune_amid(self, who: int, at: int) -> None:
        """Objects go while a follower fetches them, which takes it longer than is allowed."""
        sink = self.sinks[who]
        with self._interrupted(at, lambda: self._go_on_and_prune(self.policy.grace_s + 2000)):
            self._catch_up(sink, "latest")

    @rule(who=st.integers(0, 3), at=st.integers(1, 12), is_new=st.booleans())
    def prune_amid_in_time(self, who: int, at: int, is_new: bool) -> None:
        """Things are dropped while a follower fetches them; it notices nothing of it."""
        if self.policy.grace_s < 100 or not self._is_calm():
            return
        self.clock.now_s += 4000
        if is_new:
            self.begin_anew(who)
        sink = self.sinks[who]
        sink.refused.clear()
        with self._interrupted(at, lambda: self._go_on_and_prune(1)):
            found = self._catch_up(sink, "latest")
        if not sink.tensors or not self._has_new_layout():
            assert found is not None
            assert not sink.refused

    def _go_on_and_prune(self, seconds: int) -> None:
        for _ in range(3):
            self._publish(self._opened(self.trainers[0], False), 0.01, None)
            self.clock.now_s += seconds
            for who in range(2):
                self._maintain(who)

    @rule(at=st.integers(1, 40), seconds=st.sampled_from([1, 1000, 100_000]))
    def maintain_amid_maintenance(self, at: int, seconds: int) -> None:
        """One maintainer is suspended, so that another one takes over."""

        def act() -> None:
            self.clock.now_s += seconds
            self._maintain(1)

        with self._interrupted(at, act):
            self._maintain(0)

    @rule(who=st.integers(0, 3), at=st.integers(1, 9))
    def publish_while_following(self, who: int, at: int) -> None:
        def act() -> None:
            self._publish(self._opened(self.trainers[0], False), 0.01, None)

        with self._interrupted(at, act):
            self._catch_up(self.sinks[who], "latest")

    @rule(who=st.integers(0, 1))
    def maintain(self, who: int) -> None:
        self._maintain(who)

    @rule(who=st.integers(0, 1), keep_files=st.booleans())
    def lose_maintainer(self, who: int, keep_files: bool) -> None:
        self._close_maintainer(who)
        if not keep_files:
            shutil.rmtree(self.root / f"work-{who}", ignore_errors=True)

    @rule(seconds=st.sampled_from([1, 90, 4000, 200_000]))
    def pass_time(self, seconds: int) -> None:
        self.clock.now_s += seconds

    @rule(who=st.integers(0, 3))
    def catch_up(self, who: int) -> None:
        self._catch_up(self.sinks[who], "latest")

    @rule(who=st.integers(0, 3))
    def restart_follower(self, who: int) -> None:
        self._close_follower(self.sinks[who])
        self._catch_up(self.sinks[who], "latest")

    @rule(who=st.integers(0, 3), back=st.integers(0, 4), reset=st.booleans())
    def go_to(self, who: int, back: int, reset: bool) -> None:
        versions = [known for known in self.chain if known.kind != "end"]
        if versions:
            target = versions[max(0, len(versions) - 1 - back)]
            self._catch_up(self.sinks[who], target.version, reset)

    @rule(who=st.integers(0, 3))
    def begin_anew(self, who: int) -> None:
        sink = self.sinks[who]
        self._close_follower(sink)
        self.sinks[who] = Sink(self._folder("sink"), sink.tensors, sink.cache)

    @precondition(lambda self: any(known.kind != "end" for known in self.chain))
    @rule(back=st.integers(0, 4), part=st.booleans())
    def join_in_calm(self, back: int, part: bool) -> None:
        """Whoever joins gets to every version that retention promised."""
        self._join(back, ["layers.1.*"] if part else None)

    # What must hold

    @invariant()
    def bucket_is_sound(self) -> None:
        if hasattr(self, "raw"):
            self._look()

    def teardown(self) -> None:
        try:
            if hasattr(self, "raw") and not self.is_done:
                self._end()
        finally:
            if hasattr(self, "raw"):
                self.faults.set_rates(NO_FAULTS)
                self._close_all()
            self.stack.close()

    def _end(self) -> None:
        """In calm weather everybody gets to the head, and the stream is whole."""
        self.faults.set_rates(NO_FAULTS)
        self._look()
        versions = [known for known in self.chain if known.kind != "end"]
        for sink in self.sinks if versions else []:
            found = self._catch_up(sink, "latest")
            if found is None and sink.tensors and self._has_new_layout():
                continue
            assert found is not None
            assert found.version == versions[-1].version, f"{found} is not the head"
        # Somebody goes on, which takes the place of whatever failed last.
        trainer = Trainer(self._folder("trainer"))
        is_between = bool(self.chain) and self.chain[-1].kind == "end"
        self._publish(self._opened(trainer, is_between), 0.01, None, calm=True)
        self._close_trainer(trainer)
        work = None
        for who in (0, 1, 0, 1, 0, 1, 0, 1):
            self.clock.now_s += self.policy.grace_s + 2000
            work = self._maintain(who, calm=True)
        assert work is not None
        assert work == Work(), "it never comes to an end"
        versions = [known for known in self._look() if known.kind != "end"]
        for back in range(5):
            self._join(back, None)
        self._join(0, ["layers.0.*"])
        report = fsck(open_stream(self.raw), deep=True, base=self.base)
        assert report.is_whole, "\n".join(map(str, report.problems))
        assert report.version_count == len(versions)
        self._check_orphans()

    def _check_orphans(self) -> None:
        """What nobody names is gone, once it was old enough and a maintainer came by."""
        named = set()
        keys = [entry.key for entry in self.raw.list("")]
        for key in keys:
            if not re.search(r"/(manifests|merges|anchors)/[0-9-]+\.json$", key):
                continue
            record = json.loads(self.raw.get(key, limit_bytes=1 << 26))
            lineage, session = record["lineage"], record["session"][:16]
            version = record.get("version") or record["target"]["version"]
            for file in record.get("files", []):
                named.add(f"{lineage}/anchors/{version:012d}-{session}/{file['name']}")
            named |= set(shard_names(record))
        for key in keys:
            if key.endswith((".tw", ".safetensors")):
                assert key in named, f"{key} is left of something that failed"

    # How

    def _folder(self, name: str) -> Path:
        return self.root / f"{name}-{next(self.folders)}"

    def _stream(self) -> Any:
        return open_stream(self.faults, policy=self.policy)

    def _hook(self, when: str, operation: str, key: str) -> None:
        self.dice.on_operation(when, operation, key)
        if self.lives is not None and when == "before":
            self.lives -= 1
            if self.lives < 0:
                raise Killed
        if when != "before" or self.interrupt is None:
            return
        left, act = self.interrupt
        self.interrupt = (left - 1, act) if left > 1 else None
        if left == 1:
            saved = dict(vars(self.dice._at))
            act()
            vars(self.dice._at).update(saved)

    @contextlib.contextmanager
    def _interrupted(self, at: int, act: Callable[[], object]) -> Any:
        self.interrupt, self.is_amid = (at, act), True
        try:
            yield
        finally:
            self.interrupt, self.is_amid = None, False

    @contextlib.contextmanager
    def _dying(self, at: int, close: Callable[[], None]) -> Any:
        self.lives = at
        try:
            with contextlib.suppress(Killed):
                yield
            # What a process leaves behind that is no more: the locks go, and nothing else happens.
            self.lives = 0
            with contextlib.suppress(Killed):
                close()
        finally:
            self.lives = None
        close()

    def _opened(self, trainer: Trainer, new_lineage: bool) -> Trainer:
        if trainer.publisher is not None and not (new_lineage or trainer.is_fenced):
            return trainer
        self._close_trainer(trainer)
        try:
            trainer.publisher = Publisher(
                self._stream(),
                trainer.folder,
                new_lineage=new_lineage,
                maintain=False,
                base=self.base,
                shard_raw_bytes=self.shard_raw_bytes,
            )
        except ThinwireError as error:
            say(f"opening: {error!r}")
        return trainer

    def _close_trainer(self, trainer: Trainer) -> None:
        publisher = trainer.publisher
        trainer.publisher, trainer.retry, trainer.is_fenced = None, None, False
        if publisher is not None:
            publisher.close()

    def _publish_reference(self, trainer: Trainer) -> None:
        """The first version is what both sides have."""
        if trainer.publisher is None:
            return
        step = next(self.steps)
        files = {"config.json": b"{}", "tokenizer.json": b"[]"}
        arrays = {name: self.weights[name] for name in SHAPES}
        self.base = write_checkpoint(self._folder("base"), arrays, files, 2)
        self.attempts[step] = Attempt(arrays, files, trainer.publisher, 2)
        trainer.publisher.publish_reference(str(self.base), step=step)

    def _publish(
        self, trainer: Trainer, share: float, layout: str | None, calm: bool = False
    ) -> None:
        if trainer.publisher is None:
            assert not calm, "no publisher could be opened"
            return
        step = next(self.steps)
        self.weights = stepped(self.weights, step, share) if share else self.weights
        names, file_count = LAYOUTS[layout or "plain"]
        self._look()
        head = trainer.publisher.head
        if layout is None and head is not None:
            # Tensors by name are those that were there before.
            names = list(self.contents[head.manifest].tensors)
        arrays = {name: self.weights[name] for name in names}
        files = None if layout is None else {"config.json": layout.encode()}
        self.attempts[step] = Attempt(arrays, files, trainer.publisher, file_count)
        self._try_publish(trainer, step, calm)

    def _try_publish(self, trainer: Trainer, step: int, calm: bool = False) -> None:
        attempt = self.attempts[step]
        assert trainer.publisher is not None
        source: Any = attempt.arrays
        if attempt.files is not None:
            source = self._folder("checkpoint")
            write_checkpoint(source, attempt.arrays, attempt.files, attempt.file_count)
        before = len(self._look())
        trainer.retry = None
        try:
            version = trainer.publisher.publish(source, step=step, metadata={"n": step})
        except ThinwireError as error:
            say(f"publish {step}: {error!r}")
            self._check_calm(calm, error)
            trainer.is_fenced = isinstance(error, Fenced | CommitConflict)
            if isinstance(error, Unavailable):
                trainer.retry = step
            if isinstance(error, Fenced | CommitConflict):
                assert self._place_of(step) is None, "it lost and its version is there"
        else:
            known = self._place_of(step)
            assert known is not None, f"step {step} was published and is not in the bucket"
            assert known.version == version.version
            assert known.digest == version.manifest
            assert trainer.publisher.head == version
            assert len(self._look()) > before or self.attempts[step].session is trainer.publisher
            # What publish says is durable is so whatever comes.
        self._check_folder(trainer.folder, None)

    def _place_of(self, step: int) -> Known | None:
        found = [known for known in self._look() if known.step == step]
        assert len(found) <= 1, f"step {step} was published {len(found)} times"
        return found[0] if found else None

    def _maintain(self, who: int, calm: bool = False) -> Work | None:
        maintainer = self.maintainers[who]
        if maintainer is None:
            maintainer = Maintainer(self._stream(), self.root / f"work-{who}", base=self.base)
            self.maintainers[who] = maintainer
        try:
            return maintainer.run_once()
        except ThinwireError as error:
            say(f"maintain: {error!r}")
            self._check_calm(calm, error)
            return None

    def _catch_up(self, sink: Sink, target: Any, reset: bool = False) -> Any:
        found = None
        try:
            if sink.follower is None:
                sink.follower = Follower(
                    self._stream(),
                    sink.folder,
                    tensors=sink.tensors,
                    cache_dir=sink.cache,
                    base=self.base,
                    accept_new_lineages=True,
                    observer=sink,
                )
            found = sink.follower.catch_up(target, reset=reset)
        except ThinwireError as error:
            say(f"catch_up: {error!r}")
            self._check_refusal(sink, error, target, reset)
        held = self._check_folder(sink.folder, sink.tensors)
        if found is not None:
            assert held is not None
            assert held.digest == found.manifest
            assert (held.version, held.step) == (found.version, found.step)
            if target != "latest":
                assert found.version == target
        if sink.last is not None:
            assert held is not None, "what was held is gone"
            assert reset or held.version >= sink.last[0], "it went back"
        sink.last = None if held is None else (held.version, held.digest)
        return found

    @staticmethod
    def _check_calm(calm: bool, error: ThinwireError) -> None:
        assert not calm, repr(error)

    def _check_refusal(self, sink: Sink, error: ThinwireError, target: Any, reset: bool) -> None:
        """In calm weather only what was asked for can be wrong."""
        if not self._is_calm():
            return
        if sink.tensors and isinstance(error, TensorMismatch):
            assert self._has_new_layout()
            return
        versions = [known.version for known in self.chain if known.kind != "end"]
        if self.is_amid:
            # What it was going to fetch went, later than anybody should fetch.
            assert isinstance(error, NotFound | HistoryPruned), repr(error)
        elif target == "latest":
            assert isinstance(error, NotFound), repr(error)
            assert not versions
        elif isinstance(error, LineageChanged):
            assert sink.last is not None
            assert not reset
            assert target < sink.last[0]
        else:
            assert isinstance(error, NotFound | HistoryPruned), repr(error)
            assert target not in versions[-self.policy.keep_versions :], "it was promised"

    def _join(self, back: int, tensors: list[str] | None) -> None:
        versions = [known for known in self._look() if known.kind != "end"]
        if back >= min(len(versions), self.policy.keep_versions):
            return
        wanted = versions[-1 - back]
        folder = self._folder("joiner")
        if tensors and self._has_new_layout():
            return
        with Follower(
            open_stream(self.raw),
            folder,
            tensors=tensors,
            base=self.base,
            accept_new_lineages=True,
            lease=False,
        ) as follower:
            found = follower.catch_up(wanted.version)
        assert found.manifest == wanted.digest
        held = self._check_folder(folder, tensors)
        assert held == wanted
        shutil.rmtree(folder)

    def _is_calm(self) -> bool:
        return all(rates == NO_FAULTS for rates in self.faults._rates.values())

    def _has_new_layout(self) -> bool:
        """Whether tensors came or went. Who holds some only may then have to wait for an anchor."""
        held = [self.contents[known.digest] for known in self.chain if known.kind != "end"]
        return len({tuple(sorted(content.tensors)) for content in held}) > 1

    def _check_folder(self, folder: Path, tensors: list[str] | None) -> Known | None:
        """A folder holds exactly the version of its mark, which is in the bucket."""
        if not folder.exists():
            return None
        mark, content = read_mark(folder), read_checkpoint(folder)
        if mark is None:
            assert content is None, "weights without a mark"
            return None
        known = next((k for k in self._look() if k.digest == mark["manifest"]), None)
        assert known is not None, f"a version that nobody published: {mark}"
        assert (known.version, known.step) == (mark["version"], mark["step"])
        wanted = self.contents[known.digest]
        if tensors:
            wanted = wanted.part(tensors[0])
        assert content == wanted, f"wrong bits at version {known.version}"
        return known

    def _look(self) -> list[Known]:
        """Read the bucket, without thinwire: what is there stays, in one unbroken chain."""
        if self._read_manifests():
            self.chain = self._read_chain()
            self._resolve()
        return self.chain

    def _read_manifests(self) -> bool:
        found = {}
        for entry in self.raw.list(""):
            if "/manifests/" in entry.key:
                found[entry.key] = self.raw.get(entry.key, limit_bytes=1 << 26)
        for key, data in self.seen.items():
            assert found.get(key) == data, f"{key} was changed or removed"
        is_new = len(found) > len(self.seen)
        self.seen = found
        return is_new

    def _read_chain(self) -> list[Known]:
        chain: list[Known] = []
        record = json.loads(self.raw.get("stream.json", limit_bytes=1 << 16))
        lineage, version, last = record["lineage"], 1, ""
        left = set(self.seen)
        while True:
            key = f"{lineage}/manifests/{version:012d}.json"
            data = self.seen.get(key)
            if data is None:
                break
            left.remove(key)
            manifest = json.loads(data)
            assert (manifest["lineage"], manifest["version"]) == (lineage, version)
            assert manifest.get("base", {}).get("manifest", "") == last
            last = blake3_of(data)
            step = manifest.get("step")
            chain.append(Known(last, lineage, version, manifest["kind"], step, manifest))
            if manifest["kind"] == "end":
                lineage = manifest["successor"]
            else:
                version += 1
        assert not left, f"not in the chain: {left}"
        return chain

    def _resolve(self) -> None:
        """What every version must hold, from what was handed over for its step."""
        files: dict[str, bytes] = {}
        steps: set[int] = set()
        for known in self.chain:
            if known.kind == "end":
                continue
            assert known.step in self.attempts, f"version {known.version} was never handed over"
            assert known.step not in steps, f"step {known.step} was published twice"
            steps.add(known.step)
            attempt = self.attempts[known.step]
            if attempt.files is not None:
                files = attempt.files
            elif known.kind == "anchor":
                files = {}
            if known.digest not in self.contents:
                self.contents[known.digest] = content_of(attempt.arrays, files)

    @staticmethod
    def _close_follower(sink: Sink) -> None:
        follower, sink.follower = sink.follower, None
        if follower is not None:
            follower.close()

    def _close_maintainer(self, who: int) -> None:
        maintainer, self.maintainers[who] = self.maintainers[who], None
        if maintainer is not None:
            maintainer.close()

    def _close_all(self) -> None:
        for trainer in self.trainers:
            self._close_trainer(trainer)
        for sink in self.sinks:
            self._close_follower(sink)
        for who in range(len(self.maintainers)):
            self._close_maintainer(who)


def say(text: str) -> None:
    """A note, where notes can be made: not in threads of the store."""
    with contextlib.suppress(InvalidArgument):
        note(text)


def shard_names(record: dict[str, Any]) -> list[str]:
    """Where the shards of a version or a merged delta lie."""
    version = record.get("version") or record["target"]["version"]
    base = record.get("base", {}).get("version", 0)
    if record.get("kind") == "reference":
        base = version
    folder = f"{record['lineage']}/deltas/{base:012d}-{version:012d}"
    names = []
    for number, shard in enumerate(record.get("shards", [])):
        blocks = shard["blocks"]
        digest = blocks[0] if len(blocks) == 1 else blake3_of("".join(blocks).encode())
        names.append(f"{folder}/{record['session'][:16]}-{number:04d}-{digest[:32]}.tw")
    return names


@pytest.mark.filterwarnings("ignore")
def test_the_protocol_holds_whatever_happens() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES or 30,
            stateful_step_count=25,
            derandomize=not EXAMPLES,
            # A long run is to be gone on with: what failed is kept and tried first.
            database=DirectoryBasedExampleDatabase(".hypothesis/model") if EXAMPLES else None,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, *SHRINK],
            suppress_health_check=list(HealthCheck),
        ),
    )
