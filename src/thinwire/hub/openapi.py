"""The description of a hub's operations, as OpenAPI 3.1, made from the structs that decode them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from thinwire import __version__
from thinwire.hub.answers import ErrorBody
from thinwire.hub.asking import Parameter
from thinwire.hub.operations import Answered, Operation
from thinwire.report.messages import NAME_PATTERN

_FAULTS = {
    400: "The request is malformed.",
    401: "A token is needed.",
    403: "The token has another role, or is for other replicas.",
    404: "There is no such stream or replica.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not said to be JSON.",
    421: "Without tokens: the Host is no name of this machine.",
    422: "A value is not what it should be.",
    429: "A limit is reached.",
    503: "The hub is about to stop.",
}
_BODY_FAULTS = (408, 413, 415)
_OPEN_FAULTS = (400, 421)


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """The document."""
    kinds: list[Any] = [ErrorBody]
    for operation in operations:
        kinds += [answer.kind for answer in operation.answers.values() if answer.kind is not None]
        kinds += [] if operation.body is None else [operation.body]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_kind = {_key(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = paths.setdefault(operation.path, {})
        path[operation.method.lower()] = _described(operation, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "thinwire hub", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, by_kind: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}").strip(
            "_"
        ),
        "summary": operation.about,
        "responses": {
            str(status): _answer(answer, by_kind) for status, answer in operation.answers.items()
        },
    }
    if operation.role is not None:
        found["security"] = [{"bearer": []}]
        found["description"] = f"Needs a token of the role {operation.role}."
    names = re.findall(r"{(\w+)}", operation.path)
    parameters = [
        *(_parameter("path", _PATH_NAME | {"name": name}) for name in names),
        *(_parameter("query", _fields(one)) for one in operation.parameters),
        *(_parameter("header", _fields(one)) for one in operation.headers),
    ]
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        schema = by_kind[_key(operation.body)]
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    fault = {"application/json": {"schema": by_kind[_key(ErrorBody)]}}
    for status, about in _FAULTS.items():
        if _may_be(status, operation):
            found["responses"][str(status)] = {"description": about, "content": fault}
    return found


def _may_be(status: int, operation: Operation) -> bool:
    if status in _BODY_FAULTS:
        return operation.body is not None
    if status == 503:
        return operation.is_open_ended
    return operation.role is not None or status in _OPEN_FAULTS


def _answer(answer: Answered, by_kind: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": answer.about}
    if answer.kind is not None:
        found["content"] = {"application/json": {"schema": by_kind[_key(answer.kind)]}}
    elif answer.media_type:
        found["content"] = {answer.media_type: {"schema": {"type": "string"}}}
    return found


_PATH_NAME = {
    "about": "Its name.",
    "is_required": True,
    "schema": {"type": "string", "pattern": NAME_PATTERN},
}


def _fields(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind}
    if parameter.minimum is not None:
        schema["minimum"] = parameter.minimum
    if parameter.maximum is not None:
        schema["maximum"] = parameter.maximum
    if parameter.pattern:
        schema["pattern"] = parameter.pattern
    if parameter.default is not None:
        schema["default"] = parameter.default
    return {
        "name": parameter.name,
        "about": parameter.about,
        "is_required": parameter.is_required,
        "schema": schema,
    }


def _parameter(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": fields["name"],
        "in": place,
        "description": fields["about"],
        "required": fields["is_required"],
        "schema": fields["schema"],
    }


def _key(kind: Any) -> str:
    return str(kind)
