"""The process of one gateway: an actor's thin shell around `baton.router.gateway.Gateway`."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from baton.actors.collector import spare_startup
from baton.actors.logs import set_up_logs
from baton.actors.messages import WorkerInfo
from baton.actors.spans import make_spans
from baton.cluster.config import ClusterConfig
from baton.cluster.errors import StartError
from baton.cluster.placement import host_of_this_node
from baton.cluster.processes import Life, News
from baton.cluster.sigterm import Sigterm
from baton.cluster.startup import Startup

if TYPE_CHECKING:
    from baton.router.usage import Usage


logger = logging.getLogger(__name__)


class ServingGateway(Protocol):
    """What the shell asks of the gateway inside it. Called from the actor's asyncio loop."""

    async def start(self) -> str: ...

    async def set_workers(self, workers: Sequence[WorkerInfo], *, is_decoder_coming: bool = False) -> None: ...

    def usage(self) -> Usage: ...

    def is_connected(self) -> bool: ...

    async def stop(self) -> None: ...


GatewayBuilder = Callable[[ClusterConfig, int], ServingGateway]


def build_gateway(config: ClusterConfig, index: int) -> ServingGateway:
    """Make the `index`-th gateway of the cluster."""
    from baton.actors.engine.model_reference import resolve_model
    from baton.router.gateway import WILDCARDS, Gateway

    router = config.gateway_router(index)
    if router.host in WILDCARDS and router.advertise_host is None:
        router = router.model_copy(update={"advertise_host": host_of_this_node()})
    gateway = Gateway(router, resolve_model(config.worker.model), config.worker.served_name)
    gateway.spans = make_spans(config.tracing, f"gateway-{index}")
    return gateway


class GatewayActor:
    """On SIGTERM it takes no new requests, lets the running ones end within `router.drain_s`, and ends with 0."""

    sigterm = Sigterm()  # of the class that `gateway_actor_class` makes, the process's own

    def __init__(self, config: ClusterConfig, index: int, build: GatewayBuilder) -> None:
        set_up_logs(config.logs, gateway=str(index))
        self._config = config
        self._index = index
        self._build = build
        self._gateway: ServingGateway | None = None
        self._startup = Startup(self._start)
        self._leaving: asyncio.Future[None] | None = None

    async def _start(self) -> str:
        gateway = self._build(self._config, self._index)
        try:
            address = await gateway.start()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            router = self._config.gateway_router(self._index)
            fix = f"port {router.port} of {router.host} is in use; set router.port to a free one, or to 0 for any"
            raise StartError("gateway", fix) from error
        self._gateway = gateway
        loop = asyncio.get_running_loop()
        self.sigterm.listener = lambda: loop.call_soon_threadsafe(self._begin_to_leave)
        spare_startup()
        return address

    def _begin_to_leave(self) -> None:
        if self._leaving is not None:
            os._exit(0)  # a second signal cuts the draining short
        logger.info("SIGTERM: no new requests; this process ends when the running ones have")
        self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        try:
            await self.stop()
        finally:
            os._exit(0)

    async def probe(self) -> Life[str]:
        return replace(self._startup.probe(), is_leaving=self._leaving is not None, pid=os.getpid())

    async def set_workers(self, news: News) -> None:
        assert self._gateway is not None, "only a ready gateway is told of workers"
        await self._gateway.set_workers(news.workers, is_decoder_coming=news.is_decoder_coming)

    async def usage(self) -> Usage:
        assert self._gateway is not None, "only a ready gateway has served anything"
        return self._gateway.usage()

    async def is_connected(self) -> bool:
        return self._gateway is not None and self._gateway.is_connected()

    async def stop(self) -> None:
        await self._startup.cancel()
        if self._gateway:
            await self._gateway.stop()


def gateway_actor_class() -> type[GatewayActor]:
    """Make the class that Ray is given. It is pickled whole, not by its name: see `Sigterm`."""
    return type(GatewayActor.__name__, (GatewayActor,), {"sigterm": Sigterm()})
