"""Fireworks' delta compression and hot load, without Fireworks' package.

The functions here have the names and the keyword arguments of ``fireworks-delta-compression``
0.1.0, and each side reads what the other writes. On purpose they differ in this:

- arc_v3 is read without pickle: a payload cannot run anything. It is written the same each time.
- In-place updates are all or nothing, also where the process is killed.
- Folders: a file on one side only is an error, unless asked for; config, tokenizer and the like
  come from the new folder; the delta's folder appears whole or not at all.
- ``compression_format="thinwire"``: each payload is a thinwire container.
- Errors are those below: thinwire's own, and ``ValueError`` and ``RuntimeError`` at once, as the
  package raises one or the other.
"""

from thinwire.interop.fireworks.dirs import OneSided, delta_compress_dirs
from thinwire.interop.fireworks.dropin import (
    decompress_delta_into_source,
    delta_compress,
    delta_compress_dicts,
    delta_compress_dicts_to_file,
    delta_compress_files_to_file,
    delta_decompress,
    delta_decompress_dict_from_file,
    delta_decompress_inplace,
)
from thinwire.interop.fireworks.errors import (
    BackendNotFoundError,
    DeltaChecksumError,
    DeltaDecompressionError,
    DeltaKeyMismatchError,
    DeltaSizeMismatchError,
)
from thinwire.interop.fireworks.folder import FireworksDelta, open_fireworks
from thinwire.interop.fireworks.hot_load import HotLoad, PromptCache, Signalled
from thinwire.interop.fireworks.payloads import FORMATS, Encoded, decode, encode
from thinwire.interop.fireworks.replicas import Replica
from thinwire.interop.fireworks.sink import FireworksSink

__all__ = [
    "FORMATS",
    "BackendNotFoundError",
    "DeltaChecksumError",
    "DeltaDecompressionError",
    "DeltaKeyMismatchError",
    "DeltaSizeMismatchError",
    "Encoded",
    "FireworksDelta",
    "FireworksSink",
    "HotLoad",
    "OneSided",
    "PromptCache",
    "Replica",
    "Signalled",
    "decode",
    "decompress_delta_into_source",
    "delta_compress",
    "delta_compress_dicts",
    "delta_compress_dicts_to_file",
    "delta_compress_dirs",
    "delta_compress_files_to_file",
    "delta_decompress",
    "delta_decompress_dict_from_file",
    "delta_decompress_inplace",
    "encode",
    "open_fireworks",
]
