"""The report's pictures, as SVG: staleness over time, bytes a step, reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from records import Age

INK, MUTED, GRID = "#24292f", "#57606a", "#d8dee4"
BLUE, GREY, AMBER, RED, PALE = "#1f6feb", "#afb8c1", "#bf8700", "#cf222e", "#fff1e5"
LEFT, RIGHT, TOP, WIDTH = 120, 24, 66, 820
ROW_HEIGHT, ROW_GAP = 46, 12


@dataclass
class Drawing:
    """Shapes in pixels, written as SVG."""

    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, **options: str | float) -> None:
        """A line of words; (x, y) is where its base line begins, or as `anchor` says."""
        size, colour = options.get("size", 12), options.get("colour", INK)
        anchor, weight = options.get("anchor", "start"), options.get("weight", "normal")
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle."""
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.0) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        )

    def svg(self) -> str:
        """The file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            'font-family="system-ui, sans-serif">\n'
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )


@dataclass(frozen=True)
class Lane:
    """A sampler's row: how old what it served was, and when it was cut off."""

    name: str
    ages: Sequence[Age]
    cut: tuple[float, float] | None = None


def draw_staleness(
    lanes: Sequence[Lane], events: Sequence[tuple[float, str]], start_s: float, stop_s: float
) -> str:
    """A row for each sampler, its staleness in steps over time; moments of the plan as lines."""
    height = TOP + len(lanes) * (ROW_HEIGHT + ROW_GAP) + 40
    drawing = Drawing(WIDTH, height)
    scale = (WIDTH - LEFT - RIGHT) / (stop_s - start_s)
    drawing.text(
        16, 24, "How stale each sampler is, in the trainer's steps", size=15, weight="bold"
    )

    def x_of(at_s: float) -> float:
        return LEFT + (min(max(at_s, start_s), stop_s) - start_s) * scale

    bottom = TOP + len(lanes) * (ROW_HEIGHT + ROW_GAP) - ROW_GAP
    for number, lane in enumerate(lanes):
        _draw_lane(drawing, lane, TOP + number * (ROW_HEIGHT + ROW_GAP), x_of)
    for number, (at_s, words) in enumerate(events):
        x = x_of(at_s)
        drawing.line([(x, TOP - 4), (x, bottom)], MUTED, 0.8)
        # In two rows: moments may lie close together.
        drawing.text(x + 3, TOP - 8 - 13 * (number % 2), words, size=11, colour=MUTED)
    for tick_s in range(0, int(stop_s - start_s) + 1, nice_step(stop_s - start_s)):
        x = x_of(start_s + tick_s)
        drawing.line([(x, bottom), (x, bottom + 4)], MUTED)
        drawing.text(x, bottom + 18, f"{tick_s} s", size=11, colour=MUTED, anchor="middle")
    return drawing.svg()


def _draw_lane(drawing: Drawing, lane: Lane, top: float, x_of: Callable[[float], float]) -> None:
    worst = max([2, *(age.steps for age in lane.ages)])
    unit = ROW_HEIGHT / worst
    base = top + ROW_HEIGHT
    if lane.cut is not None:
        drawing.box(x_of(lane.cut[0]), top, x_of(lane.cut[1]) - x_of(lane.cut[0]), ROW_HEIGHT, PALE)
    drawing.line([(LEFT, base), (WIDTH - RIGHT, base)], GRID)
    for age in lane.ages:
        height = age.steps * unit
        x = x_of(age.start_s)
        colour = BLUE if age.steps <= 2 else AMBER
        drawing.box(x, base - max(height, 1.0), x_of(age.stop_s) - x, max(height, 1.0), colour)
    drawing.text(LEFT - 34, base - 4, lane.name, anchor="end")
    drawing.text(LEFT - 6, top + 10, str(worst), size=10, colour=MUTED, anchor="end")
    drawing.text(LEFT - 6, base, "0", size=10, colour=MUTED, anchor="end")


def draw_bytes(rows: Sequence[tuple[str, float, str]]) -> str:
    """Bars on a logarithmic scale: a name, bytes, a colour's word ("ours" or another)."""
    drawing = Drawing(WIDTH, TOP + 26 * len(rows) + 44)
    title = "What one step sends over a region's link (bytes, logarithmic)"
    drawing.text(16, 24, title, size=15, weight="bold")
    low = math.floor(math.log10(max(1.0, min(size for _, size, _ in rows))))
    high = math.ceil(math.log10(max(size for _, size, _ in rows)))
    left, right = 190, 110
    scale = (WIDTH - left - right) / max(1, high - low)
    bottom = TOP + 26 * len(rows)
    for power in range(low, high + 1):
        x = left + (power - low) * scale
        drawing.line([(x, TOP - 8), (x, bottom)], GRID)
        drawing.text(x, bottom + 16, sized(10.0**power), size=11, colour=MUTED, anchor="middle")
    for number, (name, size, kind) in enumerate(rows):
        y = TOP + 26 * number
        width = (math.log10(max(size, 1.0)) - low) * scale
        drawing.text(left - 8, y + 13, name, anchor="end")
        drawing.box(left, y, max(width, 1.0), 17, BLUE if kind == "ours" else GREY)
        drawing.text(left + max(width, 1.0) + 6, y + 13, sized(size), weight="bold")
    return drawing.svg()


def draw_rewards(rewards: Sequence[float]) -> str:
    """The mean reward of each batch, and a mean over five."""
    drawing = Drawing(WIDTH, 260)
    drawing.text(
        16, 24, "Mean reward of each batch (grey), and over five (blue)", size=15, weight="bold"
    )
    top, bottom, left = 46, 220, 60
    high = max(0.1, math.ceil(max(rewards) * 10) / 10)
    scale = (WIDTH - left - RIGHT) / max(1, len(rewards) - 1)

    def at(step: int, value: float) -> tuple[float, float]:
        return left + step * scale, bottom - value / high * (bottom - top)

    for tenth in range(0, round(high * 10) + 1, 1 if high <= 0.6 else 2):
        y = at(0, tenth / 10)[1]
        drawing.line([(left, y), (WIDTH - RIGHT, y)], GRID)
        drawing.text(left - 8, y + 4, f"{tenth / 10:.1f}", size=11, colour=MUTED, anchor="end")
    drawing.line([at(step, value) for step, value in enumerate(rewards)], GREY, 1.5)
    means = [
        sum(rewards[max(0, step - 4) : step + 1]) / len(rewards[max(0, step - 4) : step + 1])
        for step in range(len(rewards))
    ]
    drawing.line([at(step, value) for step, value in enumerate(means)], BLUE, 2.5)
    for step in range(0, len(rewards), 5):
        x = at(step, 0)[0]
        drawing.text(x, bottom + 18, str(step + 1), size=11, colour=MUTED, anchor="middle")
    drawing.text(WIDTH - RIGHT, bottom + 34, "step", size=11, colour=MUTED, anchor="end")
    return drawing.svg()


def nice_step(length_s: float) -> int:
    """Seconds between ticks: about eight of them."""
    return next(step for step in (5, 10, 20, 30, 60, 120, 300, 600, 3600) if length_s / step <= 9)


def sized(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1000
    raise AssertionError
