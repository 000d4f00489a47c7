"""What a replica tells a hub, and how the hub wakes it."""

from thinwire.report.client import HubClient
from thinwire.report.naming import replica_name, stream_name
from thinwire.report.notifier import HubNotifier

__all__ = ["HubClient", "HubNotifier", "replica_name", "stream_name"]
