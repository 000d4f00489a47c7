"""What a hosted deployment's snapshot may be called."""

from __future__ import annotations

from thinwire.checkpoint.file_names import name_fault
from thinwire.errors import InvalidArgument

MAX_IDENTITY_CHARS = 128
"""The longest identity: CoreWeave's limit, the narrower of the two."""


def check_identity(identity: str) -> None:
    """Refuse what is no snapshot's name: it becomes a folder in a bucket and a part of URLs.

    Raises:
        InvalidArgument: As said.
    """
    fault = name_fault(identity)
    if fault is None and len(identity) > MAX_IDENTITY_CHARS:
        fault = f"is longer than {MAX_IDENTITY_CHARS} characters"
    if fault is None and (identity != identity.strip() or not identity.isprintable()):
        fault = "has a space at an end, or characters that cannot be printed"
    if fault is not None:
        raise InvalidArgument(
            f"the snapshot's identity {identity[:80]!r} {fault}",
            hint="Give one plain path segment, such as step-000123",
        )
