"""Which path answers what, over a service."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse

from baton.router.embeddings import Embeddings
from baton.router.endpoints import Chat, Completions, Endpoint
from baton.router.errors import RouterError
from baton.router.health import Health
from baton.router.http_io import error_response, json_response, reply_headers
from baton.router.openapi import describe
from baton.router.service import Service
from baton.router.status import status_routes
from baton.router.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

PLAYGROUND = Path(__file__).with_name("playground.html")


def make_app(service: Service, health: Health) -> FastAPI:
    """Make the routes. Bodies are parsed by the service, so that no error ever echoes one."""
    app = FastAPI(title="Baton", version=baton_version(), docs_url=None, redoc_url=None)
    endpoints: dict[str, Endpoint[Any]] = {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completions(),
        "/v1/embeddings": Embeddings(service.config.pooling),
    }
    for path, endpoint in endpoints.items():
        app.add_api_route(path, _answering(service, endpoint), methods=["POST"], name=endpoint.name)
    _add_model_routes(app, service)
    _add_token_routes(app, service)
    _add_operator_routes(app, service, health)
    app.router.routes.extend(status_routes(service))
    _add_errors(app)
    describe(app)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.config.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _answering(service: Service, endpoint: Endpoint[Any]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await service.answer(endpoint, request)

    return answer


def _add_model_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def described() -> dict[str, Any]:
        model = {"id": service.model, "object": "model", "created": created, "owned_by": "baton"}
        return model | {"max_model_len": service.membership.max_context()}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        service.door.enter(request.headers).leave(0)
        return json_response({"object": "list", "data": [described()]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        service.door.enter(request.headers).leave(0)
        service.check_model(name)
        return json_response(described())


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", name="tokenize")
    async def to_tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        async def reply(body: TokenizeRequest) -> dict[str, Any]:
            return (await tokenize(body, service.tokenizer, service.membership.max_context())).model_dump()

        return await service.ask("tokenize", TokenizeRequest, request, reply)

    @app.post("/detokenize", name="detokenize")
    async def to_text(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        async def reply(body: DetokenizeRequest) -> dict[str, Any]:
            return detokenize(body, service.tokenizer).model_dump()

        return await service.ask("detokenize", DetokenizeRequest, request, reply)


def _add_operator_routes(app: FastAPI, service: Service, health: Health) -> None:
    @app.get("/health")
    async def can_serve() -> Response:  # pyright: ignore[reportUnusedFunction]
        reason = "this gateway is shutting down" if service.is_draining else await health.why_unusable()
        if reason is None:
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable", "reason": reason}, 503)

    @app.get("/live")
    async def live() -> Response:  # pyright: ignore[reportUnusedFunction]
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:  # pyright: ignore[reportUnusedFunction]
        return json_response({"version": baton_version()})

    @app.get("/metrics")
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        members = service.membership
        service.metrics.set_workers(len(members.decoders()), len(members.prefillers()))
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:  # pyright: ignore[reportUnusedFunction]
        return FileResponse(PLAYGROUND, media_type="text/html")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:  # pyright: ignore[reportUnusedFunction]
        body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": "no_such_route"}
        return json_response({"error": body}, error.status_code, error.headers)

    @app.exception_handler(RouterError)
    async def refused(request: Request, error: RouterError) -> Response:  # pyright: ignore[reportUnusedFunction]
        return error_response(error, reply_headers(request))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        return error_response(RouterError("the gateway failed to serve this request"), reply_headers(request))


def baton_version() -> str:
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        return "source"  # run from a checkout
