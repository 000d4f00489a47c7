"""What the hub's own operations can be asked: the parameters of their queries."""

from __future__ import annotations

from thinwire.hub.asking import Parameter
from thinwire.report.messages import NAME_PATTERN, OPTIONAL_NAME_PATTERN

_MAX_WAIT_S = 60.0
_MAX_LIMIT = 1000
_MAX_VERSION = 10**12 - 1
_LINEAGE_PATTERN = r"^(?:[0-9a-f]{32})?$"

AFTER = Parameter(
    name="after",
    kind="string",
    about="Names after this one; empty: all.",
    pattern=OPTIONAL_NAME_PATTERN,
    default="",
)
REGION = Parameter(name="region", kind="string", about="Only this region.", pattern=NAME_PATTERN)
WAIT = (
    Parameter(
        name="lineage",
        kind="string",
        about="The lineage of what is known.",
        pattern=_LINEAGE_PATTERN,
        default="",
    ),
    Parameter(
        name="after",
        kind="integer",
        about="The version that is known; 0: none.",
        minimum=0,
        maximum=_MAX_VERSION,
        default=0,
    ),
    Parameter(
        name="timeout_s",
        kind="number",
        about="How long to wait.",
        minimum=0,
        maximum=_MAX_WAIT_S,
        default=30.0,
    ),
)
EVENTS = (
    Parameter(
        name="only",
        kind="string",
        about="`versions`: nothing is told of replicas.",
        pattern="^versions$",
    ),
)
READY = (
    Parameter(
        name="max_staleness_steps",
        kind="integer",
        about="How far behind a replica may be; default: the hub's rule.",
        minimum=0,
        maximum=2**53 - 1,
    ),
    Parameter(name="replica", kind="string", about="Only this one.", pattern=NAME_PATTERN),
    REGION,
    Parameter(
        name="share",
        kind="number",
        about="How many of all must be ready.",
        minimum=0,
        maximum=1,
        default=1.0,
    ),
    Parameter(
        name="min_count",
        kind="integer",
        about="How many must be ready at least.",
        minimum=1,
        maximum=_MAX_VERSION,
        default=1,
    ),
    Parameter(
        name="published",
        kind="integer",
        about="A version that was published: not ready before the hub has read it, or a later one."
        " How far behind that replicas may be says max_staleness_steps.",
        minimum=0,
        maximum=_MAX_VERSION,
        default=0,
    ),
    Parameter(
        name="lost",
        kind="string",
        about="`ignore`: those that are lost do not count; else they are not ready.",
        pattern="^ignore$",
    ),
)


def _limit(default: int) -> Parameter:
    return Parameter(
        name="limit",
        kind="integer",
        about="How many at most.",
        minimum=1,
        maximum=_MAX_LIMIT,
        default=default,
    )


LISTED_VERSIONS = (
    _limit(100),
    Parameter(
        name="before",
        kind="integer",
        about="Only versions before this one.",
        minimum=1,
        maximum=_MAX_VERSION,
    ),
)
LISTED_REPLICAS = (REGION, _limit(200), AFTER)
LISTED_UPDATES = (_limit(200),)
