"""What the run must show, judged: traffic, staleness, right weights."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from records import Age, Facts, Fetched, ages_of, of_kind, quantile, stays_of, without

MIN_SAVED_SHARE = 0.99
MAX_STALENESS_P95 = 2
SYNC_ROUTES = ("s3", "hub")


@dataclass(frozen=True)
class Bar:
    """A bar, and whether it was met; None: not judged, and why."""

    name: str
    wanted: str
    found: str
    is_met: bool | None


@dataclass(frozen=True)
class Traffic:
    """What a region's link carried, both ways.

    Attributes:
        first_bytes: Until all samplers had the first version.
        sync_bytes: Weights and the hub's messages of all later versions.
        rollout_bytes: Questions and answers.
        versions: Those later versions.
        full_bytes: A full checkpoint, as it was fetched.
        full_s: How long that took.
        arc_bytes: An arc_v3 payload of one version, on average, as it was fetched ...
        same_bytes: ... and thinwire's payload of those same versions.
    """

    first_bytes: int
    sync_bytes: int
    rollout_bytes: int
    versions: int
    full_bytes: float
    full_s: float
    arc_bytes: float
    same_bytes: float

    @property
    def step_bytes(self) -> float:
        """Of a version."""
        return self.sync_bytes / self.versions

    @property
    def saved_share(self) -> float:
        """Against a full checkpoint for each version, the first one left out on both sides."""
        return 1 - self.step_bytes / self.full_bytes

    @property
    def run_saved_share(self) -> float:
        """The same of the whole run, with the first version on both sides."""
        whole = self.first_bytes + self.sync_bytes
        return 1 - whole / (self.full_bytes * (1 + self.versions))


def traffic_of(facts: Facts, region: str) -> Traffic:
    """What a region's link carried."""
    start, ready, end = (facts.marks[name] for name in ("start", "ready", "end"))
    full = next(f for f in facts.fetched if (f.region, f.kind) == (region, "full"))
    arc = next(f for f in facts.fetched if (f.region, f.kind) == (region, "arc_v3"))
    at_ready = ready.crossed_bytes(region, *SYNC_ROUTES)
    return Traffic(
        first_bytes=at_ready - start.crossed_bytes(region, *SYNC_ROUTES),
        sync_bytes=end.crossed_bytes(region, *SYNC_ROUTES) - at_ready,
        rollout_bytes=end.crossed_bytes(region, "sampler") - ready.crossed_bytes(region, "sampler"),
        versions=len(facts.commits) - 1,
        full_bytes=per_version(full),
        full_s=full.seconds / len(full.versions),
        arc_bytes=per_version(arc),
        same_bytes=statistics.fmean(
            commit["payload_bytes"] for commit in facts.commits if commit["version"] in arc.versions
        ),
    )


def per_version(fetched: Fetched) -> float:
    """Bytes of one version."""
    return fetched.crossed_bytes / len(fetched.versions)


def ages_in_loop(facts: Facts, sampler: str) -> list[Age]:
    """How stale a sampler was, by its own record, from when it was ready to the end.

    One that joins is ready once it has caught up with the newest version for the first time.
    """
    start_s = facts.marks["ready"].at_s
    ages = ages_of(stays_of(facts.samplers[sampler], facts.ends[sampler]), facts.commits)
    start_s = max(start_s, min((a.start_s for a in ages if a.steps == 0), default=start_s))
    return [
        Age(age.steps, max(age.start_s, start_s), age.stop_s)
        for age in ages
        if age.stop_s > start_s
    ]


def cut_of(facts: Facts, sampler: str) -> tuple[float, float] | None:
    """From the cut to when a sampler had the newest version again; None: never cut off.

    One that never caught up counts as cut off only as long as its link was.
    """
    if facts.regions[sampler] != facts.remote:
        return None
    cut_s, restored_s = facts.at("cut "), facts.at("restored ")
    fresh = [a for a in ages_in_loop(facts, sampler) if a.steps == 0 and a.stop_s > restored_s]
    return cut_s, min((max(age.start_s, restored_s) for age in fresh), default=restored_s)


def judged_ages(facts: Facts, sampler: str) -> list[Age]:
    """Its ages while it was not cut off."""
    ages, cut = ages_in_loop(facts, sampler), cut_of(facts, sampler)
    return ages if cut is None else without(ages, *cut)


def hub_p95(facts: Facts, sampler: str) -> int | None:
    """The same as the hub saw it, of the moments when it was ready and not cut off."""
    cut = cut_of(facts, sampler)
    found = [
        Age(seen.staleness_steps, 0.0, 1.0)
        for seen in facts.seen
        if seen.replica == sampler
        and seen.state in ("ready", "updating")
        and seen.staleness_steps is not None
        and seen.at_s <= facts.marks["end"].at_s
        and not (cut is not None and cut[0] <= seen.at_s <= cut[1])
    ]
    return quantile(found, 0.95)


def wrong_of(facts: Facts) -> tuple[int, list[str]]:
    """How many digests of served versions were compared, and which differ."""
    digests = {commit["version"]: commit["digest"] for commit in facts.commits}
    count, wrong = 0, []
    for sampler, lines in facts.samplers.items():
        for line in of_kind(lines, "Served"):
            count += 1
            if digests.get(line["version"]) != line["digest"]:
                wrong.append(f"{sampler}: version {line['version']}")
    return count, wrong


def judge(facts: Facts) -> list[Bar]:
    """All bars."""
    return [_judge_traffic(facts), _judge_staleness(facts), _judge_weights(facts)]


def _judge_traffic(facts: Facts) -> Bar:
    regions = sorted(set(facts.regions.values()))
    shares = {region: traffic_of(facts, region).saved_share for region in regions}
    whole = statistics.fmean(traffic_of(facts, region).run_saved_share for region in regions)
    worst = min(shares.values())
    found = f"{100 * worst:.2f} % less a step in the worst region"
    found += f" (whole run with its first version: {100 * whole:.2f} %)"
    if facts.is_small:
        return Bar("traffic", ">= 99 % less", f"{found}; NOT JUDGED: the model is a toy", None)
    return Bar("traffic", ">= 99 % less", found, worst >= MIN_SAVED_SHARE)


def _judge_staleness(facts: Facts) -> Bar:
    found = {name: quantile(judged_ages(facts, name), 0.95) for name in facts.samplers}
    worst = max(found.items(), key=lambda item: -1 if item[1] is None else item[1])
    is_met = all(p95 is not None and p95 <= MAX_STALENESS_P95 for p95 in found.values())
    words = f"p95 {worst[1]} steps in the worst sampler ({worst[0]})"
    if facts.is_small:
        words += "; NOT JUDGED: steps of a second"
        return Bar("staleness", f"p95 <= {MAX_STALENESS_P95} steps, not cut off", words, None)
    return Bar("staleness", f"p95 <= {MAX_STALENESS_P95} steps, not cut off", words, is_met)


def _judge_weights(facts: Facts) -> Bar:
    count, wrong = wrong_of(facts)
    end = of_kind(facts.trainer, "end")
    unknown = end[-1]["unknown"] if end else ["the trainer did not end"]
    silent = [name for name, lines in facts.samplers.items() if not of_kind(lines, "Served")]
    damaged = [f"{f.region}: {f.kind}" for f in facts.fetched if not f.is_right]
    faults = wrong + unknown + silent + damaged
    words = f"{count} served versions compared, {len(wrong)} wrong"
    if faults:
        words += f"; {', '.join(faults[:5])}"
    return Bar("right weights", "zero wrong", words, not faults)
