"""The hub's description is true: schemathesis asks what it allows, and what it does not."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

if importlib.util.find_spec("schemathesis") is None:
    warnings.warn("schemathesis is not installed: openapi.json was NOT fuzzed", stacklevel=1)
    pytest.skip("schemathesis is not installed", allow_module_level=True)

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode

from thinwire.hub import Hub

from .making import calling, head_at, training

_ENDLESS = "/v1/streams/{stream}/events"
_CHECKS = [
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.negative_data_rejection,
    schemathesis.checks.positive_data_acceptance,
]
_WAIT = "/v1/streams/{stream}/wait"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("hub")
    with training(folder) as trainer:
        trainer.publish(step=1, identity="run-1")
        # No tokens: what is behind them is what is to be asked.
        with calling(Hub({"policy": trainer.url}, poll_s=0.2)) as made:
            head_at(made, 1)
            made.post("/v1/streams/policy/heartbeats", json={"replica": "a", "region": "eu"})
            yield made


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def test_the_document(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = [
        operation["operationId"]
        for path in document["paths"].values()
        for operation in path.values()
    ]
    assert len(names) == len(set(names))
    for path in ("/health", _ENDLESS, _WAIT, "/v1/streams/{stream}/heartbeats", "/metrics"):
        assert path in document["paths"]
    security = document["paths"]["/v1/streams/{stream}/heartbeats"]["post"]
    assert security["security"] == [{"bearer": []}]
    assert "follow" in security["description"]


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
def test_what_it_says_is_so(client: httpx.Client, document: dict[str, Any]) -> None:
    """Every operation, with bodies and parameters that fit and that do not."""
    open_document = copy.deepcopy(document)
    for path in open_document["paths"].values():
        for described in path.values():
            # This hub has no tokens: that none is given is no fault.
            described.pop("security", None)
    schema = schemathesis.openapi.from_dict(open_document)
    asked = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path != _ENDLESS:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                _ask(operation, mode, client)
            asked.add(operation.label)
    assert len(asked) == sum(map(len, document["paths"].values())) - 1
    answered = client.get("/metrics").text
    for status in ("200", "422"):
        assert f'{{method="POST",route="/v1/streams/{{stream}}/heartbeats",status="{status}"}}' in (
            answered
        )


def _ask(operation: Any, mode: GenerationMode, client: httpx.Client) -> None:
    options: dict[str, Any] = {}
    # A body that is wrong is looked at only where the stream is there.
    if mode is GenerationMode.POSITIVE or operation.body:
        names = {"stream": "policy", "replica": "a"}
        options["path_parameters"] = {
            k: v for k, v in names.items() if f"{{{k}}}" in operation.path
        }
        if operation.path == _WAIT:
            options["query"] = {"timeout_s": 0}
        if operation.path.startswith("/hot_load"):
            options["headers"] = {"fireworks-deployment": "policy"}

    @settings(
        # Of many parameters each example shows one or two.
        max_examples=8 if operation.query and mode is GenerationMode.POSITIVE else 5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode, **options))
    def ask(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = _whole(case.body)
        answer = case.call(base_url=str(client.base_url))
        case.validate_response(answer, checks=_CHECKS)

    try:
        ask()
    except Unsatisfiable:
        # There is nothing that would be wrong.
        assert mode is GenerationMode.NEGATIVE


def _whole(body: Any) -> Any:
    """A body with 5 in place of 5.0, which is an integer to JSON Schema, and to nobody else."""
    if isinstance(body, dict):
        return {name: _whole(value) for name, value in body.items()}
    if isinstance(body, list):
        return [_whole(value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body
