"""What is asked: how large, how many, how fast, how far apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from thinwire.capacity import facts
from thinwire.codec.dtypes import DTYPES, dtype_named
from thinwire.errors import InvalidArgument
from thinwire.follow.fetch import DEFAULT_MEMORY_BYTES, MIN_MEMORY_BYTES
from thinwire.maintain.upload import SHARD_RAW_BYTES
from thinwire.stream.encoding import policy_fault
from thinwire.stream.records import Policy

# A mixture of experts of 1.03e12 weights has 69,975 tensors where each expert's are its own.
WORDS_PER_TENSOR = 14_700_000
# What a follower uses at most, unless it is told: codec/threads.py.
MAX_DECODE_THREADS = 8
MAX_PARAMS = 1 << 60
MAX_COUNT = 1 << 24

_NAMES = {
    "bf16": "BF16",
    "fp16": "F16",
    "f16": "F16",
    "fp32": "F32",
    "f32": "F32",
    "fp8": "F8_E4M3",
    "f8_e4m3": "F8_E4M3",
    "f8_e5m2": "F8_E5M2",
}


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What a provider charges, in dollars.

    Attributes:
        egress_gb: A GB that leaves the bucket's region.
        put_thousand: A thousand PUT or LIST requests.
        get_thousand: A thousand GET requests.
        storage_gb_month: A GB kept for a month.

    Raises:
        InvalidArgument: One of them is no price.
    """

    egress_gb: float = facts.EGRESS_PRICE.value
    put_thousand: float = facts.PUT_PRICE.value
    get_thousand: float = facts.GET_PRICE.value
    storage_gb_month: float = facts.STORAGE_PRICE.value

    def __post_init__(self) -> None:
        """Refuse what is no price."""
        for price in fields(self):
            _refuse_unless(
                0 <= getattr(self, price.name) < math.inf, self, price.name, "Dollars: 0 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A trainer, a bucket, and replicas in regions.

    A replica is one follower on one host that holds the whole model.

    Attributes:
        params: Weights of the model.
        changed: Weights that differ from one version to the next, of all.
        regions: Regions with replicas, apart from the bucket's own.
        replicas: In all regions together, evenly spread.
        dtype: The weights', by its safetensors name or a short one (bf16, fp8).
        tensors: How many; 0: one for each ``WORDS_PER_TENSOR`` weights.
        step_s: Seconds from one version to the next.
        ranks: Of the trainer, each publishing its share.
        held: "parts": each rank holds a part of every tensor (FSDP); "whole": tensors lie whole
            on ranks (experts, one rank).
        uplink_bits_per_s: From the trainer to the bucket, all ranks together.
        link_bits_per_s: From the bucket to each region.
        local_bits_per_s: The network of one host inside a region.
        rtt_s: Round trip between a region and the bucket.
        has_relay: Whether replicas read through relays.
        relays: Relays in each region: processes, each with a copy of its own.
        relay_bytes_per_s: What one of them sends at most; its host's network is apart.
        has_hub: Whether a hub wakes replicas; else they poll.
        poll_s: The shortest time between two looks.
        policy: The stream's.
        versions: How long the run is: for what the bucket holds by then.
        joins_per_day: Replicas that begin from nothing.
        bits_per_change: Of a whole delta file; 0: from the table by changed share.
        encode_threads: Of each rank.
        decode_threads: Of a follower: one for each processor, at most 8, unless it is told.
        maintain_threads: Of a maintainer.
        cpu: Speed of a core, in that on which the speeds were measured.
        disk_bytes_per_s: A follower's disk, reading or writing.
        engine_ranks: Over which a replica's engine spreads the weights.
        memory_limit_bytes: What a follower may hold while fetching.
        shard_raw_bytes: Weights of a shard, where one rank publishes.
        is_signed: Whether records are signed.
        prices: The provider's.

    Raises:
        InvalidArgument: Something of it cannot be; the message says what.
    """

    params: int
    changed: float
    regions: int = 1
    replicas: int = 1
    dtype: str = "BF16"
    tensors: int = 0
    step_s: float = 120.0
    ranks: int = 1
    held: Literal["parts", "whole"] = "parts"
    uplink_bits_per_s: float = 10e9
    link_bits_per_s: float = 5e9
    local_bits_per_s: float = 25e9
    rtt_s: float = 0.08
    has_relay: bool = True
    relays: int = 1
    relay_bytes_per_s: float = facts.RELAY_BYTES_PER_S.value
    has_hub: bool = True
    poll_s: float = 1.0
    policy: Policy = field(default_factory=Policy)
    versions: int = 1000
    joins_per_day: float = 0.0
    bits_per_change: float = 0.0
    encode_threads: int = 1
    decode_threads: int = MAX_DECODE_THREADS
    maintain_threads: int = MAX_DECODE_THREADS
    cpu: float = 1.0
    disk_bytes_per_s: float = facts.DISK_BYTES_PER_S.value
    engine_ranks: int = 8
    memory_limit_bytes: int = DEFAULT_MEMORY_BYTES
    shard_raw_bytes: int = SHARD_RAW_BYTES
    is_signed: bool = True
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        """Refuse what cannot be, and fill in what follows."""
        object.__setattr__(self, "dtype", _NAMES.get(self.dtype.lower(), self.dtype))
        _refuse_unless(1 <= self.params <= MAX_PARAMS, self, "params", f"Choose 1 to {MAX_PARAMS}")
        _refuse_unless(
            0 < self.changed <= 1, self, "changed", "A share of all weights: 0.02 is 2 %"
        )
        for name in _COUNTS:
            value = getattr(self, name)
            _refuse_unless(1 <= value <= MAX_COUNT, self, name, f"Choose 1 to {MAX_COUNT}")
        for name in _POSITIVE:
            _refuse_unless(0 < getattr(self, name) < math.inf, self, name, "More than 0")
        for name in ("rtt_s", "joins_per_day", "bits_per_change"):
            _refuse_unless(0 <= getattr(self, name) < math.inf, self, name, "0 or more")
        _refuse_unless(0 <= self.tensors <= MAX_COUNT, self, "tensors", f"Choose 0 to {MAX_COUNT}")
        _refuse_unless(
            self.regions <= self.replicas,
            self,
            "regions",
            f"Count those with replicas: of these there are {self.replicas}",
        )
        _refuse_unless(
            self.memory_limit_bytes >= MIN_MEMORY_BYTES,
            self,
            "memory_limit_bytes",
            f"Choose {MIN_MEMORY_BYTES} or more",
        )
        if fault := policy_fault(self.policy):
            raise InvalidArgument(f"policy: {fault}", hint="See docs/operations.md")
        if not self.tensors:
            guess = min(MAX_COUNT, max(1, round(self.params / WORDS_PER_TENSOR)))
            object.__setattr__(self, "tensors", guess)
        if self.dtype not in DTYPES:
            raise InvalidArgument(
                f"dtype is {self.dtype[:40]!r}", hint=f"Choose one of {', '.join(_NAMES)}"
            )

    @property
    def word_bytes(self) -> int:
        """Bytes of a weight."""
        return dtype_named(self.dtype).word_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of all weights."""
        return self.params * self.word_bytes

    @property
    def changed_count(self) -> int:
        """Weights that differ between two versions."""
        return max(1, round(self.params * self.changed))

    @property
    def replicas_per_region(self) -> int:
        """In the fullest region."""
        return -(-self.replicas // self.regions)

    @property
    def relay_count(self) -> int:
        """Relays in all regions."""
        return self.relays * self.regions if self.has_relay else 0


def _refuse_unless(is_so: bool, asked: Prices | Scenario, name: str, hint: str) -> None:
    """Refuse a field; whoever calls it something else finds its name in the context."""
    if not is_so:
        value = getattr(asked, name)
        raise InvalidArgument(f"{name} is {value:.15g}", hint=hint, field=name, value=value)


_COUNTS = (
    "regions",
    "replicas",
    "ranks",
    "relays",
    "versions",
    "encode_threads",
    "decode_threads",
    "maintain_threads",
    "engine_ranks",
)
_POSITIVE = (
    "shard_raw_bytes",
    "step_s",
    "uplink_bits_per_s",
    "link_bits_per_s",
    "local_bits_per_s",
    "relay_bytes_per_s",
    "poll_s",
    "cpu",
    "disk_bytes_per_s",
)
