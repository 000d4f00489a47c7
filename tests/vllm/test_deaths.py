"""An engine or one of its ranks dies while its weights change: not ready, until it is back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from thinwire.engines.walk import Deadlines, Served
from thinwire.errors import EngineError
from thinwire.stream.events import EngineFailed, Event

from .checking import check_serves
from .driving import attached, set_deadlines
from .following import Rollout
from .fresh import FreshLoads
from .gate import Gate
from .server import VllmServer


class Told:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.fatal
class TestEngineDies:
    def test_killed_inside_the_pause_and_started_again(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads, gate: Gate
    ) -> None:
        told = Told()
        ready: list[bool] = []
        with attached(server, rollout, gate.endpoint, observer=told, on_ready=ready.append) as (
            driver,
            _,
        ):
            new = rollout.change()
            driver.follower.catch_up()
            gate.once("/update_weights", lambda: os.kill(server.engine_core_pid, signal.SIGKILL))
            with pytest.raises(EngineError):
                driver.bring_to(new)
            assert not driver.is_ready
            server.kill()
            told.events.clear()
            # What a sidecar does: it goes on looking.
            serving: list[Served] = []
            thread = threading.Thread(
                target=lambda: serving.extend(driver.run(poll_s=0.1, look_s=0.1))
            )
            thread.start()
            try:
                wait_until(lambda: any(isinstance(event, EngineFailed) for event in told.events))
                assert not ready[-1]
                with server:
                    wait_until(lambda: ready[-1], 90)
                    check_serves(server, rollout, fresh, new)
                    newer = rollout.change()
                    wait_until(lambda: len(serving) == 2)
                    check_serves(server, rollout, fresh, newer)
                # Again, with no update on its way.
                wait_until(lambda: not ready[-1], 60)
            except BaseException:
                print(*told.events, sep="\n")
                raise
            finally:
                driver.stop()
                thread.join()
        assert [served.way for served in serving] == ["attach", "changes"]
        assert [facts.is_cached for facts in driver.engine.facts] == [True]
        assert all(facts.probe_s == 0 for facts in driver.engine.facts)


@pytest.mark.fatal
@pytest.mark.parametrize("server", [2], indirect=True, ids=["two-ranks"])
class TestRankDies:
    def test_while_weights_are_changed(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads, gate: Gate
    ) -> None:
        ready: list[bool] = []
        with attached(server, rollout, gate.endpoint, on_ready=ready.append) as (driver, old):
            check_serves(server, rollout, fresh, old)
            new = rollout.change()
            driver.follower.catch_up()
            # vLLM waits for a rank that died until it is told not to.
            set_deadlines(driver, Deadlines(ask=5, pause=5, apply=5, attach=5))
            gate.once("/update_weights", lambda: os.kill(server.worker_pids[1], signal.SIGKILL))
            with pytest.raises(EngineError):
                driver.bring_to(new)
            assert not driver.is_ready
            assert not ready[-1]
            with pytest.raises(EngineError):
                driver.bring_to(new)
            assert not driver.is_ready
        # Asked to end, what is left of it would wait for the rank that died.
        server.kill()


def wait_until(is_so: Callable[[], object], timeout_s: float = 20) -> None:
    give_up = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.02)
