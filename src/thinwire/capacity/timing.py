"""From a step's end to the last replica that serves it: phase by phase, and what bounds each."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.capacity import facts, relays, tables
from thinwire.capacity.payload import (
    FILES_AT_ONCE,
    PART_BYTES,
    PARTS_AT_ONCE,
    Objects,
    fetches_at_once,
    objects_of,
    range_bytes,
    windowed,
)
from thinwire.capacity.scenario import Scenario
from thinwire.stream.polling import MAX_WAIT_S, Cadence

# Bytes of a redo log for each changed word: its place, and its bits.
LOG_PLACE_BYTES = 4
PAGE_BYTES = 4096
# From so many versions on the next one is fetched while one is taken: follow/prefetch.py.
RUN_VERSIONS = 2
_NS = 1e-9


@dataclass(frozen=True)
class Phase:
    """A part of the way of a version.

    Attributes:
        name: What happens.
        seconds: How long it takes.
        bound_by: What it waits for.
    """

    name: str
    seconds: float
    bound_by: str


@dataclass(frozen=True)
class Timing:
    """The way of a version to all replicas.

    Attributes:
        phases: One after the other.
        stall_s: For how long training waits.
        pause_s: For how long an engine waits.
        trainer_s: What one version keeps the trainer's side busy.
        replica_s: What one version keeps a replica busy.
        run_s: The same in a run of versions, where the next one is fetched meanwhile.
        maintainer_s: What one version keeps a maintainer busy, in the mean.
        catch_up_versions: How many versions a replica takes at a time, so as to keep up: one; two
            or more one after the other; or by a merged delta. 0: it never does.
        behind_versions: How many versions the last replica is behind, at most, while all goes
            well; -1: more and more.
    """

    phases: tuple[Phase, ...]
    stall_s: float
    pause_s: float
    trainer_s: float
    replica_s: float
    run_s: float
    maintainer_s: float
    catch_up_versions: int
    behind_versions: int

    @property
    def total_s(self) -> float:
        """From the step's end to the last replica."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def bottleneck(self) -> Phase:
        """The longest phase."""
        return max(self.phases, key=lambda phase: phase.seconds)


def timing_of(scenario: Scenario, delta: Objects) -> Timing:
    """The phases of a step delta, and how far behind that leaves replicas."""
    share = scenario.raw_bytes / scenario.ranks
    capture = Phase("capture", share / facts.CAPTURE_BYTES_PER_S.value, "a rank's memory")
    encode_s = coding_s(scenario, scenario.changed) / scenario.ranks / scenario.encode_threads
    encode = Phase("encode, decode again", encode_s, "a rank's cores")
    upload = upload_of(scenario, delta)
    commit = Phase("commit", 2 * scenario.rtt_s, "round trips")
    wake = wake_of(scenario)
    fetch = fetch_of(scenario, delta)
    take = take_of(scenario, scenario.changed)
    pause_s = exchange_s(scenario, scenario.changed)
    pause = Phase("engine: exchange", pause_s, "an engine rank's memory")
    phases = (capture, encode, upload, commit, wake, fetch, *take, pause)
    replica_s = fetch.seconds + sum(phase.seconds for phase in take) + pause_s
    trainer_s = encode.seconds + upload.seconds + commit.seconds
    run_s = max(fetch.seconds, replica_s - fetch.seconds)
    at_once = catch_up_versions(scenario, delta, replica_s, run_s)
    behind = -1
    if at_once and trainer_s <= scenario.step_s:
        late_s = sum(phase.seconds for phase in phases) - replica_s
        late_s += replica_s if at_once <= RUN_VERSIONS else at_once_s(scenario, delta, at_once)
        behind = int(late_s / scenario.step_s) + at_once
    return Timing(
        phases,
        capture.seconds,
        pause_s,
        trainer_s,
        replica_s,
        run_s,
        maintainer_s(scenario),
        at_once,
        behind,
    )


def coding_s(scenario: Scenario, changed: float) -> float:
    """Seconds of one core for encoding all weights, and for decoding them again to be sure."""
    a_word = facts.ENCODE_WORD_NS.value + facts.ENCODE_CHANGE_NS.value * changed
    return scenario.params * a_word * _NS / scenario.cpu + decoding_s(scenario, changed)


def decoding_s(scenario: Scenario, changed: float) -> float:
    """Seconds of one core for decoding a delta of all weights."""
    a_word = facts.DECODE_WORD_NS.value + facts.DECODE_CHANGE_NS.value * changed
    return scenario.params * a_word * _NS / scenario.cpu


