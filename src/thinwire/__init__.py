"""thinwire moves new model weights from an RL trainer to its samplers as tiny, exact deltas."""

from thinwire import errors
from thinwire.checkpoint import (
    apply_checkpoint,
    apply_in_place,
    diff_checkpoint,
    recover,
    verify_base,
)
from thinwire.codec.api import (
    Changes,
    Inspection,
    changes,
    decode,
    decode_into,
    decode_tensors,
    encode,
    encode_tensors,
    inspect,
)
from thinwire.codec.chunk import Spec
from thinwire.follow import CheckpointSink, Follower, Sink, Stream, open_stream
from thinwire.maintain import Maintainer, fsck, set_policy
from thinwire.publish import Publisher
from thinwire.stream.events import Applied, Event, Fetched, Maintained, Observer, Published, Refused
from thinwire.stream.records import Policy
from thinwire.stream.signing import SigningKey
from thinwire.stream.version import Version

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "Changes",
    "Event",
    "CheckpointSink",
    "Fetched",
    "Follower",
    "Inspection",
    "Maintained",
    "Maintainer",
    "Observer",
    "Policy",
    "Published",
    "Publisher",
    "Refused",
    "SigningKey",
    "Sink",
    "Spec",
    "Stream",
    "Version",
    "__version__",
    "apply_checkpoint",
    "apply_in_place",
    "changes",
    "decode",
    "decode_into",
    "decode_tensors",
    "diff_checkpoint",
    "encode",
    "encode_tensors",
    "errors",
    "fsck",
    "inspect",
    "open_stream",
    "recover",
    "set_policy",
    "verify_base",
]
