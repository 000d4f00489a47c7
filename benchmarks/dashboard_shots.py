"""The dashboard's screenshots in docs/: a real hub, a real stream, 1000 simulated replicas.

    python benchmarks/dashboard_shots.py [--out docs] [--replicas 1000] [--versions 48]

A model of random bits is published version by version into a folder; a hub watches it; replicas of
four regions post the heartbeats that real ones would, some of them behind, joining, failing or
silent. Then one region falls silent. Headless Chromium takes the pictures. Prints how long the page
took to show a commit. Wants playwright, pillow and a Chromium.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ml_dtypes
import msgspec
import numpy as np
from PIL import Image

from thinwire.publish import Publisher
from thinwire.report.messages import Fault, Heartbeat, UpdateNote

STREAM = "grpo-7"
# Shares of the fleet; the last region has no relay.
REGIONS = {"ap-south": 0.22, "eu-central": 0.3, "us-east": 0.4, "sa-east": 0.08}
LOST_REGION = "ap-south"
WORDS = 8 << 20
JSON = {"Content-Type": "application/json"}
POSTERS = 8
# The hub asks a fleet of 1000 for a heartbeat every 5 s each; it learns how many there are first.
ROUND_S = 2.0
SETTLING_ROUNDS = 2
COLOURS = 160
MAX_SHOT_BYTES = 150_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


class Trainer:
    """Publishes a model whose weights move less and less."""

    def __init__(self, folder: Path) -> None:
        self.url = (folder / STREAM).as_uri()
        self._random = np.random.default_rng(7)
        self._weights = self._random.normal(0, 0.02, WORDS).astype(ml_dtypes.bfloat16)
        self._publisher = Publisher(self.url, folder / "trainer", maintain=False)
        self.version = 0
        self.lineage = ""

    def publish(self) -> None:
        if self.version:
            changed = 0.02 / (1 + self.version / 30) * self._random.uniform(0.6, 1.6)
            places = self._random.integers(0, WORDS, int(changed * WORDS))
            self._weights = self._weights.copy()
            self._weights.view(np.uint16)[places] ^= 1
        self.version += 1
        metadata = {"identity": f"policy-{self.version}"}
        published = self._publisher.publish(
            {"model.weight": self._weights}, step=self.version, metadata=metadata
        )
        self.lineage = published.lineage

    def close(self) -> None:
        self._publisher.close()


@dataclass
class Fleet:
    """Simulated replicas: what each says is decided by its number, and by how far training is."""

    url: str
    lineage: str
    count: int
    head: int
    silent: str = ""
    rounds: int = 0

    def wait_for_rounds(self, count: int) -> None:
        """Until every replica has said that often where it is, by what is now."""
        # The round that runs may have begun before.
        until = self.rounds + count + 1
        while self.rounds < until:
            time.sleep(0.05)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """One heartbeat after the other, as many replicas would, in the background."""
        is_over = threading.Event()
        with ThreadPoolExecutor(POSTERS + 1) as pool:
            done = pool.submit(self._report, pool, is_over)
            try:
                yield
            finally:
                is_over.set()
                done.result()

    def _report(self, pool: ThreadPoolExecutor, is_over: threading.Event) -> None:
        while not is_over.wait(ROUND_S if self.rounds > SETTLING_ROUNDS else 0):
            beats = [beat for beat in self._beats(self.head) if beat.region != self.silent]
            list(pool.map(self._post, (beats[start::POSTERS] for start in range(POSTERS))))
            self.rounds += 1

    def _post(self, beats: list[Heartbeat]) -> None:
        address = urlsplit(self.url)
        line = http.client.HTTPConnection(address.hostname or "", address.port)
        for beat in beats:
            path = f"/v1/streams/{STREAM}/heartbeats"
            line.request("POST", path, msgspec.json.encode(beat), JSON)
            answer = line.getresponse()
            answer.read()
            if answer.status != 200:
                sys.exit(f"the hub answered {answer.status} to a heartbeat")
        line.close()

    def _beats(self, head: int) -> Iterator[Heartbeat]:
        for region, share in REGIONS.items():
            count = max(1, round(share * self.count))
            for place in range(count):
                yield self._beat(f"{region}-{place:03d}", region, head)
            if region != "sa-east":
                yield Heartbeat(
                    f"relay-{region}", kind="relay", region=region, is_ready=True,
                    fetched_bytes=head * 700_000, served_bytes=head * 690_000 * count,
                )  # fmt: skip

    def _beat(self, name: str, region: str, head: int) -> Heartbeat:
        # The same for each call: a replica is as slow as it is.
        dice = random.Random(f"{name} {head // 4}")
        luck = dice.random()
        lag = 0 if luck < 0.78 else 1 if luck < 0.92 else min(9, 1 + int(dice.expovariate(0.8)))
        now_ms = int(1000 * time.time())
        version = max(1, head - lag)
        more: dict[str, Any] = {}
        if lag or luck < 0.04:
            total = dice.randint(400_000, 900_000)
            phase = dice.choice(("fetch", "fetch", "apply", "update"))
            more = {"phase": phase, "target": head, "total_bytes": total, "phase_s": luck * 5}
            more["done_bytes"] = int(total * dice.random())
        serves = {"lineage": self.lineage, "version": version, "step": version, "is_ready": True}
        if luck < 0.012:
            serves = {}
        if dice.random() < 0.015:
            code, message = dice.choice(
                (
                    ("unavailable", "GET head.json: no answer within 10 s, after 4 tries"),
                    ("digest-mismatch", "model.weight, chunk 3: the digest is another"),
                    ("engine-failed", "POST /resume: the engine answered 500"),
                )
            )
            more["fault"] = Fault(code, message, now_ms - dice.randint(2_000, 400_000))
        note = self._update(dice, version, now_ms)
        return Heartbeat(
            name, region=region, engine=dice.choice(("vllm", "vllm", "sglang")),
            fetched_bytes=head * 690_000, update_count=head, pause_s=note.pause_s,
            updates=[note] if serves else [], **serves, **more,
        )  # fmt: skip

    def _update(self, dice: random.Random, version: int, now_ms: int) -> UpdateNote:
        pause_s, attach_s = dice.uniform(0.02, 0.2), dice.uniform(0.1, 0.5)
        phases = {
            "fetch": dice.lognormvariate(-0.3, 0.6),
            "stage": dice.uniform(0.2, 0.9),
            "meet": dice.uniform(0.01, 0.3),
            "pause": pause_s,
            "attach": attach_s,
            "resume": 0.02,
            "prove": dice.uniform(0.1, 0.6),
        }
        return UpdateNote(
            version, now_ms - dice.randint(0, 9_000), phases, fetched_bytes=690_000,
            pause_s=pause_s + attach_s + 0.02, age_s=sum(phases.values()) + 0.4,
            is_ok=dice.random() > 0.01,
        )  # fmt: skip


@contextmanager
def hub_of(stream_url: str) -> Iterator[str]:
    """The URL of a hub that watches the stream."""
    command = [sys.executable, "-m", "thinwire", "hub", "--stream", stream_url, "--port", "0"]
    command += ["--poll", "0.2", "--json", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield str(json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder whose name may be seen in a picture."""
    folder = Path(tempfile.gettempdir()) / "weights"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def window(browser: Any, url: str, width: int, height: int, scheme: str) -> Iterator[Any]:
    """The page in a window, once it has drawn itself."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#page[data-shown]")
    page.wait_for_selector("#line[data-line=live]")
    page.wait_for_timeout(1500)
    yield page
    context.close()


def save(shot: bytes, path: Path) -> None:
    """Write a picture with fewer colours: a page of few needs no more."""
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {picture.width} x {picture.height}, {size} bytes", flush=True)
    if size > MAX_SHOT_BYTES:
        sys.exit(f"{path} is larger than {MAX_SHOT_BYTES} bytes")


def take(browser: Any, url: str, trainer: Trainer, fleet: Fleet, out: Path) -> None:
    """All pictures."""
    fleet.wait_for_rounds(SETTLING_ROUNDS)
    with window(browser, url, 1440, 900, "light") as page:
        save(page.screenshot(full_page=True), out / "dashboard-light.png")
        start_s = time.perf_counter()
        trainer.publish()
        committed_s = time.perf_counter()
        page.wait_for_function(f"() => document.title.startsWith('v{trainer.version} ')")
        shown_s = time.perf_counter()
        print(f"published in {committed_s - start_s:.2f} s, shown {shown_s - committed_s:.2f} s on")
    fleet.head = trainer.version
    fleet.wait_for_rounds(1)
    with window(browser, url, 1440, 900, "dark") as page:
        page.focus("button.cell[data-look=b4]")
        save(page.screenshot(full_page=True), out / "dashboard-dark.png")
    with window(browser, url, 360, 740, "light") as page:
        clip = {"x": 0, "y": 0, "width": 360, "height": 1720}
        save(page.screenshot(full_page=True, clip=clip), out / "dashboard-phone.png")
    lose(browser, url, trainer, fleet, out)


def lose(browser: Any, url: str, trainer: Trainer, fleet: Fleet, out: Path) -> None:
    """One region says nothing more, while training goes on."""
    with window(browser, url, 1440, 900, "light") as page:
        fleet.silent = LOST_REGION
        while not page.is_visible(f"[data-region={LOST_REGION}] .gone"):
            trainer.publish()
            fleet.head = trainer.version
            page.wait_for_timeout(4000)
        fleet.wait_for_rounds(1)
        page.wait_for_timeout(1500)
        save(page.locator("#fleet").screenshot(), out / "dashboard-lost-region.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="The dashboard's screenshots.")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=48)
    arguments = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no chromium: apt install chromium")
    from playwright.sync_api import sync_playwright

    with work_folder() as folder, sync_playwright() as driver:
        trainer = Trainer(folder)
        for _ in range(arguments.versions):
            trainer.publish()
        with hub_of(trainer.url) as url:
            fleet = Fleet(url, trainer.lineage, arguments.replicas, trainer.version)
            browser = driver.chromium.launch(executable_path=program, args=FLAGS)
            with fleet.reporting():
                take(browser, url, trainer, fleet, arguments.out)
            browser.close()
        trainer.close()


if __name__ == "__main__":
    main()
