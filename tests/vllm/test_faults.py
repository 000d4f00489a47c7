"""What fails ends in "version v as before" or "not ready", never in a mix, and then recovers."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from thinwire.engines.engine import label_of
from thinwire.engines.walk import Deadlines
from thinwire.errors import EngineError, EngineNotReady, ThinwireError, Unavailable
from thinwire.follow import open_stream
from thinwire.store.opening import open_store
from thinwire.stream.version import Version
from thinwire.testing.faults import FaultStore, Rates

from .attaching import Sidecar
from .checking import check_serves
from .driving import attached, check_recovers, set_deadlines
from .following import Rollout
from .fresh import FreshLoads
from .gate import Gate, lose, refuse
from .server import VllmServer

_INSIDE = (
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
)


class TestStore:
    def test_unreachable(self, server: VllmServer, rollout: Rollout, fresh: FreshLoads) -> None:
        store = FaultStore(open_store(rollout.url, retry_s=0), random.Random(0))
        with attached(server, rollout, stream=open_stream(store)) as (driver, old):
            new = rollout.change()
            store.set_rates(Rates(fail_before=1))
            with pytest.raises(Unavailable):
                driver.follower.catch_up()
            assert driver.bring_to(old) is None
            assert driver.is_ready
            check_serves(server, rollout, fresh, old)
            store.set_rates(Rates())
            assert driver.follower.catch_up() == new
            check_recovers(driver, server, rollout, fresh, new)

    def test_gone_for_a_while(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        """As when a file system is not mounted: nothing is there, which is no news."""
        with attached(server, rollout) as (driver, old):
            new = rollout.change()
            away = rollout.store.with_name("away")
            rollout.store.rename(away)
            with suppress(ThinwireError):
                assert driver.follower.catch_up() == old
            assert driver.bring_to(old) is None
            assert driver.is_ready
            check_serves(server, rollout, fresh, old)
            # What the follower may have written there meanwhile.
            shutil.rmtree(rollout.store, ignore_errors=True)
            away.rename(rollout.store)
            assert driver.follower.catch_up() == new
            check_recovers(driver, server, rollout, fresh, new)

    def test_corrupt_shard(self, server: VllmServer, rollout: Rollout, fresh: FreshLoads) -> None:
        with attached(server, rollout) as (driver, old):
            before = set(files(rollout.store))
            new = rollout.change()
            payload = max(set(files(rollout.store)) - before, key=lambda path: path.stat().st_size)
            good = payload.read_bytes()
            middle = len(good) // 2
            payload.chmod(0o644)
            payload.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
            with pytest.raises(ThinwireError):
                driver.follower.catch_up()
            assert driver.follower.version() == old
            assert driver.bring_to(old) is None
            assert driver.is_ready
            check_serves(server, rollout, fresh, old)
            payload.write_bytes(good)
            assert driver.follower.catch_up() == new
            check_recovers(driver, server, rollout, fresh, new)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


class TestOthers:
    """Somebody else had their hands on the engine."""

    def test_an_update_is_active(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with attached(server, rollout) as (driver, old):
            new = rollout.change()
            driver.follower.catch_up()
            server.post("/start_weight_update")
            for _ in range(2):
                with pytest.raises(EngineError, match="somebody else"):
                    driver.bring_to(new)
                assert driver.is_ready
                check_serves(server, rollout, fresh, old)
            server.post("/finish_weight_update")
            check_recovers(driver, server, rollout, fresh, new)

    def test_it_is_paused(self, server: VllmServer, rollout: Rollout, fresh: FreshLoads) -> None:
        with attached(server, rollout) as (driver, _):
            server.post("/pause?mode=keep&clear_cache=false")
            new = rollout.change()
            driver.follower.catch_up()
            with pytest.raises(EngineError, match="paused"):
                driver.bring_to(new)
            assert not driver.is_ready
            # It is left to whoever paused it.
            assert server.get("/is_paused") == {"is_paused": True}
            server.post("/resume")
            check_recovers(driver, server, rollout, fresh, new)

    def test_it_reports_another_version(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with attached(server, rollout) as (driver, version):
            server.post("/update_weight_version", {"new_version": "another"})
            check_recovers(driver, server, rollout, fresh, version)

    def test_two_drivers_never_share_a_folder(self, server: VllmServer, rollout: Rollout) -> None:
        with attached(server, rollout), pytest.raises(ThinwireError):
            rollout.driver(server)


class TestCalls:
    """A call fails, or its answer is lost, at every step inside the pause."""

    @pytest.mark.parametrize("route", _INSIDE)
    @pytest.mark.parametrize(
        ("when", "what"),
        [("before", lose), ("after", lose), ("before", refuse), ("after", refuse)],
        ids=["lost-call", "lost-answer", "refused", "refused-afterwards"],
    )
    def test_of_one(
        self,
        server: VllmServer,
        rollout: Rollout,
        fresh: FreshLoads,
        gate: Gate,
        route: str,
        when: str,
        what: Callable[[], None],
    ) -> None:
        with attached(server, rollout, gate.endpoint) as (driver, old):
            new = rollout.change()
            driver.follower.catch_up()
            gate.once(route, what, when=when)
            try:
                served = driver.bring_to(new)
            except EngineNotReady:
                assert not driver.is_ready
            except ThinwireError:
                assert driver.served == old
                check_serves(server, rollout, fresh, old)
            else:
                assert served is not None
                check_serves(server, rollout, fresh, new)
            check_never_mixed(server, rollout, fresh, old, new)
            check_recovers(driver, server, rollout, fresh, new)

    @pytest.mark.parametrize("route", ["/update_weights", "/pause", "/resume"])
    def test_one_arrives_late(
        self,
        server: VllmServer,
        rollout: Rollout,
        fresh: FreshLoads,
        gate: Gate,
        route: str,
    ) -> None:
        """After the driver has given it up, and done what it does then."""
        deadlines = Deadlines(apply=0.5, pause=0.5, ask=0.5)
        with attached(server, rollout, gate.endpoint, deadlines=deadlines) as (driver, old):
            new = rollout.change()
            driver.follower.catch_up()
            is_over, is_late = threading.Event(), threading.Event()

            def hold() -> None:
                is_over.wait(30)
                is_late.set()

            gate.once(route, hold)
            try:
                driver.bring_to(new)
            except EngineNotReady:
                assert not driver.is_ready
            except ThinwireError:
                assert driver.served == old
            finally:
                is_over.set()
            is_late.wait(30)
            time.sleep(0.5)
            check_never_mixed(server, rollout, fresh, old, new)
            set_deadlines(driver, Deadlines())
            check_recovers(driver, server, rollout, fresh, new)


def check_never_mixed(
    server: VllmServer, rollout: Rollout, fresh: FreshLoads, old: Version, new: Version
) -> None:
    """What answers is a whole version, labelled so; what is paused does not answer."""
    if not server.get("/is_paused")["is_paused"]:
        label = server.get("/weight_info")["weight_version"]
        assert label in (label_of(old), label_of(new))
        check_serves(server, rollout, fresh, label)


class TestStopped:
    def test_the_engine_stops_for_a_while(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads, gate: Gate
    ) -> None:
        """As when its host swaps: steps pass their deadlines, and are taken long afterwards."""
        deadlines = Deadlines(apply=0.5, pause=0.5, ask=0.5, stage=2, attach=0.5)
        with attached(server, rollout, deadlines=Deadlines(), endpoint=gate.endpoint) as (
            driver,
            old,
        ):
            set_deadlines(driver, deadlines)
            new = rollout.change()
            driver.follower.catch_up()
            core = psutil.Process(server.engine_core_pid)
            gate.once("/update_weights", core.suspend)
            try:
                with pytest.raises(EngineError):
                    driver.bring_to(new)
            finally:
                core.resume()
            assert not driver.is_ready
            time.sleep(1)
            check_never_mixed(server, rollout, fresh, old, new)
            set_deadlines(driver, Deadlines())
            check_recovers(driver, server, rollout, fresh, new)


class TestSidecar:
    @pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/resume"])
    def test_killed_inside_the_pause(
        self,
        server: VllmServer,
        rollout: Rollout,
        fresh: FreshLoads,
        gate: Gate,
        route: str,
    ) -> None:
        ready = rollout.folder / "ready"
        with Sidecar(rollout, gate.endpoint, f"--ready-file={ready}") as sidecar:
            sidecar.wait_for(1)
            assert ready.exists()
            gate.once(route, lambda: (sidecar.kill(), lose())[1])
            new = rollout.change()
            sidecar.wait_until_dead()
        # What is asked now is not answered by a mix: it waits.
        assert server.get("/is_paused") == {"is_paused": True}
        with Sidecar(rollout, gate.endpoint, f"--ready-file={ready}") as sidecar:
            assert sidecar.wait_for(new.version)["is_proved"] is True
            assert ready.exists()
            check_serves(server, rollout, fresh, new)
            newer = rollout.change()
            line = sidecar.wait_for(newer.version)
            assert (line["way"], line["is_proved"]) == ("changes", True)
            check_serves(server, rollout, fresh, newer)
