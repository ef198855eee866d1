"""The controller as a named, detached Ray actor, and what it leaves in Ray for the one that follows it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray's own annotations are partial; what comes out of it is typed again at once.

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.actors.logs import set_up_logs
from baton.cluster.config import ClusterConfig
from baton.cluster.controller import ClusterStatus, Controller
from baton.cluster.errors import ClusterError
from baton.cluster.gateway_actor import GatewayBuilder, build_gateway
from baton.cluster.ray_launcher import NAMESPACE, RayLauncher
from baton.cluster.worker_actor import WorkerBuilder, build_worker


class RayStore:
    """Ray's own key-value store: it lives as long as the Ray cluster, and survives the node of the controller."""

    def __init__(self, cluster: str) -> None:
        self._key = cluster.encode()

    def load(self) -> bytes | None:
        return internal_kv._internal_kv_get(self._key, namespace=NAMESPACE.encode())  # pyright: ignore[reportPrivateUsage]

    def save(self, state: bytes) -> None:
        internal_kv._internal_kv_put(self._key, state, namespace=NAMESPACE.encode())  # pyright: ignore[reportPrivateUsage]

    def clear(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=NAMESPACE.encode())  # pyright: ignore[reportPrivateUsage]


class ControllerActor(Controller):
    """Ray starts it again when it dies; the constructor then finds what the one before has stored.

    Whatever the controller can be asked, Ray runs in the actor's event loop.
    """

    def __init__(self, config: ClusterConfig, worker: WorkerBuilder, gateway: GatewayBuilder) -> None:
        set_up_logs(config.logs, controller=config.name)
        launcher = RayLauncher(config, worker=worker, gateway=gateway, detached=True)
        super().__init__(config, launcher, store=RayStore(config.name))
        # Nobody calls a restarted one: it must go on by itself.
        self._starting = asyncio.get_running_loop().create_task(self.start())

    def status(self) -> ClusterStatus:
        """Raises ClusterError when the start has failed."""
        if self._starting.done():
            try:
                self._starting.result()
            except ClusterError as error:
                raise ClusterError(str(error)) from None  # crosses a process: an error with one argument does so whole
        return super().status()

    async def stop(self) -> None:
        self._starting.cancel()
        await asyncio.wait([self._starting])
        await super().stop()


def controller_name(cluster: str) -> str:
    return f"{cluster}/controller"


def find_controller(cluster: str) -> Any | None:
    try:
        return ray.get_actor(controller_name(cluster), namespace=NAMESPACE)
    except ValueError:
        return None


def launch_controller(
    config: ClusterConfig, *, worker: WorkerBuilder = build_worker, gateway: GatewayBuilder = build_gateway
) -> Any:
    """Start the controller on this node. It outlives the command, and itself."""
    RayStore(config.name).clear()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(ControllerActor).options(
        name=controller_name(config.name),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=here,
    )
    return actor.remote(config, worker, gateway)
