"""deploy/ starts what there is: the commands parse, and the parts of the pod fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from thinwire.cli.app import app

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: deploy/ was NOT tested")

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "vllm.yaml"
VARIABLES = {"$(STREAM)": "s3://bucket/run", "$(TRUSTED_KEY)": "0" * 64}
FOLDER = "/weights/model"


@pytest.fixture(scope="module")
def pod() -> dict[str, dict[str, Any]]:
    """The containers by name, those that run first included."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    (spec,) = (d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Deployment")
    return {c["name"]: c for c in spec["initContainers"] + spec["containers"]}


@pytest.mark.parametrize("name", ["first-version", "thinwire"])
def test_commands_parse(pod: dict[str, dict[str, Any]], name: str) -> None:
    program, *arguments = [*pod[name]["command"], *pod[name]["args"]]
    assert program == "thinwire"
    for variable, value in VARIABLES.items():
        arguments = [argument.replace(variable, value) for argument in arguments]
    group = typer.main.get_command(app)
    with group.make_context("thinwire", list(arguments)) as context:
        _, command, rest = group.resolve_command(context, arguments)
        assert command is not None
        with command.make_context(command.name, list(rest), parent=context) as parsed:
            assert str(parsed.params["folder"]) == FOLDER
            assert parsed.params["trust"] == [VARIABLES["$(TRUSTED_KEY)"]]


def test_the_engine_loads_the_folder_that_is_followed(pod: dict[str, dict[str, Any]]) -> None:
    assert f"--model={FOLDER}" in pod["vllm"]["args"]
    mounts = [
        {m["mountPath"]: m["name"] for m in pod[name]["volumeMounts"]}
        for name in ("first-version", "vllm", "thinwire")
    ]
    assert {mount["/weights"] for mount in mounts} == {"weights"}


def test_the_probe_looks_for_the_ready_file(pod: dict[str, dict[str, Any]]) -> None:
    (option,) = (a for a in pod["thinwire"]["args"] if a.startswith("--ready-file="))
    probed = pod["thinwire"]["readinessProbe"]["exec"]["command"]
    assert f"find {option.removeprefix('--ready-file=')} " in probed[-1]


def test_the_engine_has_no_credentials(pod: dict[str, dict[str, Any]]) -> None:
    assert "envFrom" not in pod["vllm"]
    assert [variable["name"] for variable in pod["vllm"]["env"]] == ["VLLM_SERVER_DEV_MODE"]
