"""What a replica tells a hub, and how the hub wakes it."""

from thinwire.report.client import HubClient
from thinwire.report.naming import replica_name, stream_name
from thinwire.report.notifier import HubNotifier
from thinwire.report.ready import wait_until_ready

__all__ = ["HubClient", "HubNotifier", "replica_name", "stream_name", "wait_until_ready"]
