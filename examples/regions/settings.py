"""What a run is made of: regions, model, and the plan of what happens when."""

from __future__ import annotations

from dataclasses import dataclass, field

from network import Region

from thinwire.capacity.facts import EGRESS_PRICE

MBIT = 1e6
REGIONS = (
    Region("west", 0.030, 200 * MBIT),
    Region("europe", 0.080, 200 * MBIT),
    Region("asia", 0.150, 200 * MBIT),
)
# What `thinwire plan` and the dashboard count with, too.
EGRESS_USD_PER_GB = EGRESS_PRICE.value
RELAY_LIMIT_BYTES = 2 << 30


@dataclass(frozen=True)
class Plan:
    """What happens when.

    Attributes:
        kill: The step after which a sampler of the region `unsafe` is killed.
        add: The step after which another one is started there.
        cut: The step after which the region `remote` is cut off; not before the new one serves.
        cut_steps: For so many steps.
    """

    kill: int
    add: int
    cut: int
    cut_steps: int
    unsafe: str = "europe"
    remote: str = "asia"


@dataclass(frozen=True)
class Settings:
    """Of a run.

    Attributes:
        is_small: A decoder of 0.1 M weights in place of SmolLM2-135M.
        steps: How many.
        questions: Of a batch.
        group_size: Answers to each.
        learning_rate: AdamW's.
        step_s: A step takes this long at least.
        plan: What happens when.
        full_versions: How many full checkpoints are fetched for comparison.
        arc_versions: How many arc_v3 payloads.
        poll_s: Of followers, where the hub does not wake them.
    """

    is_small: bool
    steps: int
    questions: int
    group_size: int
    learning_rate: float
    step_s: float
    plan: Plan
    full_versions: int
    arc_versions: int
    poll_s: float = 2.0
    samplers_a_region: int = 2
    max_staleness: int = 3
    pretrain_steps: int = 300
    seed: int = 0
    regions: tuple[Region, ...] = field(default=REGIONS)


FULL = Settings(
    is_small=False,
    steps=30,
    questions=6,
    group_size=6,
    learning_rate=5e-6,
    step_s=8.0,
    plan=Plan(kill=4, add=6, cut=10, cut_steps=11),
    full_versions=2,
    arc_versions=6,
)
QUICK = Settings(
    is_small=True,
    steps=16,
    questions=6,
    group_size=4,
    learning_rate=5e-4,
    step_s=1.0,
    plan=Plan(kill=2, add=2, cut=3, cut_steps=17),
    full_versions=1,
    arc_versions=1,
    samplers_a_region=1,
    pretrain_steps=150,
)
