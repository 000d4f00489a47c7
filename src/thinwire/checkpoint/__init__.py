"""Checkpoints on disk: diff two of them, apply a delta to one, also in place and crash-safe."""

from thinwire.checkpoint.apply import apply_checkpoint, verify_base
from thinwire.checkpoint.diff import diff_checkpoint
from thinwire.checkpoint.folder import Checkpoint
from thinwire.checkpoint.in_place import apply_in_place, recover
from thinwire.checkpoint.marked import MarkedFolder
from thinwire.checkpoint.safetensors_file import SafetensorsFile

__all__ = [
    "Checkpoint",
    "MarkedFolder",
    "SafetensorsFile",
    "apply_checkpoint",
    "apply_in_place",
    "diff_checkpoint",
    "recover",
    "verify_base",
]
