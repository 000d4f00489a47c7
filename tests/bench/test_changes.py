"""benchmarks/changes.py on a run of three steps whose changes are counted by hand."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest

from thinwire.bench import as_tensor

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"
NAME = "decoder-adamw-lr1e-3"
ONE, SMALL = 0x3F80, 0x3A80  # 1 and 2^-10, and so are their neighbours one above
WEIGHTS = 1000


class Scripts(NamedTuple):
    """The parts of the program, which is no installed package."""

    main: ModuleType
    measure: ModuleType
    plot: ModuleType
    expect: ModuleType


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import changes
    import changes_expect
    import changes_measure
    import changes_plot

    return Scripts(changes, changes_measure, changes_plot, changes_expect)


def write_checkpoint(folder: Path, words: np.ndarray) -> None:
    """One BF16 matrix as a safetensors file."""
    folder.mkdir(parents=True)
    entry = {"dtype": "BF16", "shape": [10, words.size // 10], "data_offsets": [0, words.nbytes]}
    head = json.dumps({"w": entry}).encode()
    data = struct.pack("<Q", len(head)) + head + words.tobytes()
    (folder / "model.safetensors").write_bytes(data)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Half the weights at 1, half at 2^-10; of the small ones 100, 50 and 100 change.

    Step 2 takes back half of what step 1 did: over steps 1 and 2 together, 50 differ.
    """
    words = np.full(WEIGHTS, ONE, np.uint16)
    words[500:] = SMALL
    states = [words.copy()]
    for first, last, change in ((500, 600, 1), (500, 550, -1), (700, 800, 1)):
        words[first:last] += np.uint16(change % 65536)
        states.append(words.copy())
    for step, state in enumerate(states):
        write_checkpoint(tmp_path / "corpus" / NAME / f"{step:04d}", state)
    return tmp_path / "corpus"


def test_rows_are_what_was_counted(scripts: Scripts, corpus: Path) -> None:
    (run,) = scripts.main.measure([corpus])
    assert (run.first, run.last, run.element_count) == (0, 3, WEIGHTS)
    assert run.changed_percents == pytest.approx((10.0, 5.0, 10.0))
    one, two = run.rows  # three steps hold no window of four
    assert (one.step_count, one.window_count) == (1, 3)
    assert one.changed_percent == pytest.approx(25 / 3)
    assert (two.step_count, two.window_count) == (2, 1)
    assert two.changed_percent == pytest.approx(5.0)
    assert two.of_single_changes == pytest.approx(50 / 150)  # the third step is in no window


def test_bytes_are_those_of_the_encoder(scripts: Scripts, corpus: Path) -> None:
    from thinwire.bench.ours import encode, load_checkpoint

    steps = [load_checkpoint(corpus / NAME / f"{step:04d}") for step in range(4)]
    singles = [len(encode(steps[step], steps[step + 1])) for step in range(3)]
    merged = len(encode(steps[0], steps[2]))
    (run,) = scripts.main.measure([corpus])
    one, two = run.rows
    assert one.payload_percent == pytest.approx(100 * sum(singles) / (3 * 2 * WEIGHTS))
    assert one.bits_per_change == pytest.approx(8 * sum(singles) / 250)
    assert two.percent_per_step == pytest.approx(100 * merged / (2 * WEIGHTS) / 2)
    assert two.of_single_bytes == pytest.approx(merged / sum(singles[:2]))


def test_moves_and_what_is_expected(scripts: Scripts, corpus: Path) -> None:
    """Small weights move by their spacing, 2^-17, in 250 of 1500 cases; large ones never did."""
    (run,) = scripts.main.measure([corpus])
    small, large = run.classes[1]
    assert (small.exponent, large.exponent) == (-10, 0)
    assert (small.weight_percent, large.weight_percent) == (50.0, 50.0)
    assert small.changed_percent == pytest.approx(100 / 6)
    assert large.changed_percent == 0.0
    move = 2.0**-17 / 6
    assert run.move == pytest.approx(move / 1e-3)
    assert run.parts == ((0.0, 0.0), pytest.approx((100.0, 25 / 3)))
    # What the large ones would do at that move: their spacing is 2^-7.
    assert run.expected_percent == pytest.approx(50 / 6 + 50 * move / 2.0**-7)


def test_a_tensor_that_hardly_moves_expects_what_it_did(scripts: Scripts) -> None:
    base = np.full(100, ONE, np.uint16)
    new = base.copy()
    new[0] += np.uint16(1)
    counts = scripts.measure.count_tensor(base, new)
    assert scripts.measure.mean_distance(counts) is None
    assert scripts.measure.expected_count(counts) == 1.0


def test_windows_lie_side_by_side_in_the_settled_steps(scripts: Scripts) -> None:
    measure = scripts.measure
    assert [measure.first_settled(last) for last in (3, 9, 14, 24, 48, 64)] == [0, 0, 8, 8, 16, 16]
    assert list(measure.window_starts(16, 48, 16)) == [16, 32]
    assert list(measure.window_starts(8, 20, 8)) == [8]
    assert list(measure.window_starts(8, 20, 16)) == []


@pytest.mark.parametrize(
    ("name", "series", "rate"),
    [
        ("decoder-muon-lr1e-5", "decoder, Muon", 1e-5),
        ("decoder-adamw-lr1e-6-spread", "decoder, AdamW, spread", 1e-6),
        ("minilm-lr2.5e-7", "MiniLM, AdamW", 2.5e-7),
        ("smollm2-adamw-lr1e-6", "SmolLM2, AdamW", 1e-6),
    ],
)
def test_runs_are_known_by_their_names(
    scripts: Scripts, name: str, series: str, rate: float
) -> None:
    kind = scripts.measure.kind_of(name)
    assert (kind.series, kind.learning_rate) == (series, rate)
    assert name.removesuffix("-spread").endswith(f"lr{scripts.measure.short_rate(rate)}")


