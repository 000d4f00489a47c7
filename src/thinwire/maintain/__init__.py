"""Looking after a stream: merged deltas, anchors, pruning, and the proof that it is whole."""

from thinwire.maintain.fsck import Problem, Report, fsck
from thinwire.maintain.maintainer import Maintainer

__all__ = ["Maintainer", "Problem", "Report", "fsck"]
