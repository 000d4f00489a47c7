"""slime's ``weight_v`` folders, which miles, Stitch and ModelExpress use too.

``weight_v000007/`` is one version. With ``delta_encoding`` in the metadata of its index it is a
delta, otherwise a Hugging Face checkpoint, which begins the chain anew. A delta's files are called
``model-00000-of-00002.safetensors`` and so on; each changed tensor is a list of bytes under its own
name, one zstd frame of

- ``xor``: the tensor's old bytes XOR its new ones, or
- ``overwrite``: a count, the positions of as many bytes, the new bytes there; count and positions
  are 32-bit numbers, little-endian, so that 4 GiB of a tensor can be addressed,

and the checksum of its new bytes is in the file's metadata under the same name. The index is
written last, and says which files count: SGLang's receiver (01d5bfe) reads no others, and neither
does this one, so that what an earlier attempt left does no harm. The receiver in slime's patch for
SGLang (c124211) applies whatever is there. There is no dtype, no shape and no digest of the base.
"""

from __future__ import annotations

from thinwire.interop.slime_read import NAME, SlimeDelta, is_delta, list_versions, open_delta
from thinwire.interop.slime_write import write_delta, write_full

__all__ = [
    "NAME",
    "SlimeDelta",
    "is_delta",
    "list_versions",
    "open_delta",
    "write_delta",
    "write_full",
]
