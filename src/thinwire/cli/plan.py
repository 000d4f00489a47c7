"""``thinwire plan``: what a stream of given size takes, before anyone pays for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Json
from thinwire.cli.output import print_json
from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from thinwire.capacity.outcome import Cut
    from thinwire.capacity.scenario import Scenario

_RATES = {"bit": 1.0, **{f"{p}bit": 1000.0**n for n, p in enumerate("kMGT", 1)}}
_SHORT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
# What the model calls otherwise than its option is called.
_OPTIONS = {
    "step_s": "--step-time",
    "uplink_bits_per_s": "--uplink",
    "link_bits_per_s": "--link",
    "local_bits_per_s": "--local-link",
    "relay_bytes_per_s": "--relay-speed",
    "rtt_s": "--rtt",
    "poll_s": "--poll",
    "disk_bytes_per_s": "--disk",
    "egress_gb": "--egress-price",
    "put_thousand": "--put-price",
    "get_thousand": "--get-price",
    "storage_gb_month": "--storage-price",
    "crash_per_hour": "--crash",
}
_BYTE_RATES = {"B": 1.0, **{f"{p}B": 1000.0**n for n, p in enumerate("kMGT", 1)}}


def parse_count(text: str) -> int:
    """A whole number, also as ``1e12``."""
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; write for example 1e12") from None
    if value != value or value in (float("inf"), float("-inf")) or value != int(value):
        raise typer.BadParameter(f"{text!r} is not a whole number; write for example 1e12")
    return int(value)


def parse_rate(text: str) -> float:
    """Bits a second, such as ``10Gbit``."""
    return _parse(text, _RATES, "a rate; write for example 200Mbit or 10Gbit")


def parse_disk(text: str) -> float:
    """Bytes a second, such as ``5GB``."""
    return _parse(text, _BYTE_RATES, "a rate; write for example 500MB or 5GB, a second")


def parse_seconds(text: str) -> float:
    """Seconds, such as ``80ms``, ``120`` or ``2m``."""
    return _parse(text, _SHORT, "a time; write for example 80ms, 120s or 2m")


def _parse(text: str, units: dict[str, float], what: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if found is None or found[2] not in units:
        raise typer.BadParameter(f"{text!r} is not {what}")
    return float(found[1]) * units[found[2]]


@contextmanager
def _named_as_options() -> Iterator[None]:
    """Have what the model refuses called as the options are."""
    try:
        yield
    except InvalidArgument as error:
        name = error.context.get("field")
        if name is None:
            raise
        option = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
        raise InvalidArgument(
            f"{option} is {error.context['value']:.15g}",
            hint=error.hint,
            option=option,
        ) from None


def _rate(help_text: str) -> Any:
    return typer.Option(parser=parse_rate, metavar="RATE", help=help_text)


def _time(help_text: str) -> Any:
    return typer.Option(parser=parse_seconds, metavar="TIME", help=help_text)


def plan(
    params: Annotated[
        int, typer.Option(parser=parse_count, metavar="COUNT", help="Weights, such as 1e12.")
    ],
    changed: Annotated[
        float,
        typer.Option(help="Weights that differ from version to version, of all: 0.02 is 2 %."),
    ],
    regions: Annotated[int, typer.Option(help="Regions with replicas.")] = 1,
    replicas: Annotated[int, typer.Option(help="Replicas in all regions together.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")] = "bf16",
    tensors: Annotated[
        int, typer.Option(help="How many; 0: as a mixture of experts of that size has.")
    ] = 0,
    step_time: Annotated[Any, _time("From one version to the next.")] = "120s",
    ranks: Annotated[int, typer.Option(help="Ranks of the trainer that publish.")] = 1,
    held: Annotated[
        str,
        typer.Option(help="parts: each rank holds a part of every tensor; whole: tensors whole."),
    ] = "parts",
    bits_per_change: Annotated[
        float, typer.Option(help="Of a delta file; 0: measured ones, by changed share.")
    ] = 0.0,
    versions: Annotated[int, typer.Option(help="How many versions the run makes.")] = 1000,
    joins_per_day: Annotated[float, typer.Option(help="Replicas that begin with nothing.")] = 0.0,
    uplink: Annotated[Any, _rate("From the trainer to the bucket, all ranks together.")] = "10Gbit",
    link: Annotated[Any, _rate("From the bucket to each region.")] = "5Gbit",
    local_link: Annotated[Any, _rate("Of one host inside a region.")] = "25Gbit",
    rtt: Annotated[Any, _time("Round trip from a region to the bucket.")] = "80ms",
    relay: Annotated[bool, typer.Option("--relay/--no-relay", help="Read through relays.")] = True,
    relays: Annotated[
        int, typer.Option(help="Relays in each region: processes, each with a copy of its own.")
    ] = 1,
    relay_speed: Annotated[
        Any,
        typer.Option(
            parser=parse_disk,
            metavar="RATE",
            help="What one relay sends, or an HTTP cache before it; the default was measured.",
        ),
    ] = "1GB",
    signed: Annotated[
        bool, typer.Option("--signed/--unsigned", help="Replicas pin keys: --trust.")
    ] = True,
    hub: Annotated[bool, typer.Option("--hub/--no-hub", help="A hub wakes replicas.")] = True,
    poll: Annotated[float, typer.Option(help="The shortest time between looks, seconds.")] = 1.0,
    anchor_every: Annotated[
        int, typer.Option(help="Versions between anchors; 0: when deltas cost more.")
    ] = 0,
    merge_levels: Annotated[
        str, typer.Option(help="Versions that merged deltas span; none: no merged deltas.")
    ] = "4,16,64,256,1024",
    keep_versions: Annotated[int, typer.Option(help="Versions that stay reachable.")] = 1000,
    keep_age: Annotated[Any, _time("Younger versions stay, too.")] = "24h",
    cpu: Annotated[
        float, typer.Option(help="Speed of a core, in that of the machine of docs/benchmarks.md.")
    ] = 1.0,
    encode_threads: Annotated[int, typer.Option(help="Threads of each rank.")] = 1,
    decode_threads: Annotated[
        int, typer.Option(help="Threads of a follower; its own choice is 8 at most.")
    ] = 8,
    maintain_threads: Annotated[int, typer.Option(help="Threads of a maintainer.")] = 8,
    disk: Annotated[
        Any, typer.Option(parser=parse_disk, metavar="RATE", help="A follower's disk.")
    ] = "5GB",
    engine_ranks: Annotated[int, typer.Option(help="Ranks of a replica's engine.")] = 8,
    egress_price: Annotated[float, typer.Option(help="A GB that leaves the region.")] = 0.02,
    put_price: Annotated[float, typer.Option(help="A thousand PUT or LIST.")] = 0.005,
    get_price: Annotated[float, typer.Option(help="A thousand GET.")] = 0.0004,
    storage_price: Annotated[float, typer.Option(help="A GB for a month.")] = 0.023,
    simulate: Annotated[
        int, typer.Option(metavar="STEPS", help="Also play so many versions through; 0: do not.")
    ] = 0,
    cut: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGION:FROM:TO",
            show_default=False,
            help="Cut a region (from 0 on) off between two times of the simulation. Repeatable.",
        ),
    ] = None,
    crash: Annotated[
        float, typer.Option(help="Share of replicas that crash in an hour, and join again.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
    as_json: Json = False,
) -> None:
    """What a run takes: bytes, time to all replicas, requests, memory, disk and cost.

    A model, held against real runs in docs/scale.md; with --simulate also played through, with
    regions that are cut off and replicas that crash. Limits that are exceeded are no error: they
    are marked in the last table, and with --json each has a status; the exit code is 0.
    """
    with reported(as_json=as_json), _named_as_options():
        from thinwire.capacity.model import plan_of
        from thinwire.capacity.scenario import Prices, Scenario
        from thinwire.capacity.simulate import MAX_STEPS, play
        from thinwire.cli.plan_tables import plan_as_json, print_plan, print_run
        from thinwire.stream.records import Policy

        scenario = Scenario(
            params=params,
            changed=changed,
            regions=regions,
            replicas=replicas,
            dtype=dtype,
            tensors=tensors,
            step_s=step_time,
            ranks=ranks,
            held=_held(held),
            uplink_bits_per_s=uplink,
            link_bits_per_s=link,
            local_bits_per_s=local_link,
            rtt_s=rtt,
            has_relay=relay,
            relays=relays,
            relay_bytes_per_s=relay_speed,
            is_signed=signed,
            has_hub=hub,
            poll_s=poll,
            policy=Policy(
                anchor_every=anchor_every,
                merge_levels=_levels(merge_levels),
                keep_versions=keep_versions,
                keep_age_s=int(keep_age),
            ),
            versions=versions,
            joins_per_day=joins_per_day,
            bits_per_change=bits_per_change,
            encode_threads=encode_threads,
            decode_threads=decode_threads,
            maintain_threads=maintain_threads,
            cpu=cpu,
            disk_bytes_per_s=disk,
            engine_ranks=engine_ranks,
            prices=Prices(
                egress_gb=egress_price,
                put_thousand=put_price,
                get_thousand=get_price,
                storage_gb_month=storage_price,
            ),
        )
        if not 0 <= simulate <= MAX_STEPS:
            raise InvalidArgument(
                f"--simulate {simulate}", hint=f"Choose at most {MAX_STEPS} versions"
            )
        if (cut or crash != 0) and not simulate:
            raise InvalidArgument(
                "--cut and --crash belong to a simulation", hint="Add --simulate STEPS"
            )
        cuts = [_cut(text, scenario) for text in cut or ()]
        found = plan_of(scenario)
        run = None
        if simulate:
            run = play(scenario, simulate, cuts=cuts, crash_per_hour=crash, seed=seed)
        if as_json:
            content = plan_as_json(found)
            if run is not None:
                content["simulation"] = asdict(run)
            print_json(content)
            return
        print_plan(found)
        if run is not None:
            print_run(run)


def _held(text: str) -> Any:
    if text not in ("parts", "whole"):
        raise InvalidArgument(f"--held {text[:40]!r}", hint="It is parts or whole")
    return text


def _levels(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(
            f"--merge-levels {text[:80]!r} is not a list of numbers", hint="Write 4,16,64 or none"
        ) from None


def _cut(text: str, scenario: Scenario) -> Cut:
    from thinwire.capacity.outcome import Cut

    parts = text.split(":")
    if len(parts) != 3 or not parts[0].isdecimal() or int(parts[0]) >= scenario.regions:
        raise InvalidArgument(
            f"--cut {text[:80]!r} is not REGION:FROM:TO",
            hint=f"Write for example 0:10m:70m; regions are 0 to {scenario.regions - 1}",
        )
    start_s, stop_s = parse_seconds(parts[1]), parse_seconds(parts[2])
    if start_s >= stop_s:
        raise InvalidArgument(f"--cut {text[:80]!r} ends before it begins", hint="FROM before TO")
    return Cut(int(parts[0]), start_s, stop_s)
