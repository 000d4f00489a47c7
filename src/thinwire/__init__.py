"""thinwire moves new model weights from an RL trainer to its samplers as tiny, exact deltas."""

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

__version__ = "0.1.0"

__all__ = [
    "Changes",
    "Inspection",
    "Spec",
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
    "inspect",
    "recover",
    "verify_base",
]
