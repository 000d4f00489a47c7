"""Limits of the system and of S3, each with where it stands and how near a scenario comes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thinwire.capacity import facts
from thinwire.capacity.demand import Memory, Traffic, holdings
from thinwire.capacity.payload import (
    S3_OBJECT_BYTES,
    S3_PARTS,
    S3_PUT_BYTES,
    Payload,
    part_bytes,
)
from thinwire.capacity.scenario import Scenario
from thinwire.capacity.timing import Timing
from thinwire.checkpoint.plan import MAX_CARRIED_BYTES
from thinwire.codec.container import MAX_INDEX_BYTES, MAX_SECTIONS, MAX_TENSORS
from thinwire.codec.digest import CHUNK_WORDS
from thinwire.codec.dtypes import MAX_TENSOR_BYTES
from thinwire.stream.encoding import MAX_FILES, MAX_MANIFEST_BYTES, MAX_SHARDS
from thinwire.stream.keys import MAX_VERSION

# Of one stream, as hub/replicas.py has it; tests/capacity/test_constants.py compares.
HUB_REPLICAS = 10_000

Status = Literal["ok", "near", "exceeded"]
_NEAR = 0.5
# Beside the model: tokenizer, config and the index of weights files travel in a delta by reference.
_INDEX_LINE_BYTES = 90
_TOKENIZER_BYTES = 20 << 20
# Ranks ask the job's store for what they wait for: publish/torch ranks, torch/ranks.py.
_LONGEST_POLL_S = 0.1
_CHECKS_A_POLL = 2
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Limit:
    """A limit, and how near it is.

    Attributes:
        name: What is limited.
        value: What the scenario comes to.
        limit: What there may be.
        unit: Of both.
        where: The constant or the place in the code, or whose limit it is.
        advice: What to do about it; empty where nothing has to be done.
    """

    name: str
    value: float
    limit: float
    unit: str
    where: str
    advice: str = ""

    @property
    def share(self) -> float:
        """The value, in the limit."""
        return self.value / self.limit if self.limit else float("inf")

    @property
    def status(self) -> Status:
        """How near it is."""
        if self.value > self.limit:
            return "exceeded"
        return "near" if self.share > _NEAR else "ok"


def limits_of(
    scenario: Scenario, payload: Payload, timing: Timing, traffic: Traffic, memory: Memory
) -> list[Limit]:
    """Every limit that is looked at, hard ones first."""
    found = [*_of_versions(scenario, payload), *_of_containers(scenario, payload)]
    found += [*_of_uploads(payload), *_of_steps(scenario, timing, traffic)]
    if scenario.has_relay:
        found += _of_relays(scenario, traffic)
    if scenario.has_hub:
        found.append(
            Limit(
                "replicas that one hub hears",
                scenario.replicas,
                HUB_REPLICAS,
                "",
                "hub/replicas.py FleetLimits",
                "A hub for each region",
            )
        )
    if scenario.ranks > 1:
        found += _of_ranks(scenario)
    found.append(
        Limit(
            "memory of the largest process",
            max(memory.first_rank, memory.follower, memory.maintainer),
            1 << 40,
            "bytes",
            "a host of 1 TiB",
            "More ranks, or baseline='disk'",
        )
    )
    return found


def _of_versions(scenario: Scenario, payload: Payload) -> list[Limit]:
    """What a version is made of."""
    return [
        Limit(
            "a version's manifest",
            payload.delta_manifest_bytes,
            MAX_MANIFEST_BYTES,
            "bytes",
            "stream/encoding.py MAX_MANIFEST_BYTES",
            "Fewer, larger shards",
        ),
        Limit(
            "an anchor's manifest",
            payload.anchor_manifest_bytes,
            MAX_MANIFEST_BYTES,
            "bytes",
            "stream/encoding.py MAX_MANIFEST_BYTES",
        ),
        Limit(
            "shards of a version",
            payload.delta.count,
            MAX_SHARDS,
            "",
            "stream/encoding.py MAX_SHARDS",
        ),
        Limit(
            "files of an anchor",
            payload.anchor.count,
            MAX_FILES,
            "",
            "stream/encoding.py MAX_FILES",
        ),
        Limit(
            "versions until numbers end",
            scenario.versions,
            MAX_VERSION,
            "",
            "stream/keys.py MAX_VERSION",
        ),
    ]


def _of_containers(scenario: Scenario, payload: Payload) -> list[Limit]:
    """What a container holds."""
    containers = payload.delta.count
    index_bytes = scenario.tensors * facts.INDEX_BYTES_PER_TENSOR.value
    mean = scenario.params // scenario.tensors * scenario.word_bytes
    carried = scenario.tensors * _INDEX_LINE_BYTES + _TOKENIZER_BYTES
    return [
        Limit(
            "index of a container, unpacked",
            index_bytes / containers,
            MAX_INDEX_BYTES,
            "bytes",
            "codec/container.py MAX_INDEX_BYTES",
            "Publish from more ranks",
        ),
        Limit(
            "index of all in one container (thinwire diff)",
            index_bytes,
            MAX_INDEX_BYTES,
            "bytes",
            "codec/container.py MAX_INDEX_BYTES",
            "A stream cuts it into shards; `thinwire diff` does not",
        ),
        Limit(
            "tensors of a container",
            scenario.tensors / containers,
            MAX_TENSORS,
            "",
            "codec/container.py MAX_TENSORS",
        ),
        Limit(
            "chunks of a container",
            _chunks(scenario) / containers,
            MAX_SECTIONS,
            "",
            "codec/container.py MAX_SECTIONS",
        ),
        Limit(
            "bytes of a tensor, in the mean",
            mean,
            MAX_TENSOR_BYTES,
            "bytes",
            "codec/dtypes.py MAX_TENSOR_BYTES",
        ),
        Limit(
            "small files that a delta carries",
            carried,
            MAX_CARRIED_BYTES,
            "bytes",
            "checkpoint/plan.py MAX_CARRIED_BYTES",
            "Only a reference and a change of layout carry them: begin by an anchor",
        ),
    ]


def _of_uploads(payload: Payload) -> list[Limit]:
    """What S3 takes."""
    largest = payload.anchor.size
    return [
        Limit(
            "an anchor's file in one PUT",
            min(largest, part_bytes(largest)),
            S3_PUT_BYTES,
            "bytes",
            "S3: 5 GiB a PUT or part; store/object_store.py goes in parts above 8 MiB",
        ),
        Limit("an anchor's file as an object", largest, S3_OBJECT_BYTES, "bytes", "S3: 5 TiB"),
        Limit("parts of an upload", -(-largest // part_bytes(largest)), S3_PARTS, "", "S3: 10,000"),
    ]


def _of_steps(scenario: Scenario, timing: Timing, traffic: Traffic) -> list[Limit]:
    """What must keep pace with the trainer."""
    step_s = scenario.step_s
    return [
        Limit(
            "a version on the trainer's side",
            timing.trainer_s,
            step_s,
            "s",
            "one version at a time: torch/publisher.py when_busy",
            "More ranks or threads, a faster uplink, or fewer versions",
        ),
        Limit(
            "a version on a replica",
            min(timing.replica_s, timing.run_s),
            step_s,
            "s",
            "decode, log and write, while the next one is fetched: follow/walking.py, "
            "checkpoint/update.py",
            "More threads and a folder in memory (--decode-threads, --disk), or fewer versions",
        ),
        Limit(
            "merged deltas, for each version",
            timing.maintainer_s,
            step_s,
            "s",
            "maintain/merging.py: every level reads and codes the whole model",
            "More threads, or fewer levels (--merge-levels); joiners then take more bytes",
        ),
        Limit(
            "a region's link, for each version",
            traffic.region * 8 / scenario.link_bits_per_s,
            step_s,
            "s",
            "--link",
            "A relay in each region"
            if not scenario.has_relay
            else "A faster link, or fewer relays: each fetches a copy of its own",
        ),
    ]


def _of_relays(scenario: Scenario, traffic: Traffic) -> list[Limit]:
    """What a relay sends within a step."""
    step_s = scenario.step_s
    network_s = traffic.relay * 8 / scenario.local_bits_per_s
    process_s = traffic.relay / scenario.relay_bytes_per_s
    return [
        Limit(
            "a relay's network, for each version",
            network_s,
            step_s,
            "s",
            "--local-link: every replica of the region reads through its relay",
            f"At least {_relays_for(network_s, scenario)} relays a region (--relays)",
        ),
        Limit(
            "a relay's process, for each version",
            process_s,
            step_s,
            "s",
            "--relay-speed: one event loop sends everything (relay/server.py)",
            f"At least {_relays_for(process_s, scenario)} relays a region (--relays), or an "
            "HTTP cache before one (--relay-speed)",
        ),
    ]


def _of_ranks(scenario: Scenario) -> list[Limit]:
    """What ranks say to each other."""
    polls = scenario.ranks / _LONGEST_POLL_S * _CHECKS_A_POLL
    first_us = (
        facts.FIRST_US_PER_UNIT if scenario.held == "parts" else facts.FIRST_WHOLE_US_PER_UNIT
    )
    return [
        Limit(
            "ranks that ask the job's store",
            polls,
            facts.STORE_CHECKS_PER_S.value,
            "checks a second",
            "torch/ranks.py _LONGEST_POLL_S",
            "Publish from fewer ranks (group=)",
        ),
        Limit(
            "planning a first version",
            _chunks(scenario) * first_us.value * 1e-6,
            _DEADLINE_S,
            "s",
            "publish/first.py FirstVersion._rounds: every rank goes through every chunk",
            "Begin the stream from a folder (thinwire publish) or by reference",
        ),
        Limit(
            "ranks that meet",
            holdings(scenario) * facts.MEET_US_PER_HOLDING.value * 1e-6,
            _DEADLINE_S,
            "s",
            "publish/meeting.py: rank 0 goes through every tensor of every rank",
            "A longer deadline_s, fewer ranks, or tensors whole on ranks",
        ),
    ]


def _chunks(scenario: Scenario) -> int:
    """Chunks that are coded one by one; a small tensor is in a chunk with others."""
    return scenario.params // CHUNK_WORDS + scenario.tensors


def _relays_for(relay_s: float, scenario: Scenario) -> int:
    """Relays a region, where one of those there are takes so long for a version."""
    return math.ceil(relay_s * scenario.relays / scenario.step_s)
