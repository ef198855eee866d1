"""Which path answers what, over a service."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.router.embeddings import Embeddings
from baton.router.endpoints import Chat, Completions, Endpoint
from baton.router.errors import RouterError
from baton.router.health import Health
from baton.router.http_io import error_response, json_response, reply_headers
from baton.router.messages import Messages
from baton.router.openapi import describe
from baton.router.responses import Responses
from baton.router.service import Service
from baton.router.status import status_routes
from baton.router.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

PLAYGROUND = Path(__file__).with_name("playground.html")


def make_app(service: Service, health: Health) -> FastAPI:
    """Make the routes: plain ones, since bodies are parsed by the service, so that no error ever echoes one."""
    endpoints: dict[str, Endpoint[Any]] = {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completions(),
        "/v1/embeddings": Embeddings(service.config.pooling),
        "/v1/responses": Responses(),
        "/v1/messages": Messages(),
    }
    answers = {path: partial(service.answer, endpoint) for path, endpoint in endpoints.items()}
    routes: list[BaseRoute] = [
        *(Route(path, answers[path], methods=["POST"], name=endpoint.name) for path, endpoint in endpoints.items()),
        *_model_routes(service),
        *_token_routes(service),
        *_operator_routes(service, health),
        *status_routes(service),
    ]
    cors = Middleware(
        CORSMiddleware, allow_origins=service.config.cors_origins, allow_methods=["*"], allow_headers=["*"]
    )
    app = FastAPI(
        title="Baton",
        docs_url=None,
        redoc_url=None,
        routes=routes,
        middleware=[*([cors] if service.config.cors_origins else []), Middleware(Shortcut, answers)],
        exception_handlers={HTTPException: _no_route, RouterError: _refused, Exception: _broken},
    )
    document = describe(routes, model=service.model, version=baton_version())
    app.openapi = lambda: document
    return app


class Shortcut:
    """Takes generation calls past the layers that lead to a route."""

    def __init__(self, app: ASGIApp, answers: Mapping[str, Callable[[Request], Awaitable[Response]]]) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        answer = self._answers.get(scope["path"]) if is_post else None
        if answer is None:
            await self._app(scope, receive, send)
        else:
            response = await answer(Request(scope, receive))
            await response(scope, receive, send)


def _model_routes(service: Service) -> list[Route]:
    created = int(time.time())

    def described() -> dict[str, Any]:
        model = {"id": service.model, "object": "model", "created": created, "owned_by": "baton"}
        return model | {"max_model_len": service.membership.max_context()}

    async def models(request: Request) -> Response:
        service.door.enter(request.headers).leave(0)
        return json_response({"object": "list", "data": [described()]})

    async def model(request: Request) -> Response:
        service.door.enter(request.headers).leave(0)
        service.check_model(request.path_params["name"])
        return json_response(described())

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", model)]


def _token_routes(service: Service) -> list[Route]:
    async def to_tokens(body: TokenizeRequest) -> dict[str, Any]:
        return (await tokenize(body, service.tokenizer, service.membership.max_context())).model_dump()

    async def to_text(body: DetokenizeRequest) -> dict[str, Any]:
        return detokenize(body, service.tokenizer).model_dump()

    async def post_tokenize(request: Request) -> Response:
        return await service.ask("tokenize", TokenizeRequest, request, to_tokens)

    async def post_detokenize(request: Request) -> Response:
        return await service.ask("detokenize", DetokenizeRequest, request, to_text)

    return [
        Route("/tokenize", post_tokenize, methods=["POST"], name="tokenize"),
        Route("/detokenize", post_detokenize, methods=["POST"], name="detokenize"),
    ]


def _operator_routes(service: Service, health: Health) -> list[Route]:
    async def can_serve(request: Request) -> Response:
        if service.is_draining:
            return json_response({"status": "draining"}, 503)
        reason = await health.why_unusable()
        if reason is None:
            return json_response({"status": "ok"})
        members = service.membership
        has_context = members.max_context() is not None  # else a request cannot even be read, let alone wait
        if has_context and members.is_decoder_expected and members.empty_s < service.config.max_queue_s:
            return json_response({"status": "waiting", "reason": reason})  # a request is served, if not at once
        return json_response({"status": "unavailable", "reason": reason}, 503)

    async def live(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def version(request: Request) -> Response:
        return json_response({"version": baton_version()})

    async def metrics(request: Request) -> Response:
        members = service.membership
        service.metrics.set_workers(len(members.decoders()), len(members.prefillers()))
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def playground(request: Request) -> Response:
        return FileResponse(PLAYGROUND, media_type="text/html")

    return [
        Route("/health", can_serve, name="health"),
        Route("/live", live),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/", playground, include_in_schema=False),
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": "no_such_route"}
    return json_response({"error": body}, error.status_code, error.headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return error_response(error, reply_headers(request))


async def _broken(request: Request, error: Exception) -> Response:
    return error_response(RouterError("the gateway failed to serve this request"), reply_headers(request))


def baton_version() -> str:
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        return "source"  # run from a checkout
