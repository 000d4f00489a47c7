"""Regions on one machine: network namespaces, or, where those are not permitted, loopback.

```
hub namespace          router namespace                   a region's namespace
 10.77.0.2  --------  10.77.0.1 | links.py | 10.77.R.1  ========  10.77.R.2
                                  delay, cut             tbf 200 Mbit/s both ways
```

The router forwards no packets: a region reaches the hub's services, and the hub a region's
samplers, through the ports that links.py listens on, and in no other way.

This process moves into the hub's namespace; what it starts is there, too, unless it says where.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from programs import Failed, Process, Processes

LINKS = Path(__file__).with_name("links.py")
PREFIX = "thinwire-regions"
FIRST_PORT = 21_000
CLONE_NEWNET = 0x40000000
TBF_BURST = "128kb"
TBF_LATENCY = "100ms"
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Region:
    """A region and its link to the hub.

    Attributes:
        name: For people, and for the hub.
        round_trip_s: There and back.
        bits_per_s: Each way.
    """

    name: str
    round_trip_s: float
    bits_per_s: float


@dataclass(frozen=True)
class Route:
    """A port on one side of a link, and the service on the other side."""

    name: str
    listen: tuple[str, int]
    to: tuple[str, int]


class Place(Protocol):
    """How regions are told apart: by namespaces, or only by their links."""

    is_real: bool
    hub_host: str

    def host(self, region: str) -> str:
        """Where a region's services listen."""
        ...

    def near(self, region: str) -> str:
        """Where a region finds what the hub has."""
        ...

    def far(self, region: str) -> str:
        """Where the hub finds what a region has."""
        ...

    def inside(self, region: str, command: Sequence[str]) -> list[str]:
        """The command, run in that region."""
        ...

    def carrying(self, command: Sequence[str]) -> list[str]:
        """The command, run between the regions."""
        ...

    def crossed_bytes(self, region: str) -> tuple[int, int] | None:
        """By the kernel's counters: into the region, and out of it."""
        ...

    def close(self) -> None:
        """Leave nothing."""
        ...


