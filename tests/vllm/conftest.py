"""Tiny models, servers that tests share, and the logs of those that ran while a test failed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .following import Rollout
from .fresh import FreshLoads
from .gate import Gate
from .making import tiny_llama
from .server import VllmServer
from .sharing import Servers


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fatal: ends the server; such tests come last")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one kind of server follow each other: a start costs half a minute."""

    def order(item: pytest.Item) -> tuple[int, bool]:
        callspec = getattr(item, "callspec", None)
        ranks = callspec.params.get("server", 1) if callspec else 1
        return ranks, item.get_closest_marker("fatal") is not None

    items.sort(key=order)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose head is its embedding. Read only: tests copy what they change."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own, and a vocabulary that vLLM pads."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "untied", is_tied=False, vocab_size=500)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshLoads]:
    oracle = FreshLoads(tmp_path_factory.mktemp("fresh"))
    yield oracle
    oracle.close()


@pytest.fixture(scope="session")
def servers(
    tmp_path_factory: pytest.TempPathFactory,
    tied_model: Path,
    untied_model: Path,
    fresh: FreshLoads,  # starts meanwhile
) -> Iterator[Servers]:
    with Servers({1: tied_model, 2: untied_model}, tmp_path_factory.mktemp("servers")) as shared:
        yield shared


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: Servers) -> VllmServer:
    """A server of one rank with the tied model, or (parameter 2) of two with the untied one."""
    return servers.of_ranks(getattr(request, "param", 1))


@pytest.fixture
def gate(server: VllmServer) -> Iterator[Gate]:
    with Gate(server.port) as opened:
        yield opened


@pytest.fixture
def rollout(tmp_path: Path, server: VllmServer) -> Iterator[Rollout]:
    """A stream that begins with the server's model."""
    begun = Rollout(tmp_path, server.model)
    yield begun
    begun.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Servers outlive a test: what they said last goes into the report of one that failed."""
    report: pytest.TestReport = yield
    if report.failed:
        for server in VllmServer.running:
            report.sections.append((f"the end of {server.log}", server.log_tail()))
    return report
