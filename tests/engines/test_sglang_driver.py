"""The driver and the SGLang adapter together: a real stream in a folder, clients that never stop.

What is asserted of every answer: each token is of the version told with it, and where the policy
empties caches, of that version only, KV included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from thinwire.engines.driver import Deadlines, Driver, Served
from thinwire.engines.engine import Policy, label_of
from thinwire.engines.sglang import SGLang
from thinwire.errors import EngineNotReady, InvalidArgument
from thinwire.publish import Publisher
from thinwire.stream.events import EngineFailed, Event
from thinwire.testing.sglang_scheduler import digest_of_folder

from .sglang_serving import Clients, ask, ask_test, free_port, server, write_model

ABORT = Policy(cache="reset", pause="abort")
KEEP = Policy(cache="keep")
RESET = Policy(cache="reset")
UPDATES = 12


class Trainer:
    """Publishes versions, and knows what a server must hold for each."""

    def __init__(self, folder: Path) -> None:
        self.url = (folder / "store").as_uri()
        self.model = write_model(folder / "model", 0)
        self.digests = {"default": digest_of_folder(self.model)}
        self._publisher = Publisher(self.url, folder / "baseline", maintain=False)

    def publish(self) -> str:
        """Change some weights and publish them; the label of the version."""
        path = self.model / "model.safetensors"
        tensors = load_file(path)
        for tensor in tensors.values():
            tensor.reshape(-1).view(np.uint16)[::5] += 1
        save_file(tensors, path)
        label = label_of(self._publisher.publish(self.model))
        self.digests[label] = digest_of_folder(self.model)
        return label

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.close()


class Run:
    """A driver at work, and what it told."""

    def __init__(self, trainer: Trainer, endpoint: str, folder: Path, policy: Policy) -> None:
        self.events: list[Event] = []
        self.readiness: list[bool] = []
        self.driver = Driver(
            trainer.url,
            SGLang(endpoint),
            folder / "host",
            policy=policy,
            deadlines=Deadlines(ask=5, pause=5, apply=2, attach=20),
            on_ready=self.readiness.append,
            observer=self,
        )
        self._served = self.driver.run(poll_s=0.02, look_s=0.05)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def next(self) -> Served:
        return next(self._served)

    @property
    def failures(self) -> list[EngineFailed]:
        return [event for event in self.events if isinstance(event, EngineFailed)]

    def close(self) -> None:
        self._served.close()  # type: ignore[attr-defined]
        self.driver.close()


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [(ABORT, ()), (KEEP, ()), (RESET, ("--flushes-retracted",))],
    ids=["abort-reset", "keep-keep", "keep-reset"],
)
def test_updates_under_load(
    trainer: Trainer, tmp_path: Path, policy: Policy, arguments: tuple[str, ...]
) -> None:
    with server(write_model(tmp_path / "base", 0), "--token-s", "0.01", *arguments) as endpoint:
        label = trainer.publish()
        run = Run(trainer, endpoint, tmp_path, policy)
        assert run.next().way == "attach"
        ways, pauses_s = [], []
        with Clients(endpoint, 8, 10) as clients:
            for _ in range(UPDATES):
                label = trainer.publish()
                served = run.next()
                assert (served.label, served.is_proved) == (label, None)
                assert list(served.phases)[-1] == "prove"
                ways.append(served.way)
                pauses_s.append(served.pause_s)
                time.sleep(0.05)
        run.close()
        assert set(ways) == {"changes"}
        assert not run.failures
        assert ask(endpoint, "new", 3).runs(trainer.digests) == [(label, label)]
    told = set()
    for answer in clients.answers:
        assert answer.finish in ({"length", "abort"} if policy is ABORT else {"length"})
        runs = answer.runs(trainer.digests)
        told |= {weights for weights, _ in runs}
        if policy.cache == "reset":
            assert all(kv == weights for weights, kv in runs), answer
        if policy is ABORT:
            assert len(runs) <= 1, answer
    assert len(told) > UPDATES // 2
    assert max(pauses_s) < 5


def test_waiting_where_callers_pause(trainer: Trainer, tmp_path: Path) -> None:
    """With "wait" every request ends under the version that it began with."""
    policy = Policy(cache="new-sessions", pause="wait")
    with server(write_model(tmp_path / "base", 0), "--token-s", "0.01") as endpoint:
        trainer.publish()
        run = Run(trainer, endpoint, tmp_path, policy)
        run.next()
        answers = []

        def some_requests() -> None:
            for number in range(6):
                answers.append(ask(endpoint, f"p{number % 2}", 10))
                time.sleep(0.05)

        for _ in range(2):
            thread = threading.Thread(target=some_requests)
            thread.start()
            trainer.publish()
            run.next()
            thread.join()
        run.close()
    for answer in answers:
        assert answer.finish == "length"
        ((weights, kv),) = answer.runs(trainer.digests)
        assert weights == kv


@pytest.mark.parametrize("fault", ["begin", "half", "mixed", "lie"])
@pytest.mark.parametrize("policy", [ABORT, KEEP], ids=["abort-reset", "keep-keep"])
def test_a_failed_load_is_mended_in_the_same_pause(
    trainer: Trainer, tmp_path: Path, fault: str, policy: Policy
) -> None:
    with server(write_model(tmp_path / "base", 0), "--token-s", "0.01") as endpoint:
        trainer.publish()
        run = Run(trainer, endpoint, tmp_path, policy)
        run.next()
        with Clients(endpoint, 4, 10) as clients:
            ask_test(endpoint, fault=fault)
            label = trainer.publish()
            served = run.next()
            time.sleep(0.3)
        run.close()
        assert (served.label, served.is_proved) == (label, None)
        assert "attach" in served.phases
        assert ask(endpoint, "new", 3).runs(trainer.digests) == [(label, label)]
    for answer in clients.answers:
        answer.runs(trainer.digests)


@pytest.mark.parametrize("fault", ["skip", "partly"])
def test_a_load_that_did_not_happen_is_found_and_made_good(
    trainer: Trainer, tmp_path: Path, fault: str
) -> None:
    with server(write_model(tmp_path / "base", 0)) as endpoint:
        trainer.publish()
        run = Run(trainer, endpoint, tmp_path, ABORT)
        run.next()
        ask_test(endpoint, fault=fault)
        label = trainer.publish()
        served = run.next()
        run.close()
        assert [failure.code for failure in run.failures] == [EngineNotReady.code]
        assert (served.label, served.way, served.is_proved) == (label, "attach", None)
        assert ask(endpoint, "new", 3).runs(trainer.digests) == [(label, label)]


def test_a_load_that_hangs_is_waited_for_and_made_again(trainer: Trainer, tmp_path: Path) -> None:
    with server(write_model(tmp_path / "base", 0)) as endpoint:
        trainer.publish()
        run = Run(trainer, endpoint, tmp_path, KEEP)
        run.next()
        ask_test(endpoint, fault="hang", hang_s=2.5)
        label = trainer.publish()
        served = run.next()
        run.close()
        assert served.label == label
        assert served.way == "attach"
        assert served.pause_s > 1.0
        assert ask(endpoint, "new", 3).runs(trainer.digests) == [(label, label)]


@pytest.mark.parametrize("seed", [(), ("--random-seed", "1")], ids=["", "fixed-seed"])
def test_a_server_that_dies_and_comes_back(
    trainer: Trainer, tmp_path: Path, seed: tuple[str, ...]
) -> None:
    base, port = write_model(tmp_path / "base", 0), free_port()
    trainer.publish()
    with server(base, *seed, port=port) as endpoint:
        run = Run(trainer, endpoint, tmp_path, ABORT)
        run.next()
        ask_test(endpoint, fault="die")
        label = trainer.publish()
        restarted = threading.Event()

        def restart() -> None:
            # Only once it was missed.
            while not run.failures:
                time.sleep(0.05)
            with server(base, *seed, port=port):
                restarted.wait(30)

        thread = threading.Thread(target=restart, daemon=True)
        thread.start()
        served = run.next()
        assert (served.label, served.way, served.is_proved) == (label, "attach", None)
        assert run.failures[0].code == EngineNotReady.code
        assert run.readiness[-2:] == [False, True]
        assert ask(endpoint, "new", 3).runs(trainer.digests) == [(label, label)]
        restarted.set()
        thread.join()
        run.close()


def test_the_command(trainer: Trainer, tmp_path: Path) -> None:
    label = trainer.publish()
    with server(write_model(tmp_path / "base", 0), "--admin-api-key", "adm1n") as endpoint:
        command = [sys.executable, "-m", "thinwire", "attach", "--engine", "sglang"]
        command += ["--endpoint", endpoint, "--stream", trainer.url, "--once", "--json"]
        command += ["--folder", str(tmp_path / "host"), "--pause", "abort", "--cache", "reset"]
        variables = os.environ | {"THINWIRE_ENGINE_KEY": "adm1n"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["label"], told["way"], told["is_proved"]) == (label, "attach", None)
        assert "adm1n" not in done.stdout + done.stderr
        assert ask(endpoint, "a", 3).runs(trainer.digests) == [(label, label)]
        wrong = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (wrong.returncode, "--admin-api-key" in wrong.stdout + wrong.stderr) == (7, True)


def test_a_policy_that_it_cannot_carry_out_changes_nothing(
    trainer: Trainer, tmp_path: Path
) -> None:
    with server(write_model(tmp_path / "base", 0)) as endpoint:
        trainer.publish()
        with pytest.raises(InvalidArgument):
            Run(trainer, endpoint, tmp_path, Policy(cache="keep", pause="wait"))
        assert ask(endpoint, "a", 3).runs(trainer.digests) == [("default", "default")]


def test_stock_keep_reset_serves_on_as_before(trainer: Trainer, tmp_path: Path) -> None:
    """What the released SGLang cannot do under load costs no request and no version."""
    with server(write_model(tmp_path / "base", 0), "--token-s", "0.01") as endpoint:
        first = trainer.publish()
        run = Run(trainer, endpoint, tmp_path, RESET)
        run.next()
        with Clients(endpoint, 6, 20) as clients:
            time.sleep(0.1)
            second = trainer.publish()
            results: list[Served] = []
            thread = threading.Thread(target=lambda: results.append(run.next()), daemon=True)
            thread.start()
            while len(run.failures) < 2:
                time.sleep(0.05)
            assert run.failures[0].is_ready
            assert run.failures[0].served == 1
            assert "33783" in run.failures[0].reason
        # Without requests it can.
        thread.join(30)
        assert results[0].label == second
        run.close()
    for answer in clients.answers:
        assert answer.finish == "length"
        assert answer.runs(trainer.digests) == [(first, first)]
