"""What runs where: the command line of every process of the example."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trainer
from bucket import Bucket
from network import Line, Place, Ports, Region, Route, lay
from programs import Process, Processes
from rollouts import Endpoint
from settings import RELAY_LIMIT_BYTES, Settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
THINWIRE = [sys.executable, "-m", "thinwire"]
STREAM = "run"
# So many samplers can be reached in a region; links know their ports from the start.
SLOTS = 4
_VLLM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # One rank works in the server's process: one start of the imports instead of two.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONPATH": f"{HERE}:{HERE.parent}",
}


@dataclass(frozen=True)
class Secrets:
    """Keys and tokens of a run, made anew for each."""

    folder: Path
    sampler: str = field(default_factory=lambda: secrets.token_hex(16))
    publish: str = field(default_factory=lambda: secrets.token_hex(16))
    follow: str = field(default_factory=lambda: secrets.token_hex(16))
    read: str = field(default_factory=lambda: secrets.token_hex(16))
    relay: str = field(default_factory=lambda: secrets.token_hex(16))

    def write(self) -> None:
        """Put each where its users read it; nobody else can."""
        self.folder.mkdir(parents=True, mode=0o700)
        roles = {"read": self.read, "follow": self.follow, "publish": self.publish}
        self._file("hub.tokens").write_text("".join(f"{r} {t}\n" for r, t in roles.items()))
        self._file("relay.tokens").write_text(f"follow {self.relay}\n")
        for name in ("sampler", "publish", "follow", "read", "relay"):
            self._file(name).write_text(f"{getattr(self, name)}\n")

    def file(self, name: str) -> str:
        """The path of one."""
        return str(self.folder / name)

    def _file(self, name: str) -> Path:
        path = self.folder / name
        path.touch(mode=0o600)
        return path


@dataclass
class Sampler:
    """One that serves the policy; a vLLM has its server and beside it `thinwire attach`."""

    name: str
    region: str
    kind: str
    record: Path
    endpoint: Endpoint
    slot: int
    processes: list[Process] = field(default_factory=list)
    is_killed: bool = False

    def kill(self) -> None:
        """As if its machine died."""
        self.is_killed = True
        for process in self.processes:
            process.kill()


@dataclass
class Site:
    """A region, with the addresses of what it can reach."""

    region: Region
    line: Line
    s3: tuple[str, int]
    hub_url: str
    relay: tuple[str, int]
    slots: list[tuple[int, int]]
    relay_process: Process | None = None

    @property
    def relay_url(self) -> str:
        """Its relay."""
        return f"http://{self.relay[0]}:{self.relay[1]}/{STREAM}"


class World:
    """All of it."""

    def __init__(
        self,
        settings: Settings,
        work: Path,
        place: Place,
        bucket: Bucket,
        ports: Ports,
        processes: Processes,
        secret: Secrets,
        trusted: str,
        model: Path,
    ) -> None:
        self.settings, self.work, self.place, self.bucket = settings, work, place, bucket
        self.processes, self.secret, self.trusted, self.model = processes, secret, trusted, model
        self._ports = ports
        self.url = f"s3://thinwire/{STREAM}"
        self.hub_port = ports.take()
        self.hub_url = f"http://{place.hub_host}:{self.hub_port}"
        self.samplers: list[Sampler] = []
        self.sites = {region.name: self._site(region) for region in settings.regions}
        (work / "records").mkdir()

    def start_hub(self) -> Process:
        """The hub, beside the bucket."""
        command = [*THINWIRE, "hub", f"--stream={STREAM}={self.url}", f"--trust={self.trusted}"]
        command += [f"--host={self.place.hub_host}", f"--port={self.hub_port}"]
        command += [f"--tokens={self.secret.file('hub.tokens')}"]
        return self.processes.start("hub", command, variables=self._home())

    def start_maintainer(self) -> Process:
        """Merges deltas, beside the bucket."""
        command = [*THINWIRE, "maintain", self.url, f"--work-dir={self.work / 'maintain'}"]
        command += ["--watch", "--every=3", f"--key={self.secret.file('key')}", "--json"]
        return self.processes.start("maintain", command, variables=self._home())

    def start_trainer(self) -> Process:
        """The trainer, in the hub's region."""
        settings = self.settings
        run = trainer.Run(
            url=self.url,
            key=self.secret.file("key"),
            model=str(self.model),
            files=str(self.work / "files"),
            folder=str(self.work / "trainer"),
            endpoints=str(self.endpoints_file),
            record=str(self.trainer_record),
            stop=str(self.stop_file),
            is_small=settings.is_small,
            steps=settings.steps,
            questions=settings.questions,
            group_size=settings.group_size,
            learning_rate=settings.learning_rate,
            step_s=settings.step_s,
            max_staleness=settings.max_staleness,
            pretrain_steps=settings.pretrain_steps,
            seed=settings.seed,
            hub=self.hub_url,
            hub_stream=STREAM,
        )
        (self.work / "files").mkdir()
        path = self.work / "trainer.json"
        path.write_text(json.dumps(asdict(run)))
        variables = {
            **self._home(),
            "REGIONS_SAMPLER_TOKEN": self.secret.sampler,
            "REGIONS_PUBLISH_TOKEN": self.secret.publish,
        }
        command = [sys.executable, str(HERE / "trainer.py"), str(path)]
        return self.processes.start("trainer", command, variables=variables)

    @property
    def endpoints_file(self) -> Path:
        """Where the trainer reads which samplers there are."""
        return self.work / "endpoints.json"

    @property
    def trainer_record(self) -> Path:
        """Where the trainer writes what it did."""
        return self.work / "records" / "trainer.jsonl"

    @property
    def stop_file(self) -> Path:
        """What the trainer ends by."""
        return self.work / "stop"

    def start_relay(self, region: str) -> None:
        """The region's relay."""
        site = self.sites[region]
        command = [*THINWIRE, "relay", f"--stream={STREAM}={self.url}", f"--trust={self.trusted}"]
        command += [f"--listen={site.relay[0]}:{site.relay[1]}"]
        command += [f"--tokens={self.secret.file('relay.tokens')}"]
        command += [f"--cache={self.work / f'relay-{region}'}"]
        command += [f"--limit-bytes={RELAY_LIMIT_BYTES}"]
        command += [*self._to_hub(site), f"--replica={region}-relay"]
        site.relay_process = self.processes.start(
            f"relay-{region}",
            self.place.inside(region, command),
            variables=self.bucket.variables(*site.s3),
        )

    def count(self, region: str) -> int:
        """How many samplers a region ever had."""
        return sum(sampler.region == region for sampler in self.samplers)

    def start_sampler(self, region: str, kind: str) -> Sampler:
        """One more sampler in a region: "serve", or a "vllm" that follows nothing yet."""
        site = self.sites[region]
        number = self.count(region)
        name = f"{region}-{number + 1}"
        port, far_port = site.slots[number]
        url = f"http://{self.place.far(region)}:{far_port}"
        sampler = Sampler(
            name,
            region,
            kind,
            self.work / "records" / f"{name}.jsonl",
            Endpoint(name, region, kind, url),
            number,
        )
        self.samplers.append(sampler)
        if kind == "vllm":
            self._start_vllm(sampler, site, port)
        else:
            self._start_serve(sampler, site, port)
        return sampler

    def attach(self, sampler: Sampler) -> None:
        """Have a vLLM follow the stream."""
        site = self.sites[sampler.region]
        engine = f"http://{self.place.host(sampler.region)}:{site.slots[sampler.slot][0]}"
        command = [sys.executable, str(HERE / "witness.py"), str(sampler.record), "attach"]
        command += ["--engine=vllm", f"--endpoint={engine}", f"--stream={self.url}", "--json"]
        command += ["--cache=reset", "--pause=keep", *self._following(sampler, site)]
        variables = {"THINWIRE_ENGINE_KEY": self.secret.sampler, "REGIONS_ENGINE": engine}
        self._start(sampler, site, sampler.name, command, variables)

    def _start_serve(self, sampler: Sampler, site: Site, port: int) -> None:
        command = [sys.executable, str(HERE / "witness.py"), str(sampler.record), "serve"]
        command += [
            f"--follow={self.url}",
            f"--host={self.place.host(sampler.region)}",
        ]
        command += [f"--port={port}", f"--token-file={self.secret.file('sampler')}"]
        command += ["--name=policy", "--dtype=bfloat16", "--timeout=300", "--json"]
        command += self._following(sampler, site)
        self._start(sampler, site, sampler.name, command, {})

    def _start_vllm(self, sampler: Sampler, site: Site, port: int) -> None:
        host = self.place.host(sampler.region)
        command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--model={self.model}", "--served-model-name=policy", f"--host={host}"]
        command += [f"--port={port}", f"--api-key={self.secret.sampler}", "--dtype=bfloat16"]
        command += ["--max-model-len=256", "--max-num-seqs=8", "--enforce-eager"]
        command += ["--num-gpu-blocks-override=256", "--distributed-executor-backend=uni"]
        command += ["--generation-config=vllm", "--worker-extension-cls=canonical.CanonicalDigest"]
        command += ["--weight-transfer-config", json.dumps({"backend": "thinwire"})]
        self._start(sampler, site, f"{sampler.name}-vllm", command, _VLLM_VARIABLES)

    def _following(self, sampler: Sampler, site: Site) -> list[str]:
        return [
            f"--folder={self.work / 'samplers' / sampler.name}",
            f"--trust={self.trusted}",
            f"--poll={self.settings.poll_s}",
            f"--relay={site.relay_url}",
            *self._to_hub(site),
            f"--replica={sampler.name}",
        ]

    def _to_hub(self, site: Site) -> list[str]:
        return [
            f"--hub={site.hub_url}",
            f"--hub-token-file={self.secret.file('follow')}",
            f"--region={site.region.name}",
        ]

    def _start(
        self,
        sampler: Sampler,
        site: Site,
        name: str,
        command: list[str],
        variables: Mapping[str, str],
    ) -> None:
        more = {
            **self.bucket.variables(*site.s3),
            "THINWIRE_HTTP_TOKEN_FILE": self.secret.file("relay"),
            **variables,
        }
        inside = self.place.inside(sampler.region, command)
        sampler.processes.append(self.processes.start(name, inside, variables=more))

    def _home(self) -> dict[str, str]:
        """The environment in the hub's region."""
        return self.bucket.variables(self.bucket.host, self.bucket.port)

    def _site(self, region: Region) -> Site:
        """Lay the region's link: the bucket and the hub from there, its samplers from here."""
        near, far = self.place.near(region.name), self.place.far(region.name)
        host, take = self.place.host(region.name), self._ports.take
        s3, hub = (near, take()), (near, take())
        slots = [(take(), take()) for _ in range(SLOTS)]
        routes = [
            Route("s3", s3, (self.bucket.host, self.bucket.port)),
            Route("hub", hub, (self.place.hub_host, self.hub_port)),
        ]
        routes += [
            Route(f"sampler-{number + 1}", (far, far_port), (host, port))
            for number, (port, far_port) in enumerate(slots)
        ]
        line = lay(self.place, region, routes, self.processes)
        return Site(region, line, s3, f"http://{hub[0]}:{hub[1]}", (host, take()), slots)
