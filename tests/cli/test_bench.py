"""bench: which checkpoints and rows it takes, and what it prints and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from thinwire.bench import corpus as corpora
from thinwire.bench import find_runs, make_our_row, steady_steps
from thinwire.bench.measure import check_round_trip

from .conftest import Run, random_tensor, read_json, stepped, write_checkpoint

QUICK = ["--repetitions", 1]


def test_checkpoints(corpus: Path, run: Run) -> None:
    steps = [corpus / "long" / f"{step:04d}" for step in (3, 4, 5)]
    result = run("bench", *steps, "--rows", "thinwire,pulse", *QUICK)
    assert result.exit_code == 0
    assert result.stderr == ""
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert names[:5] == ["row", "class-conditional bound", "thinwire", "pulse", "memcpy"]
    assert "Mean over 2 steps" in result.stdout
    assert "sections / bound" in result.stdout
    assert "decode_into / memcpy" in result.stdout


def test_json_alone_on_stdout(corpus: Path, run: Run) -> None:
    arguments = ["--corpus", corpus, "--rows", "thinwire", "--json", "-"]
    runs = read_json(run("bench", *arguments, *QUICK))["runs"]
    assert [report["run"] for report in runs] == ["long", "short"]
    assert [report["step_count"] for report in runs] == [3, 1]
    assert runs[0]["checkpoints"][0].endswith("0008")
    row = runs[0]["rows"][1]
    assert row["name"] == "thinwire"
    assert row["file_percent"] == row["payload_percent"] > row["section_percent"] > 0
    assert row["decode_into"]["cpu_mb_s"] > 0
    shares = runs[0]["shares"][0]
    bound_percent = runs[0]["rows"][0]["payload_percent"]
    assert shares["section_of_bound"] == pytest.approx(row["section_percent"] / bound_percent)
    assert shares["encode_of_reference"] is None


def test_files(corpus: Path, tmp_path: Path, run: Run) -> None:
    json_path, plot_path = tmp_path / "b.json", tmp_path / "b.svg"
    arguments = ["--corpus", corpus, "--json", json_path, "--plot", plot_path, "--markdown"]
    result = run("bench", *arguments, "--rows", "thinwire,trl_raw", *QUICK)
    assert result.exit_code == 0
    assert result.stdout.startswith("### long\n\n| row | payload % of raw |")
    assert "\n### short\n" in result.stdout
    assert len(json.loads(json_path.read_text())["runs"]) == 2
    texts = [element.text for element in ElementTree.parse(plot_path).iter()]
    assert [text for text in texts if text and text.startswith("Delta size")] == [
        "Delta size, % of the raw checkpoint, long",
        "Delta size, % of the raw checkpoint, short",
    ]


def test_a_row_without_its_package_is_our_own(
    corpus: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fireworks_delta_compression", None)
    arguments = ["--corpus", corpus, "--rows", "thinwire,arc_v3"]
    content = read_json(run("bench", *arguments, *QUICK, "--json", "-"))["runs"][0]
    assert not content["skipped"]
    assert "arc_v3" in {row["name"] for row in content["rows"]}
    assert "its speeds are not the package's" in content["notes"]["arc_v3"]
    assert "Row arc_v3 is written by thinwire" in run("bench", *arguments, *QUICK).stdout


def test_a_missing_package_for_the_plot(
    corpus: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    result = run("bench", "--corpus", corpus, "--plot", tmp_path / "b.png", *QUICK)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Pillow" in result.stderr


MAKER = """
import os, shutil, sys
assert sys.argv[1:] == ["--out", ".bench/corpus"] and os.environ["OMP_NUM_THREADS"] == "1"
print("step 1: reward 0.5")
shutil.copytree("made", ".bench/corpus")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: empty, and thinwire not installed from a checkout."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(corpora, "CHECKOUT", tmp_path / "site-packages")
    return folder


def add_maker(checkout: Path, text: str) -> Path:
    """A checkout with this program in place of the one that trains."""
    maker = checkout / corpora.MAKER
    maker.parent.mkdir(parents=True)
    maker.write_text(text)
    return maker


def test_no_default_corpus(folder: Path, run: Run) -> None:
    result = run("bench")
    assert result.exit_code == 2
    command = "python benchmarks/corpus/make_corpus.py --out .bench/corpus"
    assert command in result.stderr
    assert list(folder.iterdir()) == []


def test_the_default_corpus(folder: Path, corpus: Path, run: Run) -> None:
    add_maker(folder, "raise SystemExit(1)")
    (folder / ".bench").mkdir()
    corpus.rename(folder / ".bench" / "corpus")
    assert run("bench", "--rows", "thinwire", *QUICK).exit_code == 0