def upload_of(scenario: Scenario, delta: Objects) -> Phase:
    """Uploading a version: by the link, or by the parts that are on their way at a time."""
    link = scenario.uplink_bits_per_s / 8
    homes = min(scenario.ranks, delta.count)
    files = min(FILES_AT_ONCE, -(-delta.count // homes))
    parts = min(PARTS_AT_ONCE, -(-delta.size // PART_BYTES))
    window = windowed(link, homes * files * parts, min(PART_BYTES, delta.size), scenario.rtt_s)
    by = "the uplink" if window >= 0.99 * link else f"{homes * files * parts} parts at a time"
    return Phase("upload", delta.total_bytes / window + 2 * scenario.rtt_s, by)


def wake_of(scenario: Scenario) -> Phase:
    """Until the last replica knows of a version."""
    if scenario.has_hub:
        return Phase("wake-up", facts.WAKE_S.value + scenario.rtt_s, "the hub")
    return Phase("wait for a look", longest_wait_s(scenario.step_s, scenario.poll_s), "polling")


def longest_wait_s(step_s: float, poll_s: float) -> float:
    """The longest that a version lies before a follower looks, while versions keep their time."""
    longest = 1.2 * min(MAX_WAIT_S, max(poll_s, step_s / 16))
    return max(poll_s, longest)


def looks_between(step_s: float, poll_s: float) -> int:
    """Looks that find nothing, from one version to the next: those of a follower's own clock."""
    cadence = Cadence()
    for number in range(5):
        cadence.note(number * step_s, number * step_s, 1)
    now_s, looks = 4 * step_s, 0
    while True:
        now_s += cadence.wait_s(now_s, poll_s, 0.5)
        if now_s >= 5 * step_s:
            return looks
        looks += 1


def fetch_of(scenario: Scenario, delta: Objects) -> Phase:
    """Fetching a version in the fullest region, until its last replica has it."""
    total = delta.total_bytes
    local = scenario.local_bits_per_s / 8
    there = scenario.replicas_per_region
    rtt_s = scenario.rtt_s
    bounds: list[tuple[float, str]] = []
    if scenario.has_relay:
        bounds.append((total * scenario.relays * 8 / scenario.link_bits_per_s, "the region's link"))
        sent, by = relays.sent_per_s(scenario)
        bounds.append((total * relays.readers_of(scenario) / sent, by))
        one = relays.fetched_per_s(scenario, delta)
    else:
        bounds.append((total * there * 8 / scenario.link_bits_per_s, "the region's link"))
        one = windowed(
            local,
            fetches_at_once(delta.size, scenario.memory_limit_bytes),
            range_bytes(delta.size),
            rtt_s,
        )
    bounds.append((total / local, "a replica's network"))
    bounds.append((total / one, "ranges at a time"))
    seconds, by = max(bounds)
    around = (facts.COMMIT_ROUND_TRIPS.value + delta.count) * rtt_s
    return Phase("fetch", seconds + around, by)


def take_of(scenario: Scenario, changed: float) -> tuple[Phase, Phase]:
    """Decoding and logging a delta, then writing it: what a follower's disk and core do."""
    disk = scenario.disk_bytes_per_s
    cores_s = decoding_s(scenario, changed) / scenario.decode_threads
    cores_s += scenario.tensors * facts.OPEN_TENSOR_US.value * 1e-6 / scenario.cpu
    log_bytes = log_bytes_of(scenario, changed)
    read_s = scenario.raw_bytes / disk
    verify = Phase(
        "decode, verify, log",
        max(cores_s, read_s) + log_bytes / disk,
        "a follower's cores" if cores_s >= read_s else "reading the base from disk",
    )
    # The log is read, and every page with a changed word is read and written.
    pages = dirty_bytes(scenario, changed)
    return verify, Phase("apply", (log_bytes + 2 * pages) / disk, "a follower's disk")


def log_bytes_of(scenario: Scenario, changed: float) -> int:
    """Bytes of the redo log of a version."""
    return int(scenario.params * changed * (LOG_PLACE_BYTES + scenario.word_bytes))


def dirty_bytes(scenario: Scenario, changed: float) -> int:
    """Bytes of the pages in which some word changes, if changes lie anywhere."""
    words = PAGE_BYTES // scenario.word_bytes
    return int(scenario.raw_bytes * (1 - (1 - changed) ** words))


def exchange_s(scenario: Scenario, changed: float) -> float:
    """For how long an engine waits while its ranks take the changed words."""
    words = scenario.params * changed / scenario.engine_ranks
    return words * facts.EXCHANGE_CHANGE_NS.value * _NS


def at_once_s(scenario: Scenario, delta: Objects, versions: int) -> float:
    """What a replica takes for some versions by one merged delta, or for one by its own."""
    total = tables.merged_bytes(delta.total_bytes, versions, scenario.raw_bytes)
    changed = tables.merged_share(scenario.changed, versions)
    fetch = fetch_of(scenario, objects_of(scenario, total))
    take = take_of(scenario, changed)
    return fetch.seconds + sum(p.seconds for p in take) + exchange_s(scenario, changed)


def catch_up_versions(scenario: Scenario, delta: Objects, replica_s: float, run_s: float) -> int:
    """The fewest versions that a replica can take at a time and keep up; 0: none does."""
    if replica_s <= scenario.step_s:
        return 1
    if run_s <= scenario.step_s:
        return RUN_VERSIONS
    if maintainer_s(scenario) > scenario.step_s:
        # Merged deltas come later than the versions that they lead to are wanted.
        return 0
    for versions in scenario.policy.merge_levels:
        if at_once_s(scenario, delta, versions) <= versions * scenario.step_s:
            return versions
    return 0


def maintainer_s(scenario: Scenario) -> float:
    """Seconds a version for merged deltas, in the mean."""
    seconds = 0.0
    levels = scenario.policy.merge_levels
    for level in levels:
        changed = tables.merged_share(scenario.changed, level)
        # Diffed, proved, and the level's own copy moved on.
        seconds += (coding_s(scenario, changed) + decoding_s(scenario, changed)) / level
    if levels:
        seconds += decoding_s(scenario, scenario.changed)  # the copy of the head
    return seconds / scenario.maintain_threads
