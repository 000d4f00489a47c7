"""A real vLLM follows a stream: after every update it answers as a fresh load of that version."""

from __future__ import annotations

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.engines.driver import Driver
from thinwire.engines.engine import Policy, label_of
from thinwire.follow import open_stream
from thinwire.store.opening import open_store
from thinwire.stream.version import Version
from thinwire.testing.faults import FaultStore

from .checking import check_served, check_serves, check_spans
from .following import Rollout, changed, generate, generating
from .fresh import FreshLoads
from .making import tiny_llama
from .recording import RecordedEngine
from .server import VllmServer

both = pytest.mark.parametrize("server", [1, 2], indirect=True, ids=["one-rank", "two-ranks"])
# A block of vLLM's cache on CPUs is 128 tokens: a prompt of one block and a bit.
LONG_PROMPT = [2 + 7 * place % 490 for place in range(150)]
# For requests in flight: a short prompt with a long answer.
PROMPT, LONG = [11, 12, 13, 14], 220


def checksums(server: VllmServer) -> dict[str, str]:
    """vLLM's own digests of every parameter on every rank."""
    found: dict[str, str] = server.post("/weight_checker", {"action": "checksum"})["checksums"]
    return found


@both
class TestVersions:
    def test_each_is_served_as_a_fresh_load_serves_it(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with rollout.driver(server, accept_new_lineages=True) as driver:
            self._attached(driver, server, rollout, fresh)
            for _ in range(3):
                self._follows(driver, server, rollout, fresh, rollout.change())
            for _ in range(3):
                newest = rollout.change()
            self._follows(driver, server, rollout, fresh, newest)
            dense = rollout.change(share=0.4)
            self._follows(driver, server, rollout, fresh, dense)
            self._follows(driver, server, rollout, fresh, rollout.change())
            model = rollout.folder / "other"
            other = rollout.restart(changed(server.model, model, seed=99, share=0.1))
            assert other.lineage != newest.lineage
            self._follows(driver, server, rollout, fresh, other)
            self._follows(driver, server, rollout, fresh, rollout.change())

    @staticmethod
    def _attached(driver: Driver, server: VllmServer, rollout: Rollout, fresh: FreshLoads) -> None:
        version = driver.follower.catch_up()
        check_served(driver.bring_to(version), version, way="attach", is_proved=True)
        for facts in driver.engine.facts:
            assert (facts.way, facts.refused, facts.loose, facts.unseen) == ("map", {}, 0, 0)
        check_serves(server, rollout, fresh, version)
        assert driver.bring_to(version) is None

    @staticmethod
    def _follows(
        driver: Driver,
        server: VllmServer,
        rollout: Rollout,
        fresh: FreshLoads,
        version: Version,
    ) -> None:
        assert driver.follower.catch_up() == version
        check_served(driver.bring_to(version), version, way="changes", is_proved=True)
        check_serves(server, rollout, fresh, version)


@both
class TestWays:
    @pytest.mark.parametrize(
        ("way", "is_proved"),
        [("map", True), ("dense", None), ("patches", None), ("reload", None)],
    )
    def test_each_is_right_and_agrees_with_a_reload(
        self,
        server: VllmServer,
        rollout: Rollout,
        fresh: FreshLoads,
        way: str,
        is_proved: bool | None,
    ) -> None:
        with rollout.driver(server, ways=[way]) as driver:
            for kind in ("attach", "changes", "changes"):
                version = driver.follower.catch_up()
                check_served(driver.bring_to(version), version, way=kind, is_proved=is_proved)
                check_serves(server, rollout, fresh, version)
                rollout.change()
            assert [facts.way for facts in driver.engine.facts] == [way] * server.ranks
        found = checksums(server)
        assert len(found) > server.ranks
        # Packed weights are hashed as if they were nothing.
        assert hashlib.sha256().hexdigest() not in found.values()
        with rollout.driver(server, ways=["reload"]) as driver:
            driver.follower.catch_up(version.version)
            driver.bring_to(version)
        assert checksums(server) == found


@both
class TestMapCache:
    def test_a_map_is_found_again(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        for is_cached in (False, True):
            with rollout.driver(server) as driver:
                version = driver.follower.catch_up()
                check_served(driver.bring_to(version), version, way="attach", is_proved=True)
                for facts in driver.engine.facts:
                    assert facts.is_cached is is_cached
                    assert (facts.probe_s == 0) is is_cached
            check_serves(server, rollout, fresh, version)
            # As an engine says that was started again.
            server.post("/update_weight_version", {"new_version": "default"})
            rollout.change()

    def test_another_models_is_not_used(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with rollout.driver(server) as driver:
            version = driver.follower.catch_up()
            driver.bring_to(version)
            maps = driver.host.engine_folder / "maps"
        server.post("/update_weight_version", {"new_version": "default"})
        # Under this model's names, half of what was written.
        for path in maps.glob("*.map"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with rollout.driver(server) as driver:
            version = driver.follower.catch_up()
            check_served(driver.bring_to(version), version, way="attach", is_proved=True)
            assert [facts.is_cached for facts in driver.engine.facts] == [False] * server.ranks
        check_serves(server, rollout, fresh, version)


class TestPause:
    def test_holds_the_change_the_caches_and_the_label_alone(
        self, server: VllmServer, rollout: Rollout
    ) -> None:
        told: list[str] = []
        store = FaultStore(
            open_store(rollout.url),
            random.Random(0),
            hook=lambda when, operation, key: told.append(f"store {when}"),
        )
        engine = RecordedEngine(server.endpoint, told.append)
        with rollout.driver(server, engine=engine, stream=open_stream(store)) as driver:
            driver.bring_to(driver.follower.catch_up())
            version = rollout.change()
            told.clear()
            begun = len(requests(server))
            driver.follower.catch_up()
            assert set(told) == {"store before", "store after"}
            told.clear()
            served = driver.bring_to(version)
            assert told == [
                "state", "stage", "pause", "apply", "empty_caches", "set_label", "resume", "prove",
            ]  # fmt: skip
        assert served is not None
        assert list(served.phases) == [
            "stage", "pause", "apply", "caches", "label", "resume", "prove",
        ]  # fmt: skip
        # The engine's own record of what it was asked, in its order.
        posted = [request for request in requests(server)[begun:] if request.startswith("POST")]
        assert posted == [
            "POST /init_weight_transfer_engine",  # stage
            "POST /pause",
            "POST /start_weight_update",
            "POST /update_weights",
            "POST /finish_weight_update",
            "POST /reset_prefix_cache",
            "POST /reset_mm_cache",
            "POST /reset_encoder_cache",
            "POST /update_weight_version",
            "POST /resume",
            "POST /init_weight_transfer_engine",  # prove
        ]


def requests(server: VllmServer) -> list[str]:
    """The server's access log, without what health checks and clients ask."""
    found = []
    for line in server.log.read_text(errors="replace").splitlines():
        if "HTTP/1.1" in line and line.startswith("INFO:"):
            method, route = line.split('"')[1].split()[:2]
            if route not in ("/health", "/v1/completions", "/inference/v1/generate"):
                found.append(f"{method} {route.split('?')[0]}")
    return found


class TestPolicies:
    def test_keep_keeps_what_older_weights_computed(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with rollout.driver(server, Policy(cache="keep")) as driver:
            driver.bring_to(driver.follower.catch_up())
            generate(server, LONG_PROMPT)
            assert generate(server, LONG_PROMPT).cached == 128
            rollout.change(share=0.05)
            driver.bring_to(driver.follower.catch_up())
            kept = generate(server, LONG_PROMPT)
        assert kept.cached == 128
        # So the oracle tells a mix of versions from a version.
        assert check_spans(rollout, fresh, LONG_PROMPT, kept)[0] > 0.01

    def test_reset_empties_the_prefix_cache(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with rollout.driver(server, Policy(cache="reset")) as driver:
            driver.bring_to(driver.follower.catch_up())
            generate(server, LONG_PROMPT)
            assert generate(server, LONG_PROMPT).cached == 128
            rollout.change(share=0.05)
            driver.bring_to(driver.follower.catch_up())
            anew = generate(server, LONG_PROMPT)
        assert anew.cached == 0
        assert check_spans(rollout, fresh, LONG_PROMPT, anew) == [0.0]

    @pytest.mark.parametrize("cache", ["keep", "reset"])
    def test_requests_in_flight_go_on_under_the_new_version(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads, cache: str
    ) -> None:
        with rollout.driver(server, Policy(cache=cache)) as driver:
            old = driver.follower.catch_up()
            driver.bring_to(old)
            new = rollout.change(share=0.05)
            driver.follower.catch_up()
            with ThreadPoolExecutor() as threads:
                asked = generating(threads, server, PROMPT, LONG)
                driver.bring_to(new)
                generated = asked.result()
        (_, turn, first), (start, end, second) = generated.spans
        assert (first, second) == (label_of(old), label_of(new))
        assert 0 < turn == start < end == LONG
        before, after = check_spans(rollout, fresh, PROMPT, generated)
        assert before == 0
        if cache == "reset":
            assert after == 0
        else:
            assert after > 0.01

    def test_new_sessions_let_those_in_flight_end(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with rollout.driver(server, Policy(cache="new-sessions", pause="wait")) as driver:
            old = driver.follower.catch_up()
            driver.bring_to(old)
            generate(server, LONG_PROMPT)
            new = rollout.change(share=0.05)
            driver.follower.catch_up()
            with ThreadPoolExecutor() as threads:
                asked = generating(threads, server, PROMPT, LONG)
                updated = threads.submit(driver.bring_to, new)
                while not server.get("/is_paused")["is_paused"]:
                    assert not updated.done()
                later = threads.submit(generate, server, LONG_PROMPT)
                updated.result()
                generated = asked.result()
        assert generated.spans == [(0, LONG, label_of(old))]
        assert check_spans(rollout, fresh, PROMPT, generated) == [0.0]
        assert [label for *_, label in later.result().spans] == [label_of(new)]
        assert later.result().cached == 0
        assert check_spans(rollout, fresh, LONG_PROMPT, later.result()) == [0.0]

    def test_abort_ends_those_in_flight(
        self, server: VllmServer, rollout: Rollout, fresh: FreshLoads
    ) -> None:
        with rollout.driver(server, Policy(cache="reset", pause="abort")) as driver:
            driver.bring_to(driver.follower.catch_up())
            new = rollout.change()
            driver.follower.catch_up()
            with ThreadPoolExecutor() as threads:
                asked = generating(threads, server, PROMPT, LONG)
                driver.bring_to(new)
                generated = asked.result()
        assert len(generated.output.tokens) < LONG
        check_serves(server, rollout, fresh, new)


class TestOtherWeights:
    def test_an_engine_started_from_another_model_of_this_shape(
        self, server: VllmServer, tmp_path: Path, fresh: FreshLoads
    ) -> None:
        """As when an engine starts from a model's first version, and the stream is far on."""
        other = Rollout(tmp_path / "elsewhere", tiny_llama(tmp_path / "other", seed=5))
        with other.driver(server) as driver:
            version = driver.follower.catch_up()
            check_served(driver.bring_to(version), version, way="attach", is_proved=True)
            check_serves(server, other, fresh, version)
        other.close()
        back = Rollout(tmp_path / "back", server.model)
        with back.driver(server) as driver:
            version = driver.follower.catch_up()
            driver.bring_to(version)
            check_serves(server, back, fresh, version)
        back.close()
