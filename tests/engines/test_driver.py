"""Walks an engine in memory through every fault: one whole version is served, or none."""

from __future__ import annotations

import importlib.util
import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: the driver was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from thinwire.engines import patience
from thinwire.engines.driver import Deadlines, Driver, Served
from thinwire.engines.engine import Policy, label_of
from thinwire.errors import (
    Deadline,
    EngineError,
    EngineNotReady,
    EngineUnreachable,
    InvalidArgument,
    ThinwireError,
)
from thinwire.follow import open_stream
from thinwire.publish import Publisher
from thinwire.store import open_store
from thinwire.stream.events import EngineFailed, EngineUpdated, Event
from thinwire.testing import FaultStore, Rates
from thinwire.testing.engine import RANK_STEPS, STEPS, Fault, MemoryEngine, Token

KEEP = Policy(cache="keep")
RESET = Policy(cache="reset")
NEW = Policy(cache="new-sessions", pause="wait")
ABORT = Policy(cache="reset", pause="abort")

SHAPES = {"embed": (40, 16), "w": (16, 24), "norm": (16,), "scale": ()}


class Stand:
    """A trainer, its stream, an engine that was started from the first version, and its driver."""

    def __init__(self, folder: Path, policy: Policy = KEEP, **options: Any) -> None:
        self.folder = folder
        rng = np.random.default_rng(1)
        self.model = {
            name: np.asarray(rng.normal(0, 0.1, shape)).astype(ml_dtypes.bfloat16)
            for name, shape in SHAPES.items()
        }
        self.digests: dict[str, str] = {}
        self._versions = itertools.count(1)
        read_s = options.pop("read_s", 0.0)
        self.engine = MemoryEngine(self._save(), read_s=read_s)
        self.digests["default"] = self.engine.digest_now()
        store = folder / "store"
        store.mkdir()
        self.faults = FaultStore(open_store(store.as_uri()), random.Random(1))
        self.publisher = Publisher(open_stream(store.as_uri()), folder / "trainer", maintain=False)
        self.ready: list[bool] = []
        self.events: list[Event] = []
        self.labels: list[str] = []
        self.publish(0)
        options.setdefault(
            "deadlines", Deadlines(ask=0.5, stage=5, pause=2, apply=2, attach=5, prove=5)
        )
        self.driver = Driver(
            open_stream(self.faults),
            self.engine,
            folder / "copy",
            policy=policy,
            on_ready=self._on_ready,
            observer=self,
            lease=False,
            **options,
        )

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.driver.close()
        self.publisher.close()

    def publish(self, change_count: int = 20) -> str:
        """Change some words of each tensor, and publish."""
        rng = np.random.default_rng(next(self._versions))
        new = {}
        for name, array in self.model.items():
            copy = array.copy().reshape(-1)
            at = rng.integers(0, copy.size, change_count)
            copy.view(np.uint16)[at] ^= 1
            new[name] = copy.reshape(array.shape)
        self.model = new
        label = label_of(self.publisher.publish(self.model))
        self.digests[label] = self.engine.digest_of(self._save())
        self.labels.append(label)
        return label

    def bring(self) -> Served | None:
        """Catch up, and bring the engine there; every promise is looked into."""
        version = self.driver.follower.catch_up()
        try:
            return self.driver.bring_to(version)
        finally:
            self.check()

    def check(self) -> None:
        engine = self.engine
        assert not engine.misdeeds
        if not engine.is_paused:
            assert self.digests.get(engine.label) == engine.digest_now(), "a mix is served"
        if self.driver.is_ready:
            assert not engine.is_paused, "it is ready and paused"
            assert self.driver.served is not None
            # Of a new start nobody knows before the engine answers.
            if engine.log[-1:] != ["state"]:
                assert label_of(self.driver.served) == engine.label
        if engine.is_paused:
            assert not self.driver.is_ready
        # Of what is told, every word is a change, but that it still is ready.
        assert all(a != b or b for a, b in itertools.pairwise(self.ready))
        assert self.ready[-1] == self.driver.is_ready

    def is_at(self, label: str) -> bool:
        engine = self.engine
        return (
            engine.label == label
            and engine.digest_now() == self.digests[label]
            and not engine.is_paused
            and self.driver.is_ready
        )

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def _save(self) -> Path:
        folder = self.folder / f"version{next(self._versions)}"
        folder.mkdir()
        save_file(self.model, folder / "model.safetensors")
        return folder

    def _on_ready(self, is_ready: bool) -> None:
        self.ready.append(is_ready)
        if is_ready:
            assert not self.engine.is_paused
            assert self.digests[self.engine.label] == self.engine.digest_now()
            assert self.engine.label in self.labels


