"""Looking after a stream: merged deltas, anchors, pruning, and the proof that it is whole."""

from thinwire.maintain.fsck import Problem, Report, fsck
from thinwire.maintain.maintainer import Maintainer
from thinwire.maintain.policy import set_policy

__all__ = ["Maintainer", "Problem", "Report", "fsck", "set_policy"]
