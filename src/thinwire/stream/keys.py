"""Where everything of a stream lies, relative to its URL. Keys are made from numbers and digests.

No key is ever read from data: a manifest says what an object *is*, and this module says where.
"""

from __future__ import annotations

import re

VERSION_DIGITS = 12
MAX_VERSION = 10**VERSION_DIGITS - 1

STREAM = "stream.json"
HEAD = "head.json"
LEASES = "leases/"

_LINEAGE = re.compile(r"[0-9a-f]{32}")


def is_lineage(text: str) -> bool:
    """Whether a text is the random id of a lineage, a stream or a session."""
    return _LINEAGE.fullmatch(text) is not None


def version_name(version: int) -> str:
    """A version as it stands in keys: their order is that of the numbers."""
    return f"{version:0{VERSION_DIGITS}d}"


def version_of(name: str) -> int | None:
    """The version that a part of a key names, or None."""
    is_version = len(name) == VERSION_DIGITS and name.isascii() and name.isdigit()
    return int(name) if is_version else None


def manifests(lineage: str) -> str:
    """The folder of a lineage's manifests."""
    return f"{lineage}/manifests/"


def manifest(lineage: str, version: int) -> str:
    """The manifest of a version: the commit point."""
    return f"{manifests(lineage)}{version_name(version)}.json"


def catalog(lineage: str) -> str:
    """The list of a lineage's merged deltas and anchors: a hint."""
    return f"{lineage}/catalog.json"


def deltas(lineage: str) -> str:
    """The folder of all deltas of a lineage, step and merged."""
    return f"{lineage}/deltas/"


def shard(lineage: str, base: int, version: int, session: str, number: int, digest: str) -> str:
    """A shard of the delta from ``base`` to ``version``.

    The session keeps the shards of rivals apart, even where their bytes are the same: so each may
    remove its own. For a version by reference ``base`` is the version itself.
    """
    folder = f"{deltas(lineage)}{version_name(base)}-{version_name(version)}"
    return f"{folder}/{session[:16]}-{number:04d}-{digest[:32]}.tw"


def merges(lineage: str) -> str:
    """The folder of the manifests of merged deltas."""
    return f"{lineage}/merges/"


def merge(lineage: str, base: int, version: int) -> str:
    """The manifest of a merged delta."""
    return f"{merges(lineage)}{version_name(base)}-{version_name(version)}.json"


def anchors(lineage: str) -> str:
    """The folder of anchors and their manifests."""
    return f"{lineage}/anchors/"


def anchor(lineage: str, version: int) -> str:
    """The manifest of an anchor that was made after its version was published."""
    return f"{anchors(lineage)}{version_name(version)}.json"


def anchor_file(lineage: str, version: int, session: str, name: str) -> str:
    """A file of an anchor; their folder is an ordinary Hugging Face checkpoint."""
    return f"{anchors(lineage)}{version_name(version)}-{session[:16]}/{name}"


def lease(follower: str, version: int) -> str:
    """What a follower says that it still needs: the key says it all."""
    return f"{LEASES}{version_name(version)}-{follower}.json"


def leased_version(key: str) -> int | None:
    """The version that the key of a follower's lease names, or None."""
    return version_of(key.removeprefix(LEASES).partition("-")[0])


def maintainer() -> str:
    """The lease of whoever maintains the stream: advice, not a lock."""
    return f"{LEASES}maintainer.json"


def versions_of(name: str) -> tuple[int, int] | None:
    """The base and version that the name of a folder of deltas, or of a merge, says; or None."""
    base, dash, version = name.partition("-")
    found = (version_of(base), version_of(version))
    if not dash or found[0] is None or found[1] is None:
        return None
    return found[0], found[1]