@contextmanager
def stand_in(folder: Path, policy: Policy = KEEP, **options: Any) -> Iterator[Stand]:
    found = Stand(folder, policy, **options)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_MAX_WAIT_S", 0.02)


def steps_in_pause(log: list[str]) -> list[str]:
    return log[log.index("pause") : log.index("resume") + 1]


@pytest.mark.parametrize("policy", [KEEP, RESET, NEW, ABORT])
def test_nothing_else_happens_in_the_pause(policy: Policy, tmp_path: Path) -> None:
    caches = [] if policy.cache == "keep" else ["empty_caches"]
    with stand_in(tmp_path, policy) as stand:
        assert stand.ready == [False]
        served = stand.bring()
        assert served is not None
        assert (served.way, served.is_proved) == ("attach", True)
        log = stand.engine.log
        middle = ["set_label", "attach", *caches, "set_label"]
        assert steps_in_pause(log) == ["pause", *middle, "resume"]
        assert log[: log.index("pause")] == ["state", "meet"]
        for _ in range(3):
            label = stand.publish()
            stand.engine.log.clear()
            served = stand.bring()
            assert served is not None
            assert (served.way, served.label, served.is_proved) == ("changes", label, True)
            assert served.cache == policy.cache
            middle = ["pause", "apply", *caches, "set_label", "resume"]
            assert stand.engine.log == ["state", "stage", *middle, "prove"]
            inside = ["pause", "apply", *(["caches"] if caches else []), "label", "resume"]
            assert [*served.phases] == ["stage", *inside, "prove"]
            parts_s = sum(served.phases[name] for name in inside)
            assert parts_s <= served.pause_s + 1e-3
            assert stand.is_at(label)
        assert stand.bring() is None
        assert stand.ready == [False, True]
        assert [event.way for event in stand.of(EngineUpdated)] == ["attach"] + 3 * ["changes"]


def errors() -> list[Callable[[], ThinwireError]]:
    return [
        lambda: EngineError("it says no"),
        lambda: EngineUnreachable("no answer"),
        lambda: Deadline("it took too long"),
        lambda: EngineNotReady("not now"),
    ]


FAULTS = [
    (step, when)
    for step in STEPS
    for when in ("before", "after", *(["some"] if step in RANK_STEPS else []))
]


@pytest.mark.parametrize(("step", "when"), FAULTS)
def test_one_fault_anywhere(step: str, when: Any, tmp_path: Path) -> None:
    with stand_in(tmp_path, RESET) as stand:
        for make, is_new in itertools.product(errors(), (True, False)):
            if is_new:
                stand.engine.restart()
            label = stand.publish()
            # Faults of the way back strike together with one of the way there.
            if step == "undo":
                stand.engine.faults = [Fault("apply", "after", EngineError("no"))]
            stand.engine.faults += [Fault(step, when, make())]
            before = stand.engine.label
            try:
                stand.bring()
            except ThinwireError:
                assert stand.engine.is_paused or stand.engine.label in (before, label)
            stand.engine.faults = []
            again = stand.bring()
            assert again is None or again.label == label
            assert stand.is_at(label)


def fault_lists() -> st.SearchStrategy[list[tuple[str, str, int, int, int]]]:
    one = st.tuples(
        st.sampled_from(STEPS),
        st.sampled_from(["before", "after", "some"]),
        st.integers(0, 3),
        st.integers(1, 2),
        st.integers(0, 1),
    )
    return st.lists(one, min_size=1, max_size=4)


@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(fault_lists(), st.sampled_from([KEEP, RESET, NEW]), st.integers(0, 3), st.booleans())
def test_several_faults_together(
    tmp_path_factory: pytest.TempPathFactory,
    faults: list[tuple[str, str, int, int, int]],
    policy: Policy,
    versions: int,
    is_attached: bool,
) -> None:
    with stand_in(tmp_path_factory.mktemp("stand"), policy) as stand:
        if is_attached:
            stand.bring()
        label = stand.publish()
        stand.engine.faults = [
            Fault(step, when, errors()[error](), times, skip)  # type: ignore[arg-type]
            for step, when, error, times, skip in faults
        ]
        for _ in range(versions):
            with_suppressed(stand.bring)
            label = stand.publish()
        with_suppressed(stand.bring)
        stand.engine.faults = []
        stand.bring()
        assert stand.is_at(label)


def with_suppressed(act: Callable[[], Any]) -> bool:
    try:
        act()
    except ThinwireError:
        return False
    return True


RESTARTS = ["state", "stage", "pause", "apply", "empty_caches", "set_label", "resume", "prove"]


