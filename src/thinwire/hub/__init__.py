"""The hub: wakes followers, and shows who is at which version.

Needs starlette, uvicorn and prometheus-client.
"""

from thinwire.hub.replicas import FleetLimits
from thinwire.hub.service import LOOK_RETRY_S, Hub, HubLimits
from thinwire.hub.status import Rule

__all__ = ["LOOK_RETRY_S", "FleetLimits", "Hub", "HubLimits", "Rule"]
