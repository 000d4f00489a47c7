"""What the dashboard looks like and withstands, on a hub that says what no real one would."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from thinwire.report.messages import (
    Counts,
    Fault,
    Heartbeat,
    RegionStatus,
    ReplicaStatus,
    StreamStatus,
    UpdateNote,
    VersionNote,
)

from .made_up_hub import MadeUpHub
from .serving import served
from .viewing import Viewer

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"
COLOURS = """() => {
  const style = getComputedStyle(document.body);
  const probe = document.body.appendChild(document.createElement("i"));
  const resolved = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number);
  };
  const found = Object.fromEntries(NAMES.map((name) => [name, resolved(name)]));
  probe.remove();
  return found;
}"""
# Charts are drawn for a new width in the frame after it.
DRAWN_ANEW = "() => new Promise((is) => requestAnimationFrame(() => requestAnimationFrame(is)))"
TEXT_ON = {
    "ink": ["paper", "panel", "raised"],
    "muted": ["paper", "panel", "raised"],
    "accent": ["paper", "panel"],
    "alarm": ["panel", "raised", "alarm-soft"],
    "warn": ["warn-soft"],
    "panel": ["ink"],
    "paper": ["accent"],
    "p-ink": ["p-fetch", "p-apply", "p-attach", "p-meet", "p-prove", "p-other", "p-pause"],
    **{f"b{place}-ink": [f"b{place}"] for place in range(5)},
}
AA = 4.5


def note(version: int, **more: Any) -> VersionNote:
    now_ms = int(1000 * time.time())
    fields = {"lineage": "ab" * 16, "step": version, "kind": "delta", "identity": "", **more}
    return VersionNote(
        version=version, created_ms=now_ms, payload_bytes=10_000, raw_bytes=10**6,
        changed_count=10_000, word_count=500_000, **fields,
    )  # fmt: skip


def status(name: str, steps: int | None = 0, state: Any = "ready", **more: Any) -> ReplicaStatus:
    return ReplicaStatus(Heartbeat(name, version=9, **more), state, steps, 0.0, 1.0)


def hub_of(replicas: list[ReplicaStatus], head: VersionNote, **more: Any) -> MadeUpHub:
    names = sorted({one.beat.region for one in replicas})
    regions = [RegionStatus(name, Counts(ready=1), 0, 0, 1, 2, 3.0, 4, 5) for name in names]
    about = StreamStatus("run", "s3://b/run", "", head, 0.1, None, Counts(), regions, 10**4, 10**6)
    return MadeUpHub(msgspec.structs.replace(about, **more), [head], replicas)


def test_whatever_anybody_is_called_stays_text(viewer: Viewer) -> None:
    fault = Fault(HOSTILE, HOSTILE, 1)
    one = status(HOSTILE, region=HOSTILE, engine=HOSTILE, fault=fault, phase=HOSTILE)
    relay = status(f"relay {HOSTILE}", region=HOSTILE, kind="relay")
    head = note(9, kind=HOSTILE, identity=HOSTILE, lineage=HOSTILE)
    about = {"name": HOSTILE.replace("/", ""), "url": HOSTILE, "model": HOSTILE, "fault": fault}
    hub = hub_of([one, relay], head, **about)
    phases = {HOSTILE: 1.0, "__proto__": 1.0, "constructor": 1.0}
    hub.updates = [UpdateNote(9, 1, phases=phases, replica=HOSTILE, region=HOSTILE, pause_s=0.5)]
    with served(hub.app()) as url:
        page = viewer.open(url)
        page.hover("button.cell")
        page.focus("#versions-chart")
        assert HOSTILE in viewer.text("#tip")
        assert viewer.text("#stream-name") == about["name"]
        for place in ("#model", "#regions", "#updates", "#errors", "#list-rows"):
            assert HOSTILE in viewer.text(place)
        assert page.locator("img").count() == 1
        assert page.locator("script").count() == 2


def test_a_thousand_replicas_are_kept_up_with(viewer: Viewer) -> None:
    replicas = [
        status(f"host-{place:04d}", 0, region=f"region-{place % 4}") for place in range(1000)
    ]
    hub = hub_of(replicas, note(9))
    with served(hub.app()) as url:
        page = viewer.open(url)
        assert page.locator("button.cell").count() == 1000
        page.evaluate(
            """() => {
              window.first = document.querySelector("button.cell");
              window.touched = new Set();
              new MutationObserver((all) => all.forEach((one) => {
                const cell = (one.target.closest ? one.target : one.target.parentElement)
                  .closest("button.cell");
                if (cell) window.touched.add(cell.dataset.replica);
              })).observe(document.getElementById("regions"),
                { subtree: true, childList: true, attributes: true, characterData: true });
            }"""
        )
        hub.replicas = [*replicas[:500], status("host-0500", 3, region="region-0"), *replicas[501:]]
        page.wait_for_selector("button.cell[data-look=b3]")
        # Only what changed was drawn anew, and the others are the elements that they were.
        assert page.evaluate("[...window.touched]") == ["host-0500"]
        assert page.evaluate("window.first === document.querySelector('button.cell')") is True
        page.fill("#list-text", "host-0999")
        viewer.wait_for("#list-note", "1 of 1000")
        assert page.locator("#list-rows tr").count() == 1


def test_the_list_sorts_and_filters(viewer: Viewer) -> None:
    replicas = [
        status("a", 3, region="eu"),
        status("b", 0, region="us", state="lost"),
        status("c", 1, region="us"),
    ]
    with served(hub_of(replicas, note(9)).app()) as url:
        page = viewer.open(url)
        names = "#list-rows th"
        assert page.locator(names).all_inner_texts() == ["a", "c", "b"]
        page.focus("[data-column=replica]")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        assert page.locator(names).all_inner_texts() == ["c", "b", "a"]
        assert page.get_attribute("#list-head th", "aria-sort") == "descending"
        page.select_option("#list-region", "=us")
        assert page.locator(names).all_inner_texts() == ["c", "b"]
        page.select_option("#list-state", "lost")
        assert page.locator(names).all_inner_texts() == ["b"]


def test_cells_are_walked_by_arrow_keys(viewer: Viewer) -> None:
    replicas = [status(f"r{place}", place, region="eu") for place in range(5)]
    with served(hub_of(replicas, note(9)).app()) as url:
        page = viewer.open(url)
        assert page.locator("button.cell[tabindex='0']").count() == 1
        page.focus("button.cell[tabindex='0']")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.replica") == "r2"
        assert "2 steps" in viewer.text("#tip")
        # The chart draws itself anew, and leaves the details of the cell alone.
        page.evaluate(
            """() => {
              window.hidden = 0;
              const tip = document.getElementById("tip");
              new MutationObserver(() => { window.hidden += tip.hidden ? 1 : 0; })
                .observe(tip, { attributes: true });
              window.before = document.getElementById("versions-chart").firstChild;
            }"""
        )
        page.set_viewport_size({"width": 1300, "height": 900})
        viewer.wait_until("!window.before.isConnected")
        assert page.evaluate("window.hidden") == 0
        page.keyboard.press("End")
        assert page.evaluate("document.activeElement.dataset.replica") == "r4"
        page.keyboard.press("Enter")
        viewer.wait_for("#list-note", "1 of 5")


def test_a_lost_region_and_an_unreadable_bucket_are_said(viewer: Viewer) -> None:
    replicas = [status("a", 0, region="eu", state="lost"), status("b", 0, region="us")]
    fault = Fault("Unavailable", "503 from the bucket", 1)
    with served(hub_of(replicas, note(9), fault=fault, looked_s=61.0).app()) as url:
        page = viewer.open(url)
        assert viewer.text("[data-region=eu] .gone").startswith("not heard of")
        assert not page.is_visible("[data-region=us] .gone")
        assert "cannot read the bucket (Unavailable): 503 from the bucket" in viewer.text(
            "#bucket-text"
        )


def test_text_can_be_read_in_both_colour_schemes(viewer: Viewer) -> None:
    names = sorted({*TEXT_ON, *(ground for grounds in TEXT_ON.values() for ground in grounds)})
    with served(hub_of([status("a", region="eu")], note(9)).app()) as url:
        page = viewer.open(url)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate(COLOURS.replace("NAMES", str(names)))
            is_dark = luminance(found["paper"]) < luminance(found["ink"])
            assert is_dark is (scheme == "dark")
            poor = {
                (text, ground): round(contrast(found[text], found[ground]), 2)
                for text, grounds in TEXT_ON.items()
                for ground in grounds
                if contrast(found[text], found[ground]) < AA
            }
            assert poor == {}


def test_the_switch_outdoes_the_system_and_is_remembered(viewer: Viewer) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with served(hub_of([], note(9)).app()) as url:
        viewer.page.emulate_media(color_scheme="light")
        page = viewer.open(url)
        light = page.evaluate(ground)
        page.click("#theme")
        assert page.evaluate(ground) == light
        page.click("#theme")
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        viewer.wait_until(f"{ground} === '{dark}'")


def test_nothing_is_wider_than_the_window(viewer: Viewer) -> None:
    long_name = "a" * 64
    fault = Fault("A" * 64, "m" * 500, 1)
    replicas = [
        status(long_name, 0, region="r" * 64, fault=fault, phase="fetch", phase_s=1e8),
        *(status(f"b{place}", 10**6, region="eu") for place in range(300)),
    ]
    hub = hub_of(replicas, note(10**12 - 1, identity="i" * 128))
    hub.updates = [UpdateNote(9, 1, phases={"p" * 64: 1e8}, replica=long_name, pause_s=1e8)]
    with served(hub.app()) as url:
        page = viewer.open(url)
        for width in (3840, 1440, 768, 360):
            page.set_viewport_size({"width": width, "height": 800})
            page.evaluate(DRAWN_ANEW)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, width


def luminance(colour: list[float]) -> float:
    """As WCAG 2 defines it."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (one / 255 for one in colour[:3])
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