def test_the_corpus_of_the_project(folder: Path, corpus: Path, run: Run) -> None:
    shared = folder.parent / "shared"
    shared.mkdir()
    corpus.rename(shared / "corpus")
    # What lies beside any other folder is not the project's.
    assert run("bench").exit_code == 2
    add_maker(folder, "raise SystemExit(1)")
    result = run("bench", "--rows", "thinwire", *QUICK, "--json", "-")
    assert [report["run"] for report in read_json(result)["runs"]] == ["long", "short"]
    assert not (folder / ".bench").exists()


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_corpus_is_made(
    is_editable: bool,
    folder: Path,
    corpus: Path,
    run: Run,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = folder.parent / "checkout" if is_editable else folder
    monkeypatch.setattr(corpora, "CHECKOUT", folder.parent / "checkout")
    maker = add_maker(checkout, MAKER)
    corpus.rename(folder / "made")
    # Nothing is trained for what would be refused afterwards.
    assert run("bench", "--rows", "zip").exit_code == 2
    assert not (folder / ".bench").exists()
    result = run("bench", "--rows", "thinwire", *QUICK, "--json", "-")
    assert len(read_json(result)["runs"]) == 2
    shown = maker if is_editable else corpora.MAKER
    assert f"{sys.executable} {shown} --out .bench/corpus" in result.stderr
    assert capfd.readouterr() == ("", "step 1: reward 0.5\n")


def test_a_corpus_that_cannot_be_made(folder: Path, corpus: Path, run: Run) -> None:
    add_maker(folder, MAKER + "sys.exit(3)")
    corpus.rename(folder / "made")
    result = run("bench")
    assert result.exit_code == 2
    assert "exit status 3" in result.stderr
    assert result.stderr.count("benchmarks/corpus/make_corpus.py --out .bench/corpus") == 2
    assert result.stdout == ""
    assert not (folder / ".bench" / "corpus").exists()


def test_refused_before_any_work(corpus: Path, tmp_path: Path, run: Run) -> None:
    steps = [corpus / "long" / "0000", corpus / "long" / "0001"]
    other = write_checkpoint(tmp_path / "other", {"x": random_tensor("U8", (4,), 1)})
    cases: list[tuple[list[object], int, str]] = [
        ([steps[0]], 2, "two or more"),
        ([*steps, "--corpus", corpus], 2, "not both"),
        ([*steps, "--rows", "zip"], 2, "'zip'"),
        ([*steps, "--plot", tmp_path / "b.jpg"], 2, ".svg or .png"),
        ([*steps, "--json", tmp_path / "none" / "b.json"], 5, "does not exist"),
        ([steps[0], tmp_path / "none"], 5, "none"),
        ([steps[0], other], 2, "on one side only"),
        (["--corpus", tmp_path / "none"], 5, "not a folder"),
        (["--corpus", corpus / "long"], 2, "no run"),
    ]
    for arguments, exit_code, words in cases:
        result = run("bench", *arguments)
        assert result.exit_code == exit_code, arguments
        assert words in result.stderr
        assert result.stdout == ""


def test_an_error_as_json(run: Run, tmp_path: Path) -> None:
    result = run("bench", "--corpus", tmp_path / "none", "--json", "-")
    assert read_json(result)["error"]["code"] == "not-found"


def test_the_row_of_this_library_on_corners() -> None:
    base = {
        "empty": random_tensor("BF16", (0, 4), 1),
        "scalar": random_tensor("BF16", (), 2),
        "bytes": random_tensor("U8", (70_001,), 3),
        "large": random_tensor("BF16", (300, 300), 4),
        "wide": random_tensor("F32", (9,), 5),
    }
    new = {name: stepped(tensor, 1, 0.3) for name, tensor in base.items()}
    row = make_our_row()
    payload = row.encode(base, new)
    check_round_trip("decode", new, row.decode(base, payload))
    scratch = {name: tensor._replace(words=tensor.words.copy()) for name, tensor in base.items()}
    row.decode_into(scratch, payload)
    check_round_trip("decode_into", new, scratch)
    assert 0 < row.section_bytes(payload) < len(payload)


def test_runs_and_their_steady_steps(corpus: Path) -> None:
    runs = find_runs(corpus)
    assert list(runs) == ["long", "short"]
    assert [step.name for step in steady_steps(runs["long"])] == ["0008", "0009", "0010", "0011"]
    assert len(steady_steps(runs["long"][:10])) == 10
    assert len(steady_steps(runs["short"])) == 2