@pytest.mark.parametrize("step", RESTARTS)
def test_the_engine_is_started_again_in_the_middle(step: str, tmp_path: Path) -> None:
    with stand_in(tmp_path, RESET) as stand:
        stand.bring()
        label = stand.publish()

        def restart(name: str) -> None:
            if name == step:
                stand.engine.on_step = lambda name: None
                stand.engine.restart()

        stand.engine.on_step = restart
        with_suppressed(stand.bring)
        # What it was told last may have been its end: the next look finds out.
        for _ in range(2):
            with_suppressed(stand.bring)
        assert stand.is_at(label)


def test_the_engine_is_started_again_between_updates(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        label = stand.labels[-1]
        stand.engine.restart()
        served = stand.bring()
        assert served is not None
        assert served.way == "attach"
        assert stand.is_at(label)
        assert stand.ready == [False, True, False, True]


def test_somebody_else_changes_the_label_or_pauses(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        stand.engine.label = "mine"
        stand.digests["mine"] = stand.engine.digest_now()
        served = stand.bring()
        assert served is not None
        assert served.way == "attach"
        assert stand.is_at(stand.labels[-1])
        # Whoever paused it has a reason: it is left alone until it runs again.
        stand.engine.is_paused = True
        stand.engine.log.clear()
        with pytest.raises(EngineError, match="not by this driver"):
            stand.bring()
        assert "resume" not in stand.engine.log
        assert stand.engine.is_paused
        stand.engine.is_paused = False
        stand.bring()
        assert stand.is_at(stand.labels[-1])


def test_stale_weights_are_found_by_the_proof(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        label = stand.publish()

        def spoil(step: str) -> None:
            if step == "prove":
                stand.engine.on_step = lambda name: None
                buffer = next(stand.engine._ranks[0].module.buffers())
                buffer[0] += 1

        stand.engine.on_step = spoil
        with pytest.raises(EngineNotReady, match="hold"):
            stand.bring()
        assert stand.engine.is_paused
        assert not stand.driver.is_ready
        stand.bring()
        assert stand.is_at(label)


def test_an_engine_that_is_away_is_not_ready(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        stand.engine.is_answering = False
        with pytest.raises(EngineUnreachable):
            stand.bring()
        stand.engine.is_answering = True
        # It may have been started again: what it says is proved first.
        served = stand.bring()
        assert served is None or served.way == "proved"
        assert stand.is_at(stand.labels[-1])


# The loop.


class Running:
    """`run` in a thread, as the command runs it."""

    def __init__(self, stand: Stand) -> None:
        self.served: list[Served] = []
        self.error: BaseException | None = None
        self._stand = stand
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for served in self._stand.driver.run(poll_s=0.01, look_s=0.01):
                self.served.append(served)
        except BaseException as error:
            self.error = error

    def until(self, is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < end_s, "it did not come to that"
            assert self.error is None, self.error
            time.sleep(0.005)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def running(stand: Stand) -> Iterator[Running]:
    found = Running(stand)
    try:
        yield found
    finally:
        stand.driver.stop()
        found.join()


def test_it_follows_until_it_is_stopped(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand, running(stand) as loop:
        loop.until(lambda: stand.is_at(stand.labels[0]))
        for _ in range(3):
            label = stand.publish()
            loop.until(lambda label=label: stand.is_at(label))  # type: ignore[misc]
        stand.engine.restart()
        count = len(loop.served)
        loop.until(lambda: len(loop.served) > count)
        loop.until(lambda: stand.is_at(label))
        stand.driver.stop()
        loop.join()
        assert loop.error is None
        assert loop.served[-1].way == "attach"
        stand.check()


def test_the_engine_is_away_for_a_while(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand, running(stand) as loop:
        loop.until(lambda: stand.is_at(stand.labels[0]))
        stand.engine.is_answering = False
        loop.until(lambda: not stand.driver.is_ready)
        label = stand.publish()
        loop.until(lambda: len(stand.of(EngineFailed)) > 2)
        assert all(event.code == EngineUnreachable.code for event in stand.of(EngineFailed))
        stand.engine.is_answering = True
        # It is there a moment before it is told.
        loop.until(lambda: bool(loop.served) and loop.served[-1].label == label)
        assert loop.served[-1].way == "changes"


def test_the_store_is_away_for_a_while(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand, running(stand) as loop:
        loop.until(lambda: stand.is_at(stand.labels[0]))
        stand.faults.set_rates(Rates(fail_before=1.0))
        label = stand.publish()
        time.sleep(0.1)
        assert stand.is_at(stand.labels[0])
        # It looks after the engine meanwhile.
        stand.engine.restart()
        count = len(loop.served)
        loop.until(lambda: len(loop.served) > count)
        assert stand.is_at(stand.labels[0])
        stand.faults.set_rates({})
        loop.until(lambda: stand.is_at(label))


def test_a_store_that_fails_at_random(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand, running(stand) as loop:
        stand.faults.set_rates(Rates(fail_before=0.1, fail_after=0.1))
        for _ in range(10):
            stand.publish()
            time.sleep(0.02)
        stand.faults.set_rates({})
        loop.until(lambda: stand.is_at(stand.labels[-1]))


def test_a_corrupt_shard(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        first = stand.labels[-1]
        label = stand.publish()
        (shard,) = (tmp_path / "store").glob("*/deltas/*/*.tw")
        data = shard.read_bytes()
        shard.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        for _ in range(2):
            with pytest.raises(ThinwireError):
                stand.bring()
            assert stand.is_at(first)
        shard.write_bytes(data)
        served = stand.bring()
        assert served is not None
        assert served.way == "changes"
        assert stand.is_at(label)


def test_a_corrupt_shard_while_it_runs(tmp_path: Path) -> None:
    """The loop may end, as a follower's does; it goes on from there once the store is mended."""
    with stand_in(tmp_path) as stand:
        loop = Running(stand)
        loop.until(lambda: stand.is_at(stand.labels[0]))
        stand.faults.set_rates(Rates(fail_before=1.0))
        label = stand.publish()
        (shard,) = (tmp_path / "store").glob("*/deltas/*/*.tw")
        data = shard.read_bytes()
        shard.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        stand.faults.set_rates({})
        time.sleep(0.3)
        assert stand.is_at(stand.labels[0])
        shard.write_bytes(data)
        if loop.error is not None:
            assert isinstance(loop.error, ThinwireError)
            loop.join()
            loop = Running(stand)
        loop.until(lambda: stand.is_at(label))
        stand.driver.stop()
        loop.join()


@pytest.mark.parametrize("policy", [KEEP, NEW, ABORT], ids=["keep", "wait", "abort"])
def test_clients_never_see_a_mix(policy: Policy, tmp_path: Path) -> None:
    with stand_in(tmp_path, policy, read_s=0.0001) as stand:
        stand.bring()
        answers: list[list[Token]] = []
        wrong: list[BaseException] = []
        is_ending = threading.Event()

        def ask() -> None:
            from thinwire.testing.engine import Aborted

            while not is_ending.is_set():
                try:
                    answers.append(stand.engine.generate(3))
                except Aborted:
                    continue
                except BaseException as error:
                    wrong.append(error)
                    return

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            for number in range(50 if policy == KEEP else 8):
                label = stand.publish()
                if number % 5 == 3:
                    stand.engine.faults = [Fault("apply", "some", EngineError("no"))]
                    version = stand.driver.follower.catch_up()
                    assert not with_suppressed(lambda v=version: stand.driver.bring_to(v))  # type: ignore[misc]
                version = stand.driver.follower.catch_up()
                stand.driver.bring_to(version)
        finally:
            is_ending.set()
            for client in clients:
                client.join(10)
        assert not wrong
        assert stand.is_at(label)
        tokens = [token for answer in answers for token in answer]
        assert all(stand.digests[token.label] == token.digest for token in tokens)
        assert len({token.label for token in tokens}) > 5
        if policy == NEW:
            assert all(len({token.label for token in answer}) == 1 for answer in answers)


def test_two_updates_while_it_fails(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        first = stand.labels[-1]
        stand.engine.faults = [Fault("apply", "after", EngineError("no"), times=2)]
        for _ in range(2):
            stand.publish()
            with pytest.raises(EngineError, match="as before"):
                stand.bring()
            assert stand.is_at(first)
        label = stand.publish()
        served = stand.bring()
        assert served is not None
        assert served.way == "changes"
        assert stand.is_at(label)


def test_a_driver_that_is_started_again_attaches(tmp_path: Path) -> None:
    with stand_in(tmp_path) as stand:
        stand.bring()
        stand.driver.close()
        other = Driver(stand.faults.url, stand.engine, tmp_path / "copy", policy=KEEP, lease=False)
        with other:
            assert not other.is_ready
            served = other.bring_to(other.follower.catch_up())
            assert served is not None
            assert served.way == "proved"
            assert other.is_ready


def test_an_engine_that_does_not_end_its_requests(tmp_path: Path) -> None:
    with stand_in(tmp_path, NEW, deadlines=Deadlines(pause=0.1)) as stand:
        stand.bring()
        first = stand.labels[-1]
        stand.publish()
        with mock.patch.object(stand.engine, "_request_count", 1):
            with pytest.raises(Deadline):
                stand.bring()
            assert stand.is_at(first)


def test_policies_that_do_not_exist() -> None:
    for options in (
        {"cache": "none"},
        {"cache": "keep", "pause": "stop"},
        {"cache": "new-sessions"},
    ):
        with pytest.raises(InvalidArgument):
            Policy(**options)  # type: ignore[arg-type]