def test_another_name_is_refused(scripts: Scripts) -> None:
    with pytest.raises(ValueError, match="step-0001"):
        scripts.measure.kind_of("step-0001")


def test_a_gap_in_the_steps_is_refused(scripts: Scripts, corpus: Path) -> None:
    (corpus / NAME / "0001").rename(corpus / NAME / "0007")
    with pytest.raises(ValueError, match="does not hold the steps"):
        scripts.main.measure([corpus])


def test_break_even_is_where_both_take_as_long(scripts: Scripts, corpus: Path) -> None:
    (run,) = scripts.main.measure([corpus])
    row = run.rows[0]._replace(payload_percent=10.0, encode_mb_s=1000.0, apply_mb_s=1000.0)
    # 1 MB: 2 ms of work, and 0.9 MB not sent.
    assert scripts.main.break_even_gbit_s(row) == pytest.approx(0.9 * 8 / 2)
    assert scripts.main.break_even_gbit_s(row._replace(payload_percent=100.1)) == 0.0


def test_what_is_expected_of_a_checkpoint(scripts: Scripts) -> None:
    """A step of a quarter of the spacing, 2^-7, changes one of four ones."""
    ones = as_tensor("BF16", (10, 10), np.full(100, ONE, np.uint16))
    found = scripts.expect.expect({"w": ones}, 2.0**-9)
    positions_bits = -0.25 * np.log2(0.25) - 0.75 * np.log2(0.75)
    assert found.weight_count == 100
    assert found.changed_percent == pytest.approx(25.0)
    assert found.delta_percent == pytest.approx(100 * (positions_bits + 0.25 * 1.25) / 16)
    # Beyond the spacing all change, and their size takes bits: 2 octaves, direction, one more.
    found = scripts.expect.expect({"w": ones}, 2.0**-5)
    assert found.changed_percent == pytest.approx(100.0)
    assert found.delta_percent == pytest.approx(100 * 4 / 16)


def test_embeddings_and_other_dtypes_are_left_out(scripts: Scripts) -> None:
    ones = as_tensor("BF16", (10, 10), np.full(100, ONE, np.uint16))
    row = as_tensor("BF16", (100,), np.full(100, ONE, np.uint16))
    checkpoint = {
        "model.embed_tokens.weight": ones,
        "embeddings.LayerNorm.weight": row,
        "w": ones,
        "steps": as_tensor("F32", (1,), np.zeros(1, np.float32)),
    }
    found = scripts.expect.split(checkpoint)
    assert set(found["all weights"]) == set(checkpoint) - {"steps"}
    assert set(found["without embeddings"]) == {"embeddings.LayerNorm.weight", "w"}


def test_tables(scripts: Scripts, corpus: Path) -> None:
    runs = scripts.main.measure([corpus])
    text = scripts.main.to_markdown(runs)
    assert "| decoder, AdamW, 1e-3 | 1-3 | 8.333 |" in text
    assert "| decoder, AdamW, 1e-3 | 8.333 | 5.000 | - | - | - |" in text
    text = scripts.main.class_table(runs[0])
    assert "| 2^-10 to 2^-9 | 0.0 | 50.0 | 16.667 |" in text


def test_a_step_without_changes_has_no_place_on_a_logarithmic_axis(scripts: Scripts) -> None:
    plot = scripts.plot
    lines = [plot.Series("a", [(1, 0.0), (2, 5.0), (4, 50.0)])]
    ticks = plot.decades(plot.heights(lines))
    assert ticks == [1.0, 10.0, 100.0]
    panel = plot.Panel("p", plot.Axis("k", [1, 2, 4]), plot.Axis("", ticks), lines)
    root = ElementTree.fromstring(plot.draw("t", "s", [panel]))
    (line,) = root.iter(f"{SVG}polyline")
    assert len((line.get("points") or "").split()) == 2


def test_the_program_from_end_to_end(
    scripts: Scripts,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With runs that are all there, nothing is trained."""
    monkeypatch.setattr(scripts.main, "RECORDED_STEPS", 3)
    monkeypatch.setattr(scripts.main, "RECORDED", (("adamw", "1e-3"),))
    monkeypatch.setattr(scripts.main, "SPREAD_RUN", NAME)
    monkeypatch.setattr(scripts.main, "CLASS_RUN", NAME)
    monkeypatch.setattr(scripts.main, "CLASS_RATE", 1e-3)
    monkeypatch.setattr(scripts.main, "STEPS_RUNS", (NAME,))
    monkeypatch.setattr(scripts.main, "SETTLING_RUNS", (NAME,))
    arguments = ["changes.py", str(corpus), "--markdown"]
    arguments += ["--plots", str(tmp_path), "--json", str(tmp_path / "c.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    scripts.main.main()
    assert "### By magnitude: decoder, AdamW, 1e-3" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "c.json").read_text())
    assert found["rows"][0]["changed_percent"] == pytest.approx(25 / 3)
    assert {path.name for path in tmp_path.glob("changes-*.svg")} == {
        f"changes-{name}.svg" for name in ("rate", "steps", "settling", "magnitude")
    }
    for path in tmp_path.glob("changes-*.svg"):
        root = ElementTree.parse(path).getroot()
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        lines = [line.get("points") or "" for line in root.iter(f"{SVG}polyline")]
        points = [tuple(map(float, p.split(","))) for line in lines for p in line.split()]
        assert points
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
