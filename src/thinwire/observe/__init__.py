"""What happens on streams, told to those who watch: structured logs and Prometheus metrics.

Both are observers for ``Publisher``, ``Follower`` and ``Maintainer``; ``events.Observers`` joins
several into one.
"""

from thinwire.observe.logs import LogObserver
from thinwire.observe.prometheus import PrometheusObserver, serve_metrics

__all__ = ["LogObserver", "PrometheusObserver", "serve_metrics"]
