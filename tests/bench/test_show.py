"""The table and the picture say what the report says."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from thinwire.bench import (
    MissingExtraError,
    Report,
    Row,
    Speed,
    to_markdown,
    to_rich,
    write_plot,
)
from thinwire.bench.report import BoundParts


@pytest.fixture
def report() -> Report:
    return Report(
        rows=(
            Row("class-conditional bound", 0.0681, None, 5.0, 0.268),
            Row("thinwire", 0.0751, 0.0751, 5.5, 0.296, Speed(2400, 2300), Speed(3000, 2900)),
            Row("arc_v3", 0.254, 0.29, 19.6, 1.0, Speed(70, 80), Speed(500, 510)),
            Row("a|b [x] <y>", 1.5, 1.5),
            Row("memcpy", encode=Speed(12000, 11000), decode=Speed(12000, 11000)),
        ),
        bound=BoundParts(0.048, 0.0128, 0.0076),
        step_count=12,
        tensor_count=103,
        raw_bytes=45_400_000,
        changed_percent=0.2,
        repetition_count=3,
        machine={},
        skipped={"arc_v1": "row arc_v1 needs [arc]"},
    )


def test_markdown(report: Report) -> None:
    text = to_markdown(report)
    lines = text.splitlines()
    assert lines[0] == (
        "| row | payload % of raw | bits per change | encode MB/s | decode MB/s | times arc_v3 |"
    )
    assert lines[3] == "| thinwire | 0.0751 | 5.50 | 2400 | 3000 | 0.296 |"
    assert lines[5] == r"| a\|b [x] <y> | 1.5000 | - | - | - | - |"
    assert lines[6] == "| memcpy | - | - | 12000 | 12000 | - |"
    assert "Mean over 12 steps of 103 tensors, 45.4 MB raw, 0.200 % changed." in lines[8]
    assert "File headers are not counted for arc_v3; all else is." in text
    assert "No row arc_v1: row arc_v1 needs [arc]" in lines[-1]


def test_rich(report: Report) -> None:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(to_rich(report))
    text = capture.get()
    assert "a|b [x] <y>" in text
    assert "needs [arc]" in text
    assert "2400" in text
    assert "decode_into" not in text


def test_svg(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot(report, path)
    root = ElementTree.parse(path).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"thinwire", "0.075 %", "a|b [x] <y>"} <= set(texts)
    assert "memcpy" not in texts
    bars = [
        float(element.get("width", 0)) for element in root.iter("{http://www.w3.org/2000/svg}rect")
    ][1:]
    assert len(bars) == 4
    assert bars[2] / bars[3] == pytest.approx(0.254 / 1.5, rel=0.01)
    assert max(bars) == bars[3]


def test_png(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    try:
        write_plot(report, path)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_png_without_pillow(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="Pillow"):
        write_plot(report, tmp_path / "plot.png")


def test_other_suffix(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        write_plot(report, tmp_path / "plot.jpg")
