"""The gateway process: OpenAI's HTTP API in front of the workers that `set_workers` names.

`make_app` makes the routes over a service; `Gateway` owns everything that lives as long as the process. A Ray actor
only forwards to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import socket
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from baton.actors.messages import WorkerInfo
from baton.router.admission import Admission
from baton.router.config import RouterConfig
from baton.router.dispatch import Dispatcher
from baton.router.errors import RouterError
from baton.router.http_io import error_response, json_response, reply_headers
from baton.router.membership import Membership
from baton.router.metrics import Metrics
from baton.router.policy import make_policy
from baton.router.prefix_index import PrefixIndex
from baton.router.service import Service
from baton.router.tokenizer import Tokenizer
from baton.router.worker_stream import Reconnect

logger = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::", "")


def make_app(service: Service) -> FastAPI:
    """Make the routes. Bodies are parsed by the service, so that no error ever echoes one."""
    app = FastAPI(title="Baton", openapi_url=None)
    _add_openai_routes(app, service)
    _add_operator_routes(app, service)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:  # pyright: ignore[reportUnusedFunction]
        body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": "no_such_route"}
        return json_response({"error": body}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        return error_response(RouterError("the gateway failed to serve this request"), reply_headers(request))

    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.answer("chat", request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.answer("completions", request)

    @app.get("/v1/models")
    async def models() -> Response:  # pyright: ignore[reportUnusedFunction]
        model = {"id": service.model, "object": "model", "created": created, "owned_by": "baton"}
        context = {"max_model_len": service.membership.max_context()}
        return json_response({"object": "list", "data": [model | context]})


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        reason = service.why_unusable()
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


def baton_version() -> str:
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        return "source"  # run from a checkout


class Gateway:
    """Start, feed with workers, stop; each once, on one event loop."""

    def __init__(self, config: RouterConfig, model_path: str | Path, model_name: str) -> None:
        self._config = config
        self._model_path = model_path
        self._model_name = model_name
        self._index = PrefixIndex(predicted_s=config.predicted_prefix_s)
        self.membership = Membership(self._index, Reconnect(config.reconnect_first_s, config.reconnect_max_s))
        self.metrics = Metrics()
        self._tokenizer: Tokenizer | None = None
        self._service: Service | None = None
        self._server: LeavingSignals | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Load the tokenizer, listen, and return the address to send requests to, as http://host:port."""
        self._tokenizer = await asyncio.to_thread(
            Tokenizer.load, self._model_path, num_threads=self._config.tokenizer_threads
        )
        return await self.serve(self._tokenizer)

    async def serve(self, tokenizer: Tokenizer) -> str:
        """Do what `start` does, with a tokenizer that is loaded already and stays the caller's."""
        self._service = self._make_service(tokenizer)
        listener = listen(self._config.host, self._config.port)
        config = uvicorn.Config(
            make_app(self._service),
            http="h11",  # the parser that bounds the size of headers
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = LeavingSignals(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway http")
        host = self._config.advertise_host or self._config.host
        return f"http://{'127.0.0.1' if host in WILDCARDS else host}:{listener.getsockname()[1]}"

    async def set_workers(self, workers: Sequence[WorkerInfo]) -> None:
        """Make `workers` all that requests may go to."""
        await self.membership.set_workers(workers)

    async def stop(self) -> None:
        """Refuse new requests, let the running ones end for `drain_s`, then close everything. Idempotent."""
        if self._service is not None:
            self._service.is_draining = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_s):
                    await self._service.wait_idle()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await self.membership.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _make_service(self, tokenizer: Tokenizer) -> Service:
        config = self._config
        admission = Admission(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens)
        dispatcher = Dispatcher(
            self.membership, self._index, make_policy(config), admission, max_attempts=config.max_attempts
        )
        return Service(config, self._model_name, tokenizer, self.membership, dispatcher, self.metrics)


class LeavingSignals(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process that hosts the gateway."""
        yield


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    listener.setblocking(False)
    return listener
