"""The one picture of a bench run: a panel per report, a bar per row, its length the payload.

The picture is laid out once, as rectangles and texts, and then written as SVG by this file or drawn
as PNG with Pillow, an optional package.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from thinwire.bench.peer import MissingExtraError
from thinwire.bench.report import BOUND_ROW, OUR_ROW, Report
from thinwire.errors import InvalidArgument

_WIDTH = 640
_MARGIN = 16
_LABEL_WIDTH = 170
_VALUE_WIDTH = 80
_TOP = 62
_ROW_HEIGHT = 26
_BAR_HEIGHT = 16
_PNG_SCALE = 2

_PAPER = "#ffffff"
_INK = "#24292f"
_MUTED_INK = "#57606a"
_OUR_BAR = "#1f6feb"
_OTHER_BAR = "#afb8c1"
_BOUND_BAR = "#d8dee4"


@dataclass(frozen=True)
class Rectangle:
    """A filled rectangle in pixels, (x, y) its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class Label:
    """One line of text in pixels; ``y`` is its vertical middle, ``anchor`` "start" or "end"."""

    x: float
    y: float
    text: str
    size: int
    colour: str
    anchor: str = "start"
    is_bold: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawing in pixels, back to front."""

    width: int
    height: int
    shapes: tuple[Rectangle | Label, ...]


def lay_out(report: Report, run_name: str = "") -> Picture:
    """Bars for all rows with a payload, in the report's order."""
    bars = [(row.name, row.payload_percent) for row in report.rows if row.payload_percent]
    longest = max((percent for _, percent in bars), default=1.0)
    room = _WIDTH - 2 * _MARGIN - _LABEL_WIDTH - _VALUE_WIDTH
    height = _TOP + _ROW_HEIGHT * len(bars) + _MARGIN
    steps = "1 step" if report.step_count == 1 else f"mean of {report.step_count} steps"
    title = "Delta size, % of the raw checkpoint" + (f", {run_name}" if run_name else "")
    shapes: list[Rectangle | Label] = [
        Rectangle(0, 0, _WIDTH, height, _PAPER),
        Label(_MARGIN, 22, title, 15, _INK, is_bold=True),
        Label(
            _MARGIN,
            43,
            f"{report.raw_bytes / 1e6:.1f} MB, {report.changed_percent:.2f} % of the weights "
            f"changed, {steps}; shorter is better",
            12,
            _MUTED_INK,
        ),
    ]
    for index, (name, percent) in enumerate(bars):
        middle = _TOP + _ROW_HEIGHT * (index + 0.5)
        start = _MARGIN + _LABEL_WIDTH
        length = max(room * percent / longest, 1)
        is_ours = name == OUR_ROW
        colour = _OUR_BAR if is_ours else _BOUND_BAR if name == BOUND_ROW else _OTHER_BAR
        shapes += [
            Label(start - 8, middle, name, 13, _INK, anchor="end", is_bold=is_ours),
            Rectangle(start, middle - _BAR_HEIGHT / 2, length, _BAR_HEIGHT, colour),
            Label(start + length + 6, middle, f"{percent:.3f} %", 12, _INK, is_bold=is_ours),
        ]
    return Picture(_WIDTH, height, tuple(shapes))


def stack(pictures: Sequence[Picture]) -> Picture:
    """The pictures in one, from top to bottom."""
    shapes: list[Rectangle | Label] = []
    top = 0
    for picture in pictures:
        shapes += [replace(shape, y=shape.y + top) for shape in picture.shapes]
        top += picture.height
    return Picture(_WIDTH, top, tuple(shapes))


def to_svg(picture: Picture) -> str:
    """The picture as the text of a stand-alone SVG file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width}" '
        f'height="{picture.height}" viewBox="0 0 {picture.width} {picture.height}" '
        'font-family="Helvetica, Arial, sans-serif">'
    ]
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            lines.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" '
                f'height="{shape.height:.1f}" fill="{shape.colour}"/>'
            )
        else:
            weight = ' font-weight="bold"' if shape.is_bold else ""
            # A third of the size below the middle is where a line of digits looks centred.
            lines.append(
                f'<text x="{shape.x:.1f}" y="{shape.y + shape.size * 0.35:.1f}" '
                f'font-size="{shape.size}" fill="{shape.colour}" '
                f'text-anchor="{shape.anchor}"{weight}>{escape(shape.text)}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def write_plot(reports: Report | Mapping[str, Report], path: Path) -> None:
    """Write the picture to ``path``: SVG or PNG, by its suffix.

    Several reports, by the names of their runs, become panels of one picture. Raises as
    :func:`check_plot`.
    """
    check_plot(path)
    named = {"": reports} if isinstance(reports, Report) else reports
    picture = stack([lay_out(report, name) for name, report in named.items()])
    if path.suffix.lower() == ".svg":
        path.write_text(to_svg(picture), encoding="utf-8")
    else:
        _draw(picture).save(path)


def check_plot(path: Path) -> None:
    """Find out before a long run whether its picture can be drawn.

    Raises InvalidArgument for a suffix other than .svg and .png, MissingExtraError for PNG without
    Pillow.
    """
    suffix = path.suffix.lower()
    if suffix == ".png":
        _pillow("Image")
    elif suffix != ".svg":
        raise InvalidArgument(
            f"cannot plot to {path.name!r}", hint="Use a name that ends in .svg or .png"
        )


def _pillow(module: str) -> Any:
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise MissingExtraError(
            f"a PNG plot needs Pillow, install pillow or plot to .svg: {error}"
        ) from error


def _draw(picture: Picture) -> Any:
    """The picture as a Pillow image, at twice its size to stay sharp."""
    image_module, draw_module, font_module = map(_pillow, ("Image", "ImageDraw", "ImageFont"))
    image = image_module.new(
        "RGB", (picture.width * _PNG_SCALE, picture.height * _PNG_SCALE), _PAPER
    )
    draw = draw_module.Draw(image)
    for shape in picture.shapes:
        x, y = shape.x * _PNG_SCALE, shape.y * _PNG_SCALE
        if isinstance(shape, Rectangle):
            far = (x + shape.width * _PNG_SCALE - 1, y + shape.height * _PNG_SCALE - 1)
            draw.rectangle([(x, y), far], fill=shape.colour)
        else:
            draw.text(
                (x, y),
                shape.text,
                fill=shape.colour,
                font=font_module.load_default(size=shape.size * _PNG_SCALE),
                anchor="rm" if shape.anchor == "end" else "lm",
                # Pillow's own font has no bold face; a thin outline in the same colour stands in.
                stroke_width=1 if shape.is_bold else 0,
                stroke_fill=shape.colour,
            )
    return image
