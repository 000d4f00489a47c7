"""The rollout's side of a stream: read it, verify it, keep a sink at a version."""

from thinwire.follow.follower import Follower
from thinwire.follow.sink import CheckpointSink, Mark, Sink
from thinwire.follow.stream import Stream, open_stream

__all__ = ["CheckpointSink", "Follower", "Mark", "Sink", "Stream", "open_stream"]
