"""The namespaces of examples/regions: shaped, apart, and gone afterwards, however a run ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
MAKE = """
import os, sys
import network
from network import Namespaces, Region
regions = [Region("near", 0.01, 200e6), Region("far", 0.1, 50e6)]
"""


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKE + textwrap.dedent(code)],
        cwd=ROOT / "examples" / "regions",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def namespaces() -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in shown.stdout.splitlines()]


def of(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"thinwire-regions-{pid}-")]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # Dead, but for somebody who asks how it ended.
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture(scope="module", autouse=True)
def permitted() -> None:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("NOT RUN: there is no iproute2 (Debian: iproute2)")
    name = f"thinwire-regions-test-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("NOT RUN: network namespaces are not permitted here")
    subprocess.run(["ip", "netns", "delete", name], check=True)


def test_regions_are_shaped_and_reach_the_router_alone() -> None:
    done = python("""
        place = Namespaces(regions)
        try:
            name = place._name("far")
            assert "rate 50Mbit" in network.call(["tc", "-n", name, "qdisc", "show"])
            near = place._name("near")
            assert "rate 200Mbit" in network.call(["tc", "-n", near, "qdisc", "show"])
            # Its own side of the cable, and no way on to the hub.
            assert "10.77.2.0/30" in network.ip("-n", name, "route")
            assert "default" not in network.ip("-n", name, "route")
            try:
                network.ip("-n", name, "route", "get", place.hub_host)
            except network.Failed as error:
                assert "unreachable" in str(error)
            else:
                raise AssertionError("the hub can be reached past the link")
            # This process is in the hub's namespace now.
            assert place.hub_host in network.ip("address")
            assert all(isinstance(count, int) for count in place.crossed_bytes("far"))
        finally:
            place.close()
        print("done")
    """)
    assert done.communicate(timeout=TIMEOUT_S)[0] == "done\n"
    assert not of(done.pid)


def test_two_runs_do_not_meet_and_what_a_killed_one_left_goes_with_the_next() -> None:
    code = """
        import subprocess
        place = Namespaces(regions)
        inside = place.inside("near", ["sleep", "1000"])
        sleeper = subprocess.Popen(inside, stdout=subprocess.DEVNULL)
        print(sleeper.pid, flush=True)
        sys.stdin.readline()
        sleeper.kill()
        sleeper.wait()
        place.close()
    """
    killed, other = python(code), python(code)
    assert killed.stdout is not None
    assert other.stdout is not None
    sleeper = int(killed.stdout.readline())
    other.stdout.readline()
    assert len(of(killed.pid)) == len(of(other.pid)) == 4
    killed.kill()
    killed.wait()
    assert len(of(killed.pid)) == 4

    third = python("Namespaces(regions).close()\nprint('done')")
    assert third.communicate(timeout=TIMEOUT_S)[0] == "done\n"
    assert not of(killed.pid)
    assert len(of(other.pid)) == 4
    # What ran in them is gone as well.
    assert not is_running(sleeper)
    other.communicate("\n", timeout=TIMEOUT_S)
    assert not of(other.pid)


def test_where_they_are_not_permitted_it_says_so_and_goes_on() -> None:
    done = python("""
        os.environ["PATH"] = "/nowhere"
        place, made = network.build(regions)
        assert not place.is_real and place.crossed_bytes("far") is None
        assert place.inside("far", ["true"]) == ["true"]
        print(made)
    """)
    assert "NO NAMESPACES (there is no `ip`" in done.communicate(timeout=TIMEOUT_S)[0]
