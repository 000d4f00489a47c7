"""Documents are true: examples run, commands parse, errors are those of the code, links lead on."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from thinwire import errors
from thinwire.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
TRAINER = (ROOT / "docs" / "guides" / "trainer.md").read_text(encoding="utf-8")
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("**/*.md")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")
# [text](target), ![picture](target) and [name]: target, each perhaps with a "title".
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\[[^\]]+\]:\s+<?([^\s>]+)", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks in this language."""
    return [body for found, body in FENCE.findall(text) if found == language]


def thinwire_commands(text: str) -> list[list[str]]:
    """The arguments of every "$ thinwire" line, which a backslash may continue."""
    lines = "".join(blocks(text, "console")).replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ thinwire")]
    return [shlex.split(command, comments=True)[1:] for command in commands]


def relative_links(text: str) -> list[str]:
    """What links lead to inside the repository, without the part of a page; code holds none."""
    prose = CODE_SPAN.sub("", FENCE.sub("", text))
    targets = ["".join(groups).partition("#")[0] for groups in LINK.findall(prose)]
    return [target for target in targets if target and not ELSEWHERE.match(target)]


def error_classes() -> dict[str, type[errors.ThinwireError]]:
    """The public classes below the root, by name."""
    return {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.ThinwireError)
        and cls is not errors.ThinwireError
        and not name.startswith("_")
    }


def error_rows() -> list[list[str]]:
    """The cells of the table in docs/errors.md, without its two heading lines."""
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# Runs example.py in each folder it is told, in a process that has torch already and nothing else:
# to import it takes seconds.
RUNNER = """
import importlib.util, os, runpy, signal, sys

if importlib.util.find_spec("torch"):
    import torch
for folder in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(60)
    os.chdir(folder.rstrip())
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    runpy.run_path("example.py", run_name="__main__")
    sys.exit()
"""
EXAMPLES = [source for text in (README, GUIDE, TRAINER) for source in blocks(text, "python")]


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate()


@pytest.mark.parametrize("source", EXAMPLES)
def test_python_examples_run(source: str, tmp_path: Path, runner: subprocess.Popen[str]) -> None:
    if "import torch" in source and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: this example of the README was NOT run")
    (tmp_path / "example.py").write_text(source, encoding="utf-8")
    assert runner.stdin is not None
    assert runner.stdout is not None
    runner.stdin.write(f"{tmp_path}\n")
    runner.stdin.flush()
    code = int(runner.stdout.readline())
    assert (code, (tmp_path / "stderr").read_text()) == (0, "")


def test_the_readme_has_examples() -> None:
    assert blocks(README, "python")
    assert {arguments[0] for arguments in thinwire_commands(README)} >= {"diff", "apply"}


@pytest.mark.parametrize("arguments", thinwire_commands(README), ids=shlex.join)
def test_commands_parse(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    # Parsing only: nothing runs, so the files need not be there.
    with group.make_context("thinwire", list(arguments)) as context:
        _, command, rest = group.resolve_command(context, arguments)
        if command is not None:
            command.make_context(command.name, list(rest), parent=context).close()
    shown = CliRunner().invoke(app, [arguments[0], "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.stdout


def test_errors_are_listed_once() -> None:
    listed = [row[0] for row in error_rows()]
    assert sorted(listed) == sorted(f"`{name}`" for name in error_classes())


@pytest.mark.parametrize("row", error_rows(), ids=lambda row: row[0].strip("`"))
def test_an_error_is_what_its_row_says(row: list[str]) -> None:
    cls = error_classes()[row[0].strip("`")]
    cobases = [base for base in cls.__bases__ if not issubclass(base, errors.ThinwireError)]
    assert row[1] == ", ".join(f"`{base.__name__}`" for base in cobases)
    assert row[2] == str(cls.exit_code)
    assert ("retryable" in row[3]) == cls.retryable


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = relative_links(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_what_counts_as_a_link() -> None:
    text = (
        '[a](docs/a.md#part) ![b](b.svg "title") [c](https://c.de/x) [d](#part) `[e](e)`\n'
        "```\n[f](f)\n```\n[g]: g.md\n[h](mailto:h@h.de) [i](<i.md>)\n"
    )
    assert relative_links(text) == ["docs/a.md", "b.svg", "g.md", "i.md"]


def test_what_counts_as_a_command() -> None:
    text = "```console\n$ make it\n$ thinwire diff a \\\n  b -o c  # why\nout\n```\n"
    assert thinwire_commands(text) == [["diff", "a", "b", "-o", "c"]]
