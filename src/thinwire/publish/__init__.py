"""The trainer's side of a stream."""

from thinwire.publish.publisher import Publisher

__all__ = ["Publisher"]
