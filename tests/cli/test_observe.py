"""Events as log lines and as metrics."""

from __future__ import annotations

import json
import socket
import sys
from typing import Any
from urllib.request import urlopen

import pytest

from thinwire.cli.logs import LogLevel, make_logger
from thinwire.errors import InvalidArgument, StoreError
from thinwire.observe import LogObserver, PrometheusObserver, serve_metrics
from thinwire.observe.prometheus import make_registry
from thinwire.stream.events import Applied, CaughtUp, Fetched, Maintained, Published, Refused

URL = "file:///store"
PLACE: dict[str, Any] = {"url": URL, "lineage": "a" * 32, "version": 7}
PUBLISHED = Published(
    **PLACE, step=70, payload_bytes=100, raw_bytes=1000, changed_count=3, wall_s=0.5
)
FETCHED = Fetched(**PLACE, kind="delta", payload_bytes=60, cached_bytes=40, wall_s=0.123456789)
APPLIED = Applied(**PLACE, kind="delta", base=6, step=70, wall_s=0.02, age_s=30.0)
REFUSED = Refused(url=URL, lineage="", version=0, code="unavailable", reason="no answer")
MAINTAINED = Maintained(
    url=URL, lineage="", version=7, kind="merge", object_count=2, payload_bytes=9
)


class Recorder:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **facts: self.lines.append((level, event, facts))


def test_log_levels_and_facts() -> None:
    recorder = Recorder()
    observer = LogObserver(recorder)
    for event in (PUBLISHED, FETCHED, APPLIED, REFUSED, MAINTAINED):
        observer.on_event(event)
    assert [line[:2] for line in recorder.lines] == [
        ("info", "published"),
        ("debug", "fetched"),
        ("info", "applied"),
        ("warning", "refused"),
        ("info", "maintained"),
    ]
    facts = [line[2] for line in recorder.lines]
    assert facts[1]["wall_s"] == 0.123457
    place = {**PLACE, "kind": "delta", "base": 6, "step": 70}
    assert facts[2] == {**place, "wall_s": 0.02, "age_s": 30.0}
    assert facts[3] == {"url": URL, "code": "unavailable", "reason": "no answer"}


def test_the_same_refusal_again_is_no_warning() -> None:
    recorder = Recorder()
    observer = LogObserver(recorder)
    for event in (REFUSED, REFUSED, APPLIED, REFUSED):
        observer.on_event(event)
    assert [line[0] for line in recorder.lines] == ["warning", "debug", "info", "warning"]


def test_the_same_refusal_after_a_look_that_went_well_is_one() -> None:
    """A store goes away once more, and meanwhile nothing was published."""
    recorder = Recorder()
    observer = LogObserver(recorder)
    caught_up = CaughtUp(**PLACE, step=70)
    for event in (REFUSED, REFUSED, caught_up, caught_up, REFUSED):
        observer.on_event(event)
    assert [line[0] for line in recorder.lines] == ["warning", "debug", "warning"]
    # But a version that is refused at each look is told once.
    refused = Refused(**PLACE, code="access-denied", reason="no lease")
    recorder.lines.clear()
    for event in (refused, caught_up, refused, caught_up):
        observer.on_event(event)
    assert [line[0] for line in recorder.lines] == ["warning", "debug"]


def test_log_lines_are_json_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logger = make_logger(LogLevel.INFO)
    LogObserver(logger).on_event(FETCHED)
    LogObserver(logger).on_event(APPLIED)
    captured = capsys.readouterr()
    assert captured.out == ""
    line = json.loads(captured.err)
    assert (line["event"], line["level"], line["version"]) == ("applied", "info", 7)


def test_no_control_sequence_reaches_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    logger = make_logger(LogLevel.INFO)
    logger.warning("refused", reason="\x1b]0;owned\x07\u202e")
    text = capsys.readouterr().err
    assert "owned" in text
    assert "\x1b]" not in text
    assert "\u202e" not in text


def test_metrics() -> None:
    observer = PrometheusObserver(make_registry())
    for event in (PUBLISHED, FETCHED, FETCHED, APPLIED, REFUSED, MAINTAINED):
        observer.on_event(event)

    def value(name: str, **labels: str) -> float | None:
        return observer.registry.get_sample_value(f"thinwire_{name}", {"url": URL, **labels})

    assert value("published_versions_total") == 1
    assert value("published_bytes_total") == 100
    assert value("publish_seconds_sum") == 0.5
    assert value("fetched_bytes_total") == 120
    assert value("cached_bytes_total") == 80
    assert value("fetch_seconds_count") == 2
    assert value("applied_versions_total", kind="delta") == 1
    assert value("apply_seconds_sum") == 0.02
    assert value("delivery_seconds_sum") == 30
    assert value("refused_total", code="unavailable") == 1
    assert value("maintained_objects_total", kind="merge") == 2
    assert value("maintained_bytes_total", kind="merge") == 9
    assert value("version") == 7
    age_s = value("version_age_seconds")
    assert age_s is not None
    assert 30 <= age_s < 600


def test_a_maintainer_is_at_no_version() -> None:
    observer = PrometheusObserver(make_registry(), follows=False)
    observer.on_event(APPLIED)
    assert observer.registry.get_sample_value("thinwire_version", {"url": URL}) is None


def test_two_observers_in_one_registry() -> None:
    registry = make_registry()
    PrometheusObserver(registry)
    with pytest.raises(InvalidArgument, match="registered"):
        PrometheusObserver(registry)


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for call in (PrometheusObserver, make_registry):
        with pytest.raises(InvalidArgument, match="prometheus-client") as caught:
            call()
        assert "thinwire[metrics]" in caught.value.hint


def test_the_endpoint_is_on_loopback_only() -> None:
    registry = make_registry()
    PrometheusObserver(registry).on_event(APPLIED)
    with serve_metrics(0, registry) as port:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            text = response.read().decode()
        assert f'thinwire_version{{url="{URL}"}} 7.0' in text
        with pytest.raises(ConnectionRefusedError):
            # Another address of this very machine.
            socket.create_connection(("127.0.0.2", port), timeout=30)
        with (
            pytest.raises(StoreError, match=f"127.0.0.1:{port}"),
            serve_metrics(port, registry),
        ):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)
