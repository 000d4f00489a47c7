"""Fireworks' delta compression and hot load, without Fireworks' package.

The functions here have the names and the keyword arguments of ``fireworks-delta-compression``
0.1.0, and each side reads what the other writes. On purpose they differ in this:

- arc_v3 is read without pickle: a payload cannot run anything. It is written the same each time,
  and never larger than the package's smallest; the package as shipped takes what is done first.
- Errors are those below and thinwire's own, each of which is also what the package raises there:
  ``ValueError``, ``KeyError``, ``FileNotFoundError``, or ``RuntimeError`` from
  ``decompress_delta_into_source``. ``delta_decompress_dict_from_file`` raises the error itself
  where the package wraps it into a ``RuntimeError``; both are caught by that name.
- In-place updates are all or nothing, also where the process is killed. They take the model's size
  of disk beside the file. Called again on a file that is the new one already they do nothing,
  where the package raises. A file that is a link or has two names is refused, as others share it;
  the package writes through links.
- ``delta_compress_dirs``: the delta's folder appears whole or not at all, so ``diff_dir`` must be
  empty or not be there, where the package adds to it. A file on one side only, hidden or not, is an
  error unless asked for, and subfolders are one; the package leaves both out. Config, tokenizer and
  the like come from the new folder, not from the old one. Without an executor files go one after
  the other, where the package starts four processes. It returns a ``OneSided``, not None.
- ``device`` is where results go; the work is done on the host. ``src`` is never changed, where
  ``delta_decompress_dict_from_file`` of the package moves its tensors there.
- A dtype that safetensors does not have, such as complex128, is refused.
- ``CompressionBackend`` can be derived from, but the formats here are no objects of it.
- ``compression_format="thinwire"``: each payload is a thinwire container.
"""

from thinwire.interop.fireworks.backend import Checksum, CompressionBackend
from thinwire.interop.fireworks.coding import FORMATS, Encoded, decode, encode
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
from thinwire.interop.fireworks.replicas import Replica
from thinwire.interop.fireworks.sink import FireworksSink

__all__ = [
    "FORMATS",
    "BackendNotFoundError",
    "Checksum",
    "CompressionBackend",
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
