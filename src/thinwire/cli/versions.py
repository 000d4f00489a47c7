"""A version of a stream as text and as JSON."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from thinwire.cli.output import NONE, duration, percent

if TYPE_CHECKING:
    from thinwire.stream.version import Version


def version_json(version: Version) -> dict[str, Any]:
    """All facts, and its age by this machine's clock."""
    facts = asdict(version)
    return {
        **facts,
        "changed_percent": changed_percent(version),
        "age_s": round(age_s(version), 3),
    }


def version_line(version: Version) -> str:
    """What people want to know, on one line."""
    step = "" if version.step is None else f" (step {version.step})"
    text = f"version {version.version}{step}: {version.kind}, {version.payload_bytes:,} bytes"
    if version.kind == "delta":
        text += f", {percent(version.changed_count, version.word_count)} % changed"
    return f"{text}, {duration(age_s(version))} old"


def changed_percent(version: Version) -> float | None:
    """How much it changed of the version before; None: it is not a delta."""
    if version.kind != "delta" or not version.word_count:
        return None
    return 100 * version.changed_count / version.word_count


def age_s(version: Version) -> float:
    """Seconds since it was published; the two clocks may differ."""
    return time.time() - version.created_ms / 1000


def signer_name(signer: str) -> str:
    """The beginning of a public key."""
    return signer[:8] or NONE
