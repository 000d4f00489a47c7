"""Every number that the model takes from outside: what it is, its unit, and where it comes from.

Speeds were measured in this repository; the command is named. Prices are list prices of a provider
as of a date: check them, and change them by their option.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A number from outside.

    Attributes:
        value: The number.
        unit: Its unit.
        source: The command that measured it, the document that has it, or who says so.
    """

    value: float
    unit: str
    source: str


_CHECK = "python benchmarks/capacity_check.py speeds, one thread of two shared cores, BF16"

# What the coder's time is made of: a look at every word, and work for every change.
ENCODE_WORD_NS = Fact(0.4, "ns a word", _CHECK)
ENCODE_CHANGE_NS = Fact(52.0, "ns a changed word", _CHECK)
DECODE_WORD_NS = Fact(0.2, "ns a word", _CHECK)
DECODE_CHANGE_NS = Fact(60.0, "ns a changed word", _CHECK)
# Comparing the weights with the baseline while training waits.
CAPTURE_BYTES_PER_S = Fact(
    3.6e9,
    "bytes a second and rank",
    "make trainer-bars: publish() blocks 74.2 ms for 269 MB on a CPU; a GPU was not timed",
)
# What an engine's ranks do between pause and go on.
EXCHANGE_CHANGE_NS = Fact(
    22.0,
    "ns a changed word and rank",
    "make vllm-bars: 8.9 ms for 0.30 % of 134.5 M words in vLLM on a CPU; a GPU was not timed",
)
PUBLISHER_BESIDE_BYTES = Fact(
    123 << 20,
    "bytes a rank beyond the baseline",
    "make trainer-bars: a first version and five deltas, FP32 masters",
)
RELAY_BYTES_PER_S = Fact(
    1.0e9,
    "bytes a second of one relay process",
    "python benchmarks/capacity_relay.py: a CPU second of its event loop, 1.06 to 1.47e9 at loads "
    "of 10 to 17 on two cores, where the clock showed 0.1 to 0.9e9; over TLS 0.57 to 0.69e9",
)
COMMIT_ROUND_TRIPS = Fact(
    4.0, "round trips", "make stream-bars: commit to applied beyond the bytes, median 3.9"
)
INDEX_BYTES_PER_TENSOR = Fact(
    156.0,
    "bytes of an unpacked index a tensor",
    "python benchmarks/capacity_check.py limits: 185,175 tensors of 1.03e12 words, 28.9 MB",
)
HEAD_BYTES_PER_TENSOR = Fact(
    60.0,
    "bytes of a container's head a tensor",
    "python benchmarks/capacity_check.py limits: 69,975 tensors, 4.20 MB with digests",
)
OPEN_TENSOR_US = Fact(
    60.0,
    "us a tensor",
    "python benchmarks/capacity_check.py limits: parsing heads and digests of all weights; "
    "opening a checkpoint of 69,975 tensors takes 2.3 s, of 185,175 6 s",
)
OBJECT_BYTES_PER_TENSOR = Fact(
    2_800.0,
    "bytes of memory a tensor",
    "python benchmarks/capacity_check.py limits: index and digests of all weights in one process",
)
MEET_US_PER_HOLDING = Fact(
    9.0,
    "us a tensor and rank that holds a part of it",
    "python benchmarks/capacity_check.py limits: 64 ranks, 69,975 tensors, 38 s on rank 0, beside "
    "other work",
)
MEET_BYTES_PER_HOLDING = Fact(
    130.0,
    "bytes of memory a tensor and rank that holds a part of it",
    "python benchmarks/capacity_check.py limits: 1,000 ranks, 1,181 tensors, 147 MiB on rank 0",
)
FIRST_US_PER_UNIT = Fact(
    435.0,
    "us a chunk of the model, on every rank",
    "python benchmarks/capacity_check.py limits: 64 ranks that hold parts, 65,636 chunks, 28.5 s "
    "beside other work",
)
FIRST_WHOLE_US_PER_UNIT = Fact(
    242.0,
    "us a chunk of the model, on every rank",
    "python benchmarks/capacity_check.py limits: 64 ranks that hold whole experts, 130,736 "
    "chunks, 31.6 s beside other work",
)
STORE_CHECKS_PER_S = Fact(
    45_000.0,
    "checks a second",
    "python benchmarks/capacity_check.py limits: torch's TCPStore on idle cores; 12,000 beside "
    "other work",
)

# Not measured here: what a machine of the kind has by its data sheet, or a bar that is held.
DISK_BYTES_PER_S = Fact(5e9, "bytes a second", "an NVMe disk by its data sheet; --disk")
WAKE_S = Fact(1.0, "seconds", "the bar of the hub: 1,000 followers woken, p99; thinwire hub")
HUB_BYTES = Fact(300 << 20, "bytes", "the bar of the hub at 1,000 followers")

# List prices of S3 Standard in us-east-1: check them.
_LIST = "AWS list price for us-east-1, from memory, not looked up: check it"
EGRESS_PRICE = Fact(
    0.02,
    "$ a GB that leaves the bucket's region",
    "marin issue 465: $0.02 between regions of North America, $0.05 from Europe; check it",
)
PUT_PRICE = Fact(0.005, "$ a thousand PUT or LIST", _LIST)
GET_PRICE = Fact(0.0004, "$ a thousand GET", _LIST)
STORAGE_PRICE = Fact(0.023, "$ a GB and month", _LIST)
