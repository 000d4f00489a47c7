"""deploy/kubernetes: what a linter of practices would say, and that the commands parse and fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from thinwire.cli.app import app

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: deploy/ was NOT tested")

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
WORKLOADS = {"Deployment", "StatefulSet", "CronJob"}
# The image of vLLM writes to its own root file system; see deploy/README.md.
WRITABLE = {"vllm"}
# A program of somebody else's may have other names for its probes.
SERVERS = {"hub", "relay", "serve", "vllm", "proxy"}


class Pod(NamedTuple):
    """A pod's template and the workload that it is of."""

    file: str
    workload: dict[str, Any]
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.template["spec"])

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods() -> Iterator[Pod]:
    for name in FILES:
        for document in documents(name):
            if document["kind"] in WORKLOADS:
                spec = document["spec"]
                spec = spec.get("jobTemplate", {}).get("spec", spec)
                yield Pod(name, document, spec["template"])


PODS = list(pods())
NAMED = pytest.mark.parametrize("pod", PODS, ids=[pod.workload["metadata"]["name"] for pod in PODS])


def variables(file: str) -> dict[str, str]:
    maps = [d["data"] for d in documents(file) if d["kind"] == "ConfigMap"]
    return {name: value for data in maps for name, value in data.items()}


@NAMED
def test_nothing_is_root_or_may_become_it(pod: Pod) -> None:
    assert pod.spec["automountServiceAccountToken"] is False
    security = pod.spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 10_000
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for flag in ("hostNetwork", "hostPID", "hostIPC"):
        assert flag not in pod.spec
    for container in pod.containers:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own.get("readOnlyRootFilesystem", False) is (container["name"] not in WRITABLE)
    assert not any("hostPath" in volume for volume in pod.spec["volumes"])


@NAMED
def test_everything_has_bounds(pod: Pod) -> None:
    for container in pod.containers:
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        _, colon, tag = container["image"].rpartition(":")
        assert colon
        assert tag != "latest"
    for volume in pod.spec["volumes"]:
        if "emptyDir" in volume:
            assert "sizeLimit" in volume["emptyDir"]
        # A secret that the world may read is none.
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] & 0o007 == 0


@NAMED
def test_servers_are_probed_and_end_in_order(pod: Pod) -> None:
    if pod.workload["kind"] == "CronJob":
        assert pod.workload["spec"]["concurrencyPolicy"] == "Forbid"
        return
    for container in pod.spec["containers"]:
        if container["name"] in SERVERS:
            assert container.keys() & {"readinessProbe", "livenessProbe"}
    assert pod.spec["terminationGracePeriodSeconds"] >= 30


@NAMED
def test_labels_and_selectors_meet(pod: Pod) -> None:
    labels = pod.template["metadata"]["labels"]
    spec = pod.workload["spec"]
    if "selector" in spec:
        assert spec["selector"]["matchLabels"].items() <= labels.items()
    mounted = {mount["name"] for c in pod.containers for mount in c["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    assert mounted == {volume["name"] for volume in pod.spec["volumes"]} | claimed
    policies = [
        d["spec"]["podSelector"] for d in documents(pod.file) if d["kind"] == "NetworkPolicy"
    ]
    assert any(is_selected(policy, labels) for policy in policies), "no network policy is for it"


def is_selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("name", FILES)
def test_services_lead_to_ports_that_there_are(name: str) -> None:
    found = [pod for pod in PODS if pod.file == name]
    for service in (d for d in documents(name) if d["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        (pod,) = (p for p in found if selector <= p.template["metadata"]["labels"].items())
        ports = {port["name"] for c in pod.containers for port in c.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


COMMANDS = [
    (pod.file, container)
    for pod in PODS
    for container in pod.containers
    if container.get("command", [""])[0] == "thinwire"
]


@pytest.mark.parametrize(
    ("file", "container"), COMMANDS, ids=[f"{f}-{c['name']}" for f, c in COMMANDS]
)
def test_commands_parse(file: str, container: dict[str, Any]) -> None:
    arguments = [*container["command"], *container["args"]][1:]
    own = {variable["name"]: "x" for variable in container.get("env", [])}
    for name, value in (variables(file) | own).items():
        arguments = [argument.replace(f"$({name})", value) for argument in arguments]
    check_parses(arguments)


def check_parses(arguments: list[str]) -> None:
    assert not any("$(" in argument for argument in arguments)
    group = typer.main.get_command(app)
    with group.make_context("thinwire", list(arguments)) as context:
        _, command, rest = group.resolve_command(context, arguments)
        assert command is not None
        command.make_context(command.name, list(rest), parent=context).close()


def test_what_is_to_be_uncommented_parses() -> None:
    (attach,) = (c for file, c in COMMANDS if file == "vllm.yaml" and c["name"] == "thinwire")
    more = re.findall(r"^ +# - (--\S+)$", (FOLDER / "vllm.yaml").read_text(), re.MULTILINE)
    assert {argument.partition("=")[0] for argument in more} >= {"--hub", "--relay", "--region"}
    arguments = [re.sub(r"\$\(\w+\)", "x", argument) for argument in [*attach["args"], *more]]
    check_parses(["attach", *arguments])


@pytest.mark.parametrize(
    ("file", "container"), COMMANDS, ids=[f"{f}-{c['name']}" for f, c in COMMANDS]
)
def test_files_of_options_are_mounted(file: str, container: dict[str, Any]) -> None:
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for argument in container["args"]:
        option, _, value = argument.partition("=")
        if value.startswith("/"):
            assert any(value.startswith(f"{mount}/") for mount in mounts), option


def test_nobody_downloads_twice_and_hubs_do_not_share_a_fleet() -> None:
    counts = {
        pod.workload["metadata"]["name"]: pod.workload["spec"].get("replicas") for pod in PODS
    }
    assert counts["thinwire-hub"] == counts["thinwire-relay"] == 1


def test_what_reports_reaches_hub_and_relay() -> None:
    (replica,) = (pod for pod in PODS if pod.workload["metadata"]["name"] == "thinwire-replica")
    labels = replica.template["metadata"]["labels"].items()
    for file in ("hub.yaml", "relay.yaml"):
        (policy,) = (d for d in documents(file) if d["kind"] == "NetworkPolicy")
        sources = [source for rule in policy["spec"]["ingress"] for source in rule["from"]]
        pods_let_in = [s["podSelector"]["matchLabels"] for s in sources if "podSelector" in s]
        assert any(wanted.items() <= labels for wanted in pods_let_in)


def test_a_replica_is_probed_for_its_own_readiness() -> None:
    (serve,) = (c for file, c in COMMANDS if file == "replicas.yaml")
    assert serve["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert serve["readinessProbe"]["failureThreshold"] == 1
