"""The OpenAPI document: what the routes cannot tell FastAPI, since they read their bodies by themselves."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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


def describe(app: FastAPI) -> None:
    """Make /openapi.json tell the bodies, replies and errors of every route."""
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(_document(app))
        return document

    app.openapi = openapi


def _document(app: FastAPI) -> dict[str, Any]:
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    document = get_openapi(title=app.title, version=app.version, routes=routes)
    replies = {"chat": Reply, "completions": Reply, "embeddings": EmbeddingList}
    asked = {"tokenize": TokenizeReply, "detokenize": DetokenizeReply}
    schemas = {"Error": ERROR} | _pydantic_schemas(*BODIES.values(), *asked.values())
    schemas |= msgspec.json.schema_components(set(replies.values()), ref_template=REF)[1]
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    document["components"] = {"schemas": schemas, "securitySchemes": keys}
    names = {name: model.__name__ for name, model in (replies | asked).items()}
    for route in routes:
        for method in route.methods:
            _complete(document["paths"][route.path][method.lower()], route.name, names)
    return document


def _pydantic_schemas(*models: type[BaseModel]) -> dict[str, Any]:
    pairs = [(model, "validation") for model in models]
    return models_json_schema(pairs, ref_template=REF.format(name="{model}"))[1]["$defs"]


def _complete(operation: dict[str, Any], name: str, replies: dict[str, str]) -> None:
    schema = _ref(replies[name]) if name in replies else {"type": "object"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if name in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if name == "metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if name in BODIES:
        body = {"application/json": {"schema": _ref(BODIES[name].__name__)}}
        operation["requestBody"] = {"required": True, "content": body}
        operation["security"] = [{}, {"key": []}]
    headers = {
        "x-request-id": {"description": "the client's, if it is harmless, or ours", "schema": {"type": "string"}}
    }
    error = {"application/json": {"schema": _ref("Error")}}
    operation["responses"] = {"200": {"description": "done", "content": content, "headers": headers}} | {
        str(status): {"description": what, "content": error} for status, what in STATUSES.items()
    }
    if name == "can_serve":
        operation["responses"]["503"]["content"] = content


def _ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(name=name)}
