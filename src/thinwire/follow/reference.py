"""First versions by reference: the copy that is already here, found and proved."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import BaseMismatch, InvalidArgument, NotFound
from thinwire.stream.records import Source

_HUB = "hf://"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def source_of(reference: str) -> Source:
    """The source that a user names: ``hf://ORG/NAME@REVISION``, or a folder.

    Raises:
        InvalidArgument: A Hugging Face name without a revision, or a malformed one.
    """
    if not reference.startswith(_HUB):
        return Source("folder", os.path.abspath(reference))  # noqa: PTH100 - links stay
    name, _, revision = reference.removeprefix(_HUB).partition("@")
    source = Source("huggingface", name, revision)
    if not _is_sound(source):
        raise InvalidArgument(
            f"{reference[:200]!r} does not name a Hugging Face model at a revision",
            hint="Write hf://ORG/NAME@REVISION; a commit's hash is best, a branch moves",
        )
    return source


def local_copy(source: Source, base: str | os.PathLike[str] | None) -> Path:
    """Where the copy of a source lies on this machine.

    A folder that the manifest names is never opened by itself: it is a path from elsewhere.

    Args:
        source: What the manifest says.
        base: Where the caller says that it is.

    Raises:
        NotFound: There is none; says what to do.
    """
    if base is not None:
        return Path(base)
    where = f"{source.name}@{source.revision}" if source.revision else source.name
    if source.kind == "huggingface" and _is_sound(source):
        found = _in_hub_cache(source)
        if found is not None:
            return found
        hint = f"Fetch {where} with the Hugging Face tools, or say where it is (base=, --base)"
    else:
        hint = "Say where your copy is (base=, --base)"
    raise NotFound(
        f"the stream begins with {where!r} by reference, and no copy of it was found here",
        hint=hint,
        source=where,
    )


def content_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """BLAKE3 over name and BLAKE3 of every tensor, sorted by name: proves a copy to be the same.

    The digests inside deltas find accidents only; a copy from elsewhere needs more.
    """
    whole = blake3()
    for name in sorted(tensors):
        tensor = blake3(tensors[name].data.data, max_threads=blake3.AUTO)
        whole.update(f"{tensor.hexdigest()} {name}\n".encode())
    return whole.hexdigest()


def check_content(copy: Checkpoint, content: str) -> None:
    """Raise BaseMismatch unless a copy holds exactly the tensors that a manifest names."""
    if content_digest(copy.tensors) != content:
        raise BaseMismatch(
            f"{copy.path} holds other weights than those that the stream begins with",
            hint="Fetch that very revision again, or point to another copy (base=, --base)",
            path=str(copy.path),
        )


def _is_sound(source: Source) -> bool:
    organisation, _, name = source.name.partition("/")
    parts = [organisation, name or organisation, source.revision]
    return all(_PART.fullmatch(part) and ".." not in part for part in parts)


def _in_hub_cache(source: Source) -> Path | None:
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))  # noqa: PTH111
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(home, "hub")))
    model = cache / f"models--{source.name.replace('/', '--')}"
    revision = source.revision
    with suppress(OSError, UnicodeError):
        revision = (model / "refs" / revision).read_text(encoding="ascii").strip()[:96]
    if not _PART.fullmatch(revision):
        return None
    snapshot = model / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None
