"""What documents say of deploy/ is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
LINK = re.compile(r"\]\(([^)#\s]+)")
TEST = re.compile(r"`pytest ([^`]+)`")


def test_links_of_the_readme_lead_somewhere() -> None:
    links = [link for link in LINK.findall((DEPLOY / "README.md").read_text()) if "://" not in link]
    assert [link for link in links if not (DEPLOY / link).exists()] == []


@pytest.mark.parametrize(
    "document", ["deploy/README.md", "docs/operations.md", "docs/guides/regions.md", "SECURITY.md"]
)
def test_tests_that_are_named_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = {path for paths in TEST.findall(text) for path in paths.split() if "/" in path}
    named |= set(re.findall(r"`(tests/[\w/]+(?:\.py)?)`", text))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_everything_in_deploy_is_in_its_readme() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in DEPLOY.iterdir()} - {"README.md"}
    assert [name for name in sorted(names) if name not in text] == []


def test_recipes_of_the_playbook_have_tests() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    disasters = text.partition("## 11.")[2]
    tests = (ROOT / "tests" / "deploy" / "test_recovery.py").read_text(encoding="utf-8")
    assert disasters.count("(t)") >= tests.count("\ndef test_") >= 5
