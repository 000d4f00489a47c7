"""The rollout's side of a stream: read it, verify it, keep a sink at a version."""

from thinwire.follow.follower import Follower
from thinwire.follow.opening import open_stream
from thinwire.follow.sink import CheckpointSink, Mark, Sink
from thinwire.follow.stream import Stream

__all__ = ["CheckpointSink", "Follower", "Mark", "Sink", "Stream", "open_stream"]
