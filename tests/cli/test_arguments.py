"""What the parser of arguments makes of them, and what is shown for people."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer

from thinwire.cli.options import parse_duration, parse_size
from thinwire.cli.output import duration
from thinwire.cli.values import first_values

from .conftest import Run


@pytest.mark.parametrize(
    "arguments",
    [
        ["unpack", "--json"],
        ["inspect", "--json"],
        ["follow", "--json", "a"],
        ["follow", "a", "b", "--json", "--memory-limit", "1XB"],
        ["publish", "a", "b", "--json"],
        ["verify", "a.tw", "--workers", "0", "--json"],
        ["bench", "--json", "-", "--frobnicate"],
    ],
)
def test_wrong_usage_is_json_too(arguments: list[str], run: Run) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert list(error) == ["code", "message", "hint", "context"]
    assert error["code"] == "invalid-argument"
    assert "Usage" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["bench", "--json", "out.json", "--frobnicate"], ["inspect", "a", "b", "--", "--json"]],
)
def test_wrong_usage_is_json_only_where_asked(arguments: list[str], run: Run) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *[("0", 0), ("1000", 1000), ("256MiB", 256 << 20), ("1.5 GB", 1_500_000_000)],
        *[("2KiB", 2048), ("1TiB", 1 << 40), ("3kB", 3000), ("7B", 7)],
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "1XB", "MiB", "1e3", "1 M iB", "9" * 40, "0x10", "nan"])
def test_bad_sizes_and_durations(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(typer.BadParameter):
            parse(text)


def test_durations() -> None:
    parsed = [parse_duration(text) for text in ("90", "90s", "15m", "36h", "7d", "0.5h")]
    assert parsed == [90, 90, 900, 129_600, 604_800, 1800]
    shown = [duration(seconds) for seconds in (-3, 0.9, 59, 60, 3_725, 90_000, 8_640_000)]
    assert shown == ["0s", "0s", "59s", "1m 0s", "1h 2m", "1d 1h", "100d 0h"]


@pytest.mark.parametrize(
    ("dtype", "numbers", "texts"),
    [
        ("BF16", np.array([0x3F80, 0xC000, 0x7FC0], np.uint16), ["1", "-2", "nan"]),
        ("F16", np.array([0.5, -0.0], np.float16), ["0.5", "-0"]),
        ("F32", np.arange(20, dtype=np.float32), [str(n) for n in range(8)]),
        ("C64", np.array([1 + 2j], np.complex64), ["1+2j"]),
        ("I64", np.array([-5, 7]), ["-5", "7"]),
        ("U8", np.array([255], np.uint8), ["255"]),
        ("BOOL", np.array([True, False]), ["True", "False"]),
        ("F8_E4M3", np.array([0x38, 0xF], np.uint8), ["0x38", "0x0f"]),
        ("F32", np.empty(0, np.float32), []),
    ],
)
def test_first_values(dtype: str, numbers: np.ndarray, texts: list[str]) -> None:
    assert first_values(dtype, numbers.view(np.uint8)) == texts
