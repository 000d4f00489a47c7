"""The report: a page of Markdown and its pictures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plots import Lane, draw_bytes, draw_rewards, draw_staleness
from records import Facts, of_kind, quantile
from settings import EGRESS_USD_PER_GB, Settings

from bars import (
    Bar,
    Traffic,
    ages_in_loop,
    cut_of,
    hub_p95,
    judge,
    judged_ages,
    traffic_of,
    wrong_of,
)


def write_report(facts: Facts, settings: Settings, out: Path) -> bool:
    """Write report.md and its pictures, print the bars; returns whether all were met."""
    out.mkdir(parents=True, exist_ok=True)
    bars = judge(facts)
    traffic = {region.name: traffic_of(facts, region.name) for region in settings.regions}
    (out / "staleness.svg").write_text(staleness_plot(facts))
    (out / "bytes.svg").write_text(bytes_plot(traffic))
    rewards = [line["reward"] for line in of_kind(facts.trainer, "step")]
    (out / "reward.svg").write_text(draw_rewards(rewards))
    sections = [
        heading(facts, settings),
        bar_table(bars),
        traffic_section(facts, traffic),
        staleness_section(facts),
        weights_section(facts),
        joining_section(facts),
        cut_section(facts),
        reward_section(facts, rewards),
        requests_section(facts),
        events_section(facts),
    ]
    (out / "report.md").write_text("\n\n".join(sections) + "\n")
    (out / "report.json").write_text(json.dumps(numbers_of(facts, bars, traffic), indent=1) + "\n")
    print()
    for bar in bars:
        print(f"{verdict(bar):10} {bar.name}: {bar.found} (wanted: {bar.wanted})")
    return all(bar.is_met is not False for bar in bars)


def numbers_of(facts: Facts, bars: Sequence[Bar], traffic: dict[str, Traffic]) -> dict[str, Any]:
    """The report for programs."""
    samplers = {
        name: {
            "engine": facts.engines[name],
            "region": facts.regions[name],
            "is_killed": name in facts.killed,
            "versions": [line["version"] for line in of_kind(lines, "Served")],
            "staleness_p95": quantile(judged_ages(facts, name), 0.95),
            "fetched": [
                [line["what"], line["version"], line["payload_bytes"]]
                for line in of_kind(lines, "Fetched")
            ],
        }
        for name, lines in facts.samplers.items()
    }
    return {
        "made": facts.made,
        "bars": {bar.name: [verdict(bar), bar.found] for bar in bars},
        "traffic": {region: asdict(found) for region, found in traffic.items()},
        "samplers": samplers,
        "events": facts.events,
        "versions": len(facts.commits),
    }


def verdict(bar: Bar) -> str:
    """In a word."""
    return {True: "PASS", False: "FAIL", None: "NOT JUDGED"}[bar.is_met]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def heading(facts: Facts, settings: Settings) -> str:
    """What was run."""
    links = ", ".join(
        f"{region.name} {1000 * region.round_trip_s:.0f} ms" for region in settings.regions
    )
    mbits = settings.regions[0].bits_per_s / 1e6
    return (
        f"# Three regions: {facts.model}, {settings.steps} steps\n\n"
        f"`{facts.command}`, {facts.seconds:.0f} s.\n\n"
        f"Regions: {facts.made}. {mbits:.0f} Mbit/s each way; round trips: {links}. Learning rate "
        f"{settings.learning_rate:g}; a step took "
        f"{statistics.median(line['step_s'] for line in of_kind(facts.trainer, 'step')):.1f} s "
        "(median)."
    )


def bar_table(bars: Sequence[Bar]) -> str:
    """The bars."""
    rows = [[verdict(bar), bar.name, bar.wanted, bar.found] for bar in bars]
    return "## Bars\n\n" + table(["", "bar", "wanted", "found"], rows)


def traffic_section(facts: Facts, traffic: dict[str, Traffic]) -> str:
    """Bytes and what they cost."""
    rows = []
    for region, found in traffic.items():
        rows.append(
            [
                region,
                f"{found.first_bytes:,}",
                f"{found.step_bytes:,.0f}",
                f"{found.full_bytes:,.0f}",
                f"{found.arc_bytes:,.0f}",
                f"{100 * found.saved_share:.2f} %",
                f"{100 * found.run_saved_share:.2f} %",
                f"{found.arc_bytes / found.same_bytes:.2f}",
                f"{found.full_s:.1f} s",
                f"{found.rollout_bytes:,}",
            ]
        )
    head = ["region", "first version, bytes", "bytes a step", "full checkpoint", "arc_v3 a step"]
    head += [
        "saved a step",
        "saved in the whole run",
        "arc_v3 / our payload, same versions",
        "full takes",
        "rollouts",
    ]
    costs = [
        [
            region,
            *(f"{usd(size):.4f}" for size in (1e3 * found.step_bytes, 1e3 * found.arc_bytes)),
            f"{usd(1e3 * found.full_bytes):.2f}",
        ]
        for region, found in traffic.items()
    ]
    versions = next(iter(traffic.values())).versions
    return (
        "## Bytes\n\n"
        "Payload over each region's link, both ways, as the link's proxy counted it; headers of "
        "TCP and IP come on top. *A step*: everything between the first version, served "
        "everywhere, and the last, so the joining sampler and the cut included, divided by "
        f"{versions} versions; weights and all messages of the hub and the relay. *Full* and "
        f"*arc_v3*: the last {fetched_count(facts, 'full')} and {fetched_count(facts, 'arc_v3')} "
        "versions of the same run from the same bucket, fetched by one reader in each region over "
        "the same links, at once; not all of them. Rollouts cross whatever carries the weights, "
        "and are not counted as theirs.\n\n"
        + table(head, rows)
        + "\n\n![bytes a step](bytes.svg)\n\n"
        + f"Egress of 1,000 such steps at {EGRESS_USD_PER_GB} USD a GB, in USD:\n\n"
        + table(["region", "thinwire", "arc_v3", "full checkpoints"], costs)
        + "\n\n"
        + anchor_words(traffic)
    )


def anchor_words(traffic: dict[str, Traffic]) -> str:
    """When the first version has been made up for."""
    found = max(
        (t.first_bytes - t.full_bytes * 0.01) / (0.01 * t.full_bytes - t.step_bytes)
        if t.step_bytes < 0.01 * t.full_bytes
        else float("inf")
        for t in traffic.values()
    )
    if found == float("inf"):
        return "With its first version, a run never comes to 99 % less."
    return (
        "The first version crosses once a region whatever comes after it. With it, a run is 99 % "
        f"below full checkpoints from step {found:,.0f} on."
    )


def usd(size_bytes: float) -> float:
    """What egress costs."""
    return size_bytes / 1e9 * EGRESS_USD_PER_GB


def fetched_count(facts: Facts, kind: str) -> int:
    """How many versions were fetched for comparison."""
    return len(next(found.versions for found in facts.fetched if found.kind == kind))


def staleness_section(facts: Facts) -> str:
    """Of every sampler."""
    rows = []
    for name in facts.samplers:
        ages, judged = ages_in_loop(facts, name), judged_ages(facts, name)
        pauses = pauses_of(facts, name)
        rows.append(
            [
                name,
                facts.engines[name],
                quantile(judged, 0.5),
                quantile(judged, 0.95),
                max((age.steps for age in judged), default=None),
                max((age.steps for age in ages), default=None),
                hub_p95(facts, name),
                f"{1000 * statistics.median(pauses):.0f} / {1000 * max(pauses):.0f}"
                if pauses
                else "-",
                fate_of(facts, name),
            ]
        )
    head = ["sampler", "engine", "p50", "p95", "max", "max with the cut", "p95 by the hub"]
    batches = [age for line in of_kind(facts.trainer, "step") for age in line["staleness"]]
    return (
        "## Staleness and pause\n\n"
        "Steps that the trainer's newest version was ahead of the one served, by the time it was "
        "so: the sampler's own record against the trainer's. A sampler that is cut off does not "
        "count until it has caught up; how long that took is told. *By the hub*: as it told when "
        "it was asked twice a second. Pause: how long requests were held back for an update, "
        "answers that ran included, in ms, median / most.\n\n"
        + table([*head, "pause", ""], rows)
        + "\n\n![staleness](staleness.svg)\n\n"
        + f"Groups that were learned from were {statistics.fmean(batches):.2f} steps old on "
        f"average, {max(batches)} at most."
    )


def fate_of(facts: Facts, sampler: str) -> str:
    """What happened to a sampler."""
    if sampler in facts.killed:
        return "killed"
    cut = cut_of(facts, sampler)
    if cut is None:
        return ""
    return f"cut off; caught up {cut[1] - facts.at('restored '):.1f} s after the restoration"


def pauses_of(facts: Facts, sampler: str) -> list[float]:
    """How long each update held requests back."""
    lines = facts.samplers[sampler]
    kind = "EngineUpdated" if facts.engines[sampler] == "vllm" else "Served"
    return [line["pause_s"] for line in of_kind(lines, kind) if line.get("pause_s") is not None]


def weights_section(facts: Facts) -> str:
    """Every digest."""
    count, wrong = wrong_of(facts)
    rows = [
        [name, len(served), f"{served[0]['version']} to {served[-1]['version']}" if served else "-"]
        for name, lines in facts.samplers.items()
        for served in [of_kind(lines, "Served")]
    ]
    return (
        "## Right weights\n\n"
        "After each update a BLAKE3 digest of the BF16 weights where they are sampled from (for "
        "vLLM of its own parameters, taken apart again), against the one that the trainer took of "
        f"its weights before it published them: {count} compared, {len(wrong)} wrong.\n\n"
        + table(["sampler", "versions served", "which"], rows)
        + "".join(f"\n\nWRONG: {fault}" for fault in wrong)
    )


def joining_section(facts: Facts) -> str:
    """What the sampler that joined fetched, and from where."""
    name = next(what.split()[-1] for _, what in facts.events if what.startswith("added "))
    region = facts.regions[name]
    before, after = facts.marks["before joining"], facts.marks["joined"]
    crossed = after.crossed_bytes(region, "s3") - before.crossed_bytes(region, "s3")
    lines = facts.samplers[name]
    first = of_kind(lines, "Served")[0]
    fetched = [f for f in of_kind(lines, "Fetched") if f["at_s"] <= first["at_s"]]
    size = sum(line["payload_bytes"] + line["cached_bytes"] for line in fetched)
    took_s = first["at_s"] - facts.at("added ")
    ways = ", ".join(f"{line['what']} to {line['version']}" for line in fetched)
    return (
        "## Joining\n\n"
        f"{name} served its first version, {first['version']}, {took_s:.1f} s after its start "
        f"(imports and loading included). It fetched {size:,} bytes ({ways}). From the bucket "
        f"{crossed:,} bytes crossed into {region} from then to the cut, other samplers' updates "
        "included: the rest was in the relay."
    )


def cut_section(facts: Facts) -> str:
    """The region that was cut off: what it missed, and how it came back."""
    cut_s, restored_s = facts.at("cut "), facts.at("restored ")
    caught_up_s = facts.at("caught up")
    before, after = facts.marks["before restoring"], facts.marks["caught up"]
    crossed = after.crossed_bytes(facts.remote, "s3") - before.crossed_bytes(facts.remote, "s3")
    missed = sum(cut_s < commit["at_s"] < restored_s for commit in facts.commits)
    rows = []
    for name, region in facts.regions.items():
        if region == facts.remote:
            for line in of_kind(facts.samplers[name], "Fetched", "Served", "Refused"):
                if restored_s - 1 <= line["at_s"] <= caught_up_s + 1:
                    rows.append([f"+{line['at_s'] - restored_s:.1f} s", name, told(line)])
    rows.sort(key=lambda row: float(row[0][1:-2]))
    payload = sum(c["payload_bytes"] for c in facts.commits if cut_s < c["at_s"] < restored_s)
    return (
        "## The region that was cut off\n\n"
        f"{facts.remote} was cut off for {restored_s - cut_s:.0f} s, while {missed} versions were "
        f"committed. Both of its samplers were at the newest one {caught_up_s - restored_s:.1f} s "
        f"after the link came back. From the bucket {crossed:,} bytes crossed for that; the step "
        f"deltas that were missed have {payload:,}.\n\n"
        + table(["after the link came back", "sampler", "what"], rows)
    )


def told(line: dict[str, Any]) -> str:
    """An event in words."""
    match line["kind"]:
        case "Served":
            return f"serves version {line['version']}"
        case "Refused":
            return f"refused: {line['code']}"
    size = line["payload_bytes"] + line["cached_bytes"]
    return f"fetched {line['what']} to {line['version']}, {size:,} bytes"


def reward_section(facts: Facts, rewards: Sequence[float]) -> str:
    """Whether it learned."""
    third = max(1, len(rewards) // 3)
    steps = of_kind(facts.trainer, "step")
    blocked = statistics.median(line["publish_s"] for line in steps)
    return (
        "## Reward\n\n"
        f"{statistics.fmean(rewards[:third]):.3f} over the first {third} steps, "
        f"{statistics.fmean(rewards[-third:]):.3f} over the last {third}. `publish()` held the "
        f"trainer up for {blocked:.3f} s a step (median).\n\n![reward](reward.svg)"
    )


def requests_section(facts: Facts) -> str:
    """At the bucket."""
    ready, end = facts.marks["ready"], facts.marks["end"]
    versions = len(facts.commits) - 1
    kinds = sorted(set(ready.requests) | set(end.requests))
    counts = {kind: end.requests.get(kind, 0) - ready.requests.get(kind, 0) for kind in kinds}
    rows = [[kind, count, f"{count / versions:.1f}"] for kind, count in counts.items() if count]
    return (
        "## Requests at the bucket\n\n"
        "By SeaweedFS's own count, from when all samplers were ready to the last version: trainer, "
        "maintainer, hub and three relays together.\n\n"
        + table(["kind", "count", "a version"], rows)
    )


def events_section(facts: Facts) -> str:
    """What happened when."""
    start_s = facts.events[0][0]
    rows = [[f"{at_s - start_s:.0f} s", what] for at_s, what in facts.events]
    return "## What happened\n\n" + table(["", ""], rows)


def staleness_plot(facts: Facts) -> str:
    """A row for each sampler."""
    lanes = [Lane(name, ages_in_loop(facts, name), cut_of(facts, name)) for name in facts.samplers]
    words = {"killed": "killed", "added": "added", "cut": "cut off", "restored": "restored"}
    moments = [
        (at_s, f"{what.split()[1]} {words[what.split()[0]]}")
        for at_s, what in facts.events
        if what.split()[0] in words
    ]
    return draw_staleness(lanes, moments, facts.marks["ready"].at_s, facts.marks["end"].at_s)


def bytes_plot(traffic: dict[str, Traffic]) -> str:
    """A step by each way, in each region."""
    rows = []
    for region, found in traffic.items():
        rows.append((f"{region}: thinwire", found.step_bytes, "ours"))
        rows.append((f"{region}: arc_v3", found.arc_bytes, "other"))
        rows.append((f"{region}: full checkpoint", found.full_bytes, "other"))
    return draw_bytes(rows)