class Namespaces:
    """Three regions, a hub and a router, each in a network namespace of its own.

    Raises:
        Failed: Namespaces are not permitted here, or a tool is missing; says what.
    """

    is_real = True
    hub_host = "10.77.0.2"

    def __init__(self, regions: Sequence[Region]) -> None:
        remove_stale()
        self._run = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"
        self._numbers = {region.name: 1 + at for at, region in enumerate(regions)}
        self._names = [self._name(end) for end in ("router", "hub", *self._numbers)]
        try:
            for name in self._names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            self._join("hub", 0, None)
            for region in regions:
                self._join(region.name, self._numbers[region.name], region.bits_per_s)
            self._enter(self._name("hub"))
        except BaseException:
            self.close()
            raise

    def host(self, region: str) -> str:
        """See `Place.host`."""
        return f"10.77.{self._numbers[region]}.2"

    def near(self, region: str) -> str:
        """See `Place.near`."""
        return f"10.77.{self._numbers[region]}.1"

    def far(self, region: str) -> str:
        """See `Place.far`."""
        return "10.77.0.1"

    def inside(self, region: str, command: Sequence[str]) -> list[str]:
        """See `Place.inside`."""
        return ["ip", "netns", "exec", self._name(region), *command]

    def carrying(self, command: Sequence[str]) -> list[str]:
        """See `Place.carrying`."""
        return ["ip", "netns", "exec", self._name("router"), *command]

    def crossed_bytes(self, region: str) -> tuple[int, int] | None:
        """See `Place.crossed_bytes`."""
        shown = ip("-n", self._name(region), "-s", "-j", "link", "show", "dev", "uplink")
        counters: dict[str, Any] = json.loads(shown)[0]["stats64"]
        return counters["rx"]["bytes"], counters["tx"]["bytes"]

    def close(self) -> None:
        """See `Place.close`."""
        for name in self._names:
            remove(name)

    def _name(self, end: str) -> str:
        return f"{self._run}-{end}"

    def _join(self, end: str, number: int, bits_per_s: float | None) -> None:
        """A cable from the router to a namespace; the names at its ends are theirs alone."""
        router, name, cable = self._name("router"), self._name(end), f"to-{number}"
        ip(
            "link",
            "add",
            cable,
            "netns",
            router,
            "type",
            "veth",
            "peer",
            "name",
            "uplink",
            "netns",
            name,
        )
        for where, device, host in ((router, cable, 1), (name, "uplink", 2)):
            ip("-n", where, "address", "add", f"10.77.{number}.{host}/30", "dev", device)
            ip("-n", where, "link", "set", device, "up")
            if bits_per_s is not None:
                shape = ["rate", f"{bits_per_s:.0f}bit", "burst", TBF_BURST, "latency", TBF_LATENCY]
                call(["tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *shape])

    def _enter(self, name: str) -> None:
        with Path("/run/netns", name).open("rb") as namespace:
            if _LIBC.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise Failed(f"cannot enter {name}: {os.strerror(ctypes.get_errno())}")


class Loopback:
    """All regions on 127.0.0.1: links.py has the delay, the rate and the only counters."""

    is_real = False
    hub_host = "127.0.0.1"

    def host(self, region: str) -> str:
        """See `Place.host`."""
        return self.hub_host

    near = far = host

    def inside(self, region: str, command: Sequence[str]) -> list[str]:
        """See `Place.inside`."""
        return list(command)

    def carrying(self, command: Sequence[str]) -> list[str]:
        """See `Place.carrying`."""
        return list(command)

    def crossed_bytes(self, region: str) -> tuple[int, int] | None:
        """See `Place.crossed_bytes`."""
        return None

    def close(self) -> None:
        """See `Place.close`."""


@dataclass
class Line:
    """A region's link, as links.py carries it."""

    region: Region
    process: Process
    cut_count: int = field(default=0)

    def cut(self) -> None:
        """From now on nothing arrives."""
        self.cut_count += 1
        self._ask("cut")

    def restore(self) -> None:
        """It works again."""
        self._ask("restore")

    def counts(self) -> dict[str, dict[str, int]]:
        """Payload bytes by route: "up" is from its listening side, "down" the answers."""
        return self._ask("count")

    def _ask(self, what: str) -> dict[str, dict[str, int]]:
        handle = self.process.handle
        assert handle.stdin is not None
        print(json.dumps({"do": what}), file=handle.stdin, flush=True)
        return self.read()

    def read(self) -> dict[str, dict[str, int]]:
        """Its answer."""
        assert self.process.handle.stdout is not None
        line = self.process.handle.stdout.readline()
        if not line:
            raise Failed(f"{self.process.name} ended:\n{self.process.tail()}")
        answer: dict[str, dict[str, int]] = json.loads(line)
        return answer


def build(regions: Sequence[Region], *, is_loopback: bool = False) -> tuple[Place, str]:
    """Make the regions; says in words what was made."""
    if not is_loopback:
        try:
            return Namespaces(regions), "network namespaces, links shaped by tbf"
        except (Failed, OSError) as error:
            reason = str(error).splitlines()[0]
    else:
        reason = "asked for"
    return Loopback(), f"loopback, links paced by links.py; NO NAMESPACES ({reason})"


def lay(place: Place, region: Region, routes: Sequence[Route], processes: Processes) -> Line:
    """Start the link of a region."""
    settings = {
        "delay_s": region.round_trip_s / 2,
        "bits_per_s": None if place.is_real else region.bits_per_s,
        "routes": [{"name": r.name, "listen": r.listen, "to": r.to} for r in routes],
    }
    command = place.carrying([sys.executable, str(LINKS), json.dumps(settings)])
    line = Line(region, processes.start(f"link-{region.name}", command, is_talking=True))
    line.read()
    return line


class Ports:
    """Port numbers, each given once; on loopback only such as are free."""

    def __init__(self) -> None:
        self._next = FIRST_PORT + os.getpid() % 500 * 20

    def take(self) -> int:
        """One more."""
        while True:
            port, self._next = self._next, self._next + 1
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    return port


def remove_stale() -> None:
    """Remove the namespaces of runs that were killed."""
    if shutil.which("ip") is None:
        raise Failed("there is no `ip` (Debian: iproute2)")
    for name in re.findall(rf"^{PREFIX}-\d+-\d+-\S+", ip("netns", "list"), re.MULTILINE):
        pid, started = name.removeprefix(f"{PREFIX}-").split("-")[:2]
        if _started(int(pid)) != int(started):
            remove(name)


def remove(name: str) -> None:
    """Remove a namespace and whatever still runs in it, but for this process."""
    with suppress(Failed):
        for pid in map(int, ip("netns", "pids", name).split()):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ip("netns", "delete", name)


def ip(*arguments: str) -> str:
    """Debian's iproute2."""
    return call(["ip", *arguments])


def call(command: Sequence[str]) -> str:
    """Run a command; returns what it printed.

    Raises:
        Failed: It failed; says how.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise Failed(f"there is no `{command[0]}`") from error
    if done.returncode != 0:
        raise Failed(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _started(pid: int) -> int:
    """When a process began, in clock ticks since boot: with its number, who it is. 0: none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
