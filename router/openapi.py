"""The OpenAPI document of the routes: their bodies, replies and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.routing import BaseRoute, Route

from baton.router.bodies import BODIES
from baton.router.embeddings import EmbeddingList
from baton.router.openai_models import Reply
from baton.router.tokenize import DetokenizeReply, TokenizeReply

REF = "#/components/schemas/{name}"
STREAMED = {"chat", "completions", "responses", "messages"}
STATUSES = {
    400: "the request is wrong: `param` names the field",
    401: "the API key is missing or unknown",
    404: "no such model or route",
    405: "no such method here",
    413: "the body is too large",
    429: "the server has no room, or the key has used what it may: `retry-after` says when",
    500: "the gateway or a worker failed",
    503: "no worker can serve now: `retry-after` says when",
    504: "it took too long",
}
Json = dict[str, Any]

ANY_OBJECT = {"type": "object"}
TEXT = {"type": "string"}
EVENTS = {
    "text/event-stream": {
        "schema": {"type": "object", "required": ["data"], "properties": {"data": TEXT, "event": TEXT}}
    }
}
NOT_JSON: Json = {
    "metrics": {"text/plain": {"schema": TEXT}},
    "status": {"text/html": {"schema": TEXT}},
    "status_events": EVENTS,
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}


def describe(routes: Sequence[BaseRoute], *, model: str, version: str) -> Json:
    """Return the OpenAPI document of `routes`; `model` is the one that requests may ask for."""
    replies = {"chat": Reply, "completions": Reply, "embeddings": EmbeddingList}
    asked = {"tokenize": TokenizeReply, "detokenize": DetokenizeReply}
    names = {name: model.__name__ for name, model in (replies | asked).items()}
    schemas: Json = {"Error": ERROR} | _pydantic_schemas(*BODIES.values(), *asked.values())
    for body in BODIES.values():
        schemas[body.__name__]["properties"]["model"] = {"type": "string", "enum": [model]}
    schemas |= msgspec.json.schema_components(set(replies.values()), ref_template=REF)[1]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": {
            route.path.replace(":path}", "}"): {_method(route): _operation(route, names)}
            for route in routes
            if isinstance(route, Route) and route.include_in_schema
        },
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _method(route: Route) -> str:
    return "post" if route.name in BODIES else "get"


def _pydantic_schemas(*models: type[BaseModel]) -> Json:
    pairs: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in models]
    return models_json_schema(pairs, ref_template=REF.format(name="{model}"))[1]["$defs"]


def _operation(route: Route, replies: dict[str, str]) -> Json:
    name = route.name
    content: Json = {"application/json": {"schema": _ref(replies[name]) if name in replies else ANY_OBJECT}}
    content = NOT_JSON.get(name, content | (EVENTS if name in STREAMED else {}))
    error = {"application/json": {"schema": _ref("Error")}}
    failures = {str(status): {"description": what, "content": error} for status, what in STATUSES.items()}
    if name == "health":
        failures["503"] = {"description": "no worker makes progress", "content": content}
    operation: Json = {
        "operationId": name,
        "parameters": [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            for parameter in route.param_convertors
        ],
        "responses": {"200": {"description": "done", "content": content}} | failures,
    }
    if name in BODIES:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(BODIES[name].__name__)}},
        }
        operation["security"] = [{}, {"key": []}]
    return operation


def _ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(name=name)}
