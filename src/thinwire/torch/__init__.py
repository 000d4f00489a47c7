"""The trainer's side for torch: publish a model's weights without stalling the step."""

from thinwire.torch.publisher import TorchPublisher
from thinwire.torch.ticket import Ticket

__all__ = ["Ticket", "TorchPublisher"]
