"""What a snapshot may be called."""

from __future__ import annotations

import pytest

from thinwire.errors import InvalidArgument
from thinwire.interop.snapshot_identity import check_identity


@pytest.mark.parametrize(
    "identity",
    [
        "",
        ".",
        "..",
        "../up",
        "a/b",
        "a\\b",
        "c:d",
        "a\nb",
        "a\x00b",
        "a\u202eb",
        " a",
        "a ",
        "x" * 129,
        "\ud800",
        ".thinwire-x",
    ],
)
def test_identities_that_are_none(identity: str) -> None:
    with pytest.raises(InvalidArgument, match="identity"):
        check_identity(identity)


def test_identities_that_are() -> None:
    for identity in ("v1", "step-000123", "x" * 128, "model..v2", "sch\u00f6n 7"):
        check_identity(identity)
