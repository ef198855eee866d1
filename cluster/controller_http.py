"""The controller's HTTP: its metrics, Prometheus's service discovery of everybody's, and the cluster's status.

Read-only; whoever may change a cluster goes through Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.cluster.config import ControllerConfig
from baton.cluster.placement import host_of_this_node
from baton.router.gateway import WILDCARDS, LeavingSignals, listen

if TYPE_CHECKING:
    from baton.cluster.controller import ClusterStatus
    from baton.cluster.watched import ProcessStatus


class ControllerServer:
    def __init__(
        self, config: ControllerConfig, registry: CollectorRegistry, status: Callable[[], ClusterStatus]
    ) -> None:
        self.address = ""  # host:port, once started
        self._config = config
        self._registry = registry
        self._status = status
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        routes = [Route("/metrics", self._metrics), Route("/targets", self._targets), Route("/status", self._show)]
        listener = listen(self._config.host, self._config.port)
        app = Starlette(routes=routes)
        host = host_of_this_node() if self._config.host in WILDCARDS else self._config.host
        self.address = f"{host}:{listener.getsockname()[1]}"
        settings = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
        self._server = LeavingSignals(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="controller http")

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = None

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _targets(self, request: Request) -> Response:
        return _json(targets(self._status()))

    async def _show(self, request: Request) -> Response:
        return _json(msgspec.to_builtins(self._status()))


def targets(status: ClusterStatus) -> list[dict[str, Any]]:
    """Name every /metrics there is, as Prometheus's http_sd_config reads it."""
    controller = {"targets": [status.controller], "labels": {"process": "controller", "kind": "controller"}}
    return [controller] + [
        {"targets": [process.metrics_address], "labels": _labels(process)}
        for process in status.processes
        if process.metrics_address is not None
    ]


def _labels(process: ProcessStatus) -> dict[str, str]:
    is_tls = process.kind == "gateway" and (process.address or "").startswith("https:")
    return {"process": process.name, "kind": process.kind} | ({"__scheme__": "https"} if is_tls else {})


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
