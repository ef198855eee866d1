"""The process of one gateway: an actor's thin shell around `baton.router.gateway.Gateway`."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Protocol

from baton.actors.collector import spare_startup
from baton.actors.logs import set_up_logs
from baton.actors.messages import WorkerInfo
from baton.actors.spans import make_spans
from baton.cluster.config import ClusterConfig
from baton.cluster.errors import StartError
from baton.cluster.placement import host_of_this_node
from baton.cluster.processes import Life
from baton.cluster.startup import Startup


class ServingGateway(Protocol):
    """What the shell asks of the gateway inside it. Called from the actor's asyncio loop."""

    async def start(self) -> str: ...

    async def set_workers(self, workers: list[WorkerInfo]) -> None: ...

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
    def __init__(self, config: ClusterConfig, index: int, build: GatewayBuilder) -> None:
        set_up_logs(config.logs, gateway=str(index))
        self._config = config
        self._index = index
        self._build = build
        self._gateway: ServingGateway | None = None
        self._startup = Startup(self._start)

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
        spare_startup()
        return address

    async def probe(self) -> Life[str]:
        return self._startup.probe()

    async def set_workers(self, workers: list[WorkerInfo]) -> None:
        assert self._gateway is not None, "only a ready gateway is told of workers"
        await self._gateway.set_workers(workers)

    async def is_connected(self) -> bool:
        return self._gateway is not None and self._gateway.is_connected()

    async def stop(self) -> None:
        await self._startup.cancel()
        if self._gateway:
            await self._gateway.stop()
