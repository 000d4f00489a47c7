"""torch on both sides: publish a model's weights, and keep a module at a version of a stream."""

from thinwire.torch.publisher import TorchPublisher
from thinwire.torch.sink import TorchSink
from thinwire.torch.sink_lock import UpdateLock
from thinwire.torch.sink_writes import UpdateTimes
from thinwire.torch.ticket import Ticket

__all__ = ["Ticket", "TorchPublisher", "TorchSink", "UpdateLock", "UpdateTimes"]
