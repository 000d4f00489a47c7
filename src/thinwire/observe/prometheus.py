"""Events as Prometheus metrics, and an endpoint for them on the loopback interface."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thinwire.errors import InvalidArgument, StoreError
from thinwire.stream.events import (
    Applied,
    EngineFailed,
    EngineUpdated,
    Event,
    Fetched,
    Maintained,
    Published,
    Refused,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

LOOPBACK = "127.0.0.1"
# From a pause, or a delta of a small model, to an anchor of a huge one.
_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class PrometheusObserver:
    """Counts events. The label ``url`` is the stream; make one observer per registry.

    Args:
        registry: Where the metrics are registered; None: the process's default registry.
        follows: Whether ``thinwire_version`` and its age are to be kept. False for maintainers,
            whose copies are at versions of no interest.

    Raises:
        InvalidArgument: The package prometheus-client is not installed, or there is an observer in
            this registry already.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, follows: bool = True) -> None:
        _check_installed()
        import prometheus_client

        self.registry = prometheus_client.REGISTRY if registry is None else registry
        self._follows = follows
        try:
            self._register()
        except ValueError as error:
            raise InvalidArgument(
                f"thinwire's metrics cannot be registered: {error}",
                hint="Share one PrometheusObserver, or give each its own registry",
            ) from None

    def on_event(self, event: Event) -> None:
        """Count it."""
        if isinstance(event, Published):
            self._published.labels(event.url).inc()
            self._published_bytes.labels(event.url).inc(event.payload_bytes)
            self._publish_seconds.labels(event.url).observe(event.wall_s)
            self._keep_version(event, 0.0)
        elif isinstance(event, Fetched):
            self._fetched_bytes.labels(event.url).inc(event.payload_bytes)
            self._cached_bytes.labels(event.url).inc(event.cached_bytes)
            self._fetch_seconds.labels(event.url).observe(event.wall_s)
        elif isinstance(event, Applied):
            self._applied.labels(event.url, event.kind).inc()
            self._apply_seconds.labels(event.url).observe(event.wall_s)
            # The clocks of two machines differ a little.
            self._delivery_seconds.labels(event.url).observe(max(0.0, event.age_s))
            self._keep_version(event, event.age_s)
        elif isinstance(event, Refused):
            self._refused.labels(event.url, event.code).inc()
        elif isinstance(event, Maintained):
            self._maintained_objects.labels(event.url, event.kind).inc(event.object_count)
            self._maintained_bytes.labels(event.url, event.kind).inc(event.payload_bytes)
        elif isinstance(event, EngineUpdated):
            self._engine_updates.labels(event.url, event.engine, event.way, event.cache).inc()
            self._engine_pause_seconds.labels(event.url).observe(event.pause_s)
            self._engine_version.labels(event.url).set(event.version)
            self._engine_ready.labels(event.url).set(1)
        elif isinstance(event, EngineFailed):
            self._engine_failures.labels(event.url, event.engine, event.code).inc()
            self._engine_ready.labels(event.url).set(int(event.is_ready))

    def _register(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        registry = self.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"thinwire_{name}", text, ["url", *labels], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"thinwire_{name}", text, ["url"], registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"thinwire_{name}", text, ["url"], registry=registry, buckets=_SECONDS)

        self._published = counter("published_versions", "Versions published.")
        self._published_bytes = counter("published_bytes", "Bytes uploaded for versions.")
        self._publish_seconds = histogram("publish_seconds", "From the call to the commit.")
        self._fetched_bytes = counter("fetched_bytes", "Bytes of deltas fetched from the store.")
        self._cached_bytes = counter("cached_bytes", "Bytes of deltas taken from the cache.")
        self._fetch_seconds = histogram("fetch_seconds", "To fetch and verify one delta.")
        self._applied = counter("applied_versions", "Versions that a sink was brought to.", "kind")
        self._apply_seconds = histogram("apply_seconds", "To apply one step to the sink.")
        self._delivery_seconds = histogram(
            "delivery_seconds", "From the publisher's commit until it was applied here."
        )
        self._refused = counter("refused", "What was not used, by the code of its error.", "code")
        self._maintained_objects = counter(
            "maintained_objects", "Objects that maintenance made or removed.", "kind"
        )
        self._maintained_bytes = counter(
            "maintained_bytes", "Bytes that maintenance made or removed.", "kind"
        )
        self._engine_updates = counter(
            "engine_updates", "Versions that an engine was brought to.", "engine", "way", "cache"
        )
        self._engine_failures = counter(
            "engine_failures", "Updates that an engine did not take, by code.", "engine", "code"
        )
        self._engine_pause_seconds = histogram("engine_pause_seconds", "Requests were held back.")
        self._engine_version = gauge("engine_version", "The version that an engine serves.")
        self._engine_ready = gauge("engine_ready", "1: it serves one whole version; 0: not known.")
        self._version = gauge("version", "The version published or held here.")
        self._age_seconds = gauge("version_age_seconds", "Since that version was published.")

    def _keep_version(self, event: Event, age_s: float) -> None:
        if not self._follows:
            return
        published_s = time.time() - age_s
        self._version.labels(event.url).set(event.version)
        self._age_seconds.labels(event.url).set_function(lambda: time.time() - published_s)


def make_registry() -> CollectorRegistry:
    """A registry of its own, with the process's memory, CPU time and open files.

    Raises:
        InvalidArgument: The package prometheus-client is not installed.
    """
    _check_installed()
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


@contextmanager
def serve_metrics(port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serve a registry at ``http://127.0.0.1:PORT/metrics`` meanwhile; yields the port.

    Only this machine can reach it. Port 0 is any free one.

    Raises:
        StoreError: The port cannot be listened on.
        InvalidArgument: The package prometheus-client is not installed.
    """
    _check_installed()
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr=LOOPBACK, registry=registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(
            f"cannot serve metrics on {LOOPBACK}:{port}: {reason}",
            hint="Choose another port; 0 takes any free one",
            port=port,
        ) from None
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError:
        raise InvalidArgument(
            "metrics need the package prometheus-client",
            hint="Install thinwire[metrics]",
        ) from None
