"""Line plots in the style of the bench's picture: laid out as shapes, written as SVG.

`thinwire.bench.plot` draws rectangles and texts; lines are added here. The paper is white in the
file itself, so that the plot reads the same on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thinwire.bench.plot import Label, Picture, Rectangle, to_svg

WIDTH = 640
PLOT_LEFT, PLOT_RIGHT = 58, 22
PLOT_TOP, PLOT_HEIGHT = 66, 220
AXIS_ROOM = 44
LEGEND_ROW = 17
MARKER = 5

PAPER, INK, MUTED_INK, GRID = "#ffffff", "#24292f", "#57606a", "#e4e8ec"
# Dark enough on white for thin lines, and told apart by brightness too.
COLOURS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#57606a", "#0a3069")

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line and what it is called."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis (base 10 or 2 makes no difference), or a plain one; ticks are marked."""

    title: str
    ticks: Sequence[float]
    write: Callable[[float], str] = "{:g}".format
    is_log: bool = True

    def place(self, value: float, low: float, high: float) -> float:
        """0 at ``low``, 1 at ``high``."""
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)


_SUPERSCRIPTS = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


def power_of_two(exponent: float) -> str:
    """The text of a tick at 2^exponent."""
    return "2" + f"{exponent:g}".translate(_SUPERSCRIPTS)


@dataclass(frozen=True)
class Panel:
    """Lines over two axes, with the names below. ``x_range``: where no tick is at the ends."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    x_range: tuple[float, float] | None = None


def decades(values: Iterable[float]) -> list[float]:
    """The powers of ten that hold all values above 0 between them."""
    kept = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(kept))), math.ceil(math.log10(max(kept)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def heights(series: Sequence[Series]) -> list[float]:
    """What lines reach up to, all points of all of them."""
    return [y for line in series for _, y in line.points]


def draw(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """The SVG text of one or two panels side by side."""
    rows = max(len(panel.series) for panel in panels)
    height = PLOT_TOP + 22 + PLOT_HEIGHT + AXIS_ROOM + LEGEND_ROW * rows + 10
    shapes: list[Rectangle | Label] = [
        Rectangle(0, 0, WIDTH, height, PAPER),
        Label(16, 22, title, 15, INK, is_bold=True),
        Label(16, 43, subtitle, 12, MUTED_INK),
    ]
    lines: list[str] = []
    width = WIDTH // len(panels)
    for index, panel in enumerate(panels):
        more, drawn = _lay_out(panel, index * width, width)
        shapes += more
        lines += drawn
    # Lines come last, so that they lie on the grid.
    frame = to_svg(Picture(WIDTH, height, tuple(shapes))).removesuffix("</svg>\n")
    return frame + "".join(f"{line}\n" for line in lines) + "</svg>\n"


def _lay_out(panel: Panel, start: int, width: int) -> tuple[list[Rectangle | Label], list[str]]:
    left, right = start + PLOT_LEFT, start + width - PLOT_RIGHT
    top = PLOT_TOP + 22
    bottom = top + PLOT_HEIGHT
    x_low, x_high = panel.x_range or (panel.x.ticks[0], panel.x.ticks[-1])
    y_low, y_high = panel.y.ticks[0], panel.y.ticks[-1]

    def across(value: float) -> float:
        return left + (right - left) * panel.x.place(value, x_low, x_high)

    def up(value: float) -> float:
        return bottom - PLOT_HEIGHT * panel.y.place(value, y_low, y_high)

    shapes: list[Rectangle | Label] = [
        Label(start + 16, PLOT_TOP + 4, panel.title, 13, INK, is_bold=True)
    ]
    for tick in panel.y.ticks:
        shapes.append(Rectangle(left, up(tick) - 0.5, right - left, 1, GRID))
        shapes.append(Label(left - 6, up(tick), panel.y.write(tick), 11, MUTED_INK, "end"))
    for tick in panel.x.ticks:
        shapes.append(Rectangle(across(tick) - 0.5, bottom, 1, 4, MUTED_INK))
        shapes.append(
            Label(across(tick), bottom + 13, panel.x.write(tick), 11, MUTED_INK, "middle")
        )
    shapes.append(Label((left + right) / 2, bottom + 30, panel.x.title, 11, INK, "middle"))
    lines = []
    for index, line in enumerate(panel.series):
        colour = COLOURS[index % len(COLOURS)]
        # A step that changed nothing has no place on a logarithmic axis.
        kept = [(x, y) for x, y in line.points if y > 0 or not panel.y.is_log]
        points = [(across(x), up(y)) for x, y in kept]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        # With many points the markers would hide the line.
        if len(points) <= 16:
            lines += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{MARKER / 2}" fill="{colour}"/>'
                for x, y in points
            ]
        middle = bottom + AXIS_ROOM + LEGEND_ROW * (index + 0.5)
        shapes.append(Rectangle(left, middle - 1.5, 18, 3, colour))
        shapes.append(Label(left + 24, middle, line.name, 11, INK))
    return shapes, lines
