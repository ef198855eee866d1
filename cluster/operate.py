"""What an operator's commands do with a running cluster: find its controller in Ray, ask it, wait for the result."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray's own annotations are partial; what comes out of it is typed again at once.

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from baton.actors.messages import Role
from baton.cluster.config import LOCAL, ClusterConfig
from baton.cluster.controller import ClusterStatus
from baton.cluster.controller_actor import RayStore, find_controller, launch_controller
from baton.cluster.errors import ClusterError, OperationRefusedError, ProcessLostError, StartError
from baton.cluster.gateway_actor import GatewayBuilder, build_gateway
from baton.cluster.planning import Plan
from baton.cluster.ray_launcher import NAMESPACE
from baton.cluster.worker_actor import WorkerBuilder, build_worker

POLL_S = 0.3
LEFT_S = 15.0  # for killed processes to be gone

Show = Callable[[ClusterStatus], None]


class Operator:
    """One cluster, by name, in the Ray that this process is connected to (`join`)."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def up(
        self,
        config: ClusterConfig,
        *,
        worker: WorkerBuilder = build_worker,
        gateway: GatewayBuilder = build_gateway,
    ) -> bool:
        """Start the controller, or give the running one another configuration; say whether it is a new one."""
        running = find_controller(self._name)
        if running is None:
            launch_controller(config, worker=worker, gateway=gateway)
        else:
            await _ask(running.apply.remote(config))
        return running is None

    async def down(self) -> None:
        """Take everything down, even what a lost controller has left."""
        controller = find_controller(self._name)
        if controller is not None:
            try:
                await _ask(controller.stop.remote())
            finally:
                ray.kill(controller, no_restart=True)
        self._sweep()
        deadline = time.monotonic() + LEFT_S
        while self._actors():
            if time.monotonic() > deadline:
                raise ClusterError(f"still there: {', '.join(self._actors())}; 'ray stop' ends them")
            await asyncio.sleep(POLL_S)

    def _sweep(self) -> None:
        for name in self._actors():
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        for group in cast("dict[str, dict[str, str]]", ray.util.placement_group_table()).values():
            if group["name"].startswith(f"{self._name}-") and group["state"] != "REMOVED":
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
        RayStore(self._name).clear()

    def _actors(self) -> list[str]:
        named = cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True))
        mine = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
        return [name for name in mine if name.startswith(f"{self._name}/")]

    async def status(self) -> ClusterStatus:
        return await _ask(self._controller().status.remote())

    async def until_settled(self, timeout_s: float, show: Show = lambda status: None) -> ClusterStatus:
        """Wait until everything serves as it was asked for. Raises what the controller's start has failed with."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status = await self.status()
            except ProcessLostError:  # Ray starts the controller again
                await asyncio.sleep(POLL_S)
                continue
            show(status)
            if status.is_settled:
                return status
            if time.monotonic() > deadline:
                late = [
                    f"{p.name} is {p.state} ({p.failure or 'no word why'})"
                    for p in status.processes
                    if p.state != "ready"
                ]
                raise StartError(self._name, f"not as wanted after {timeout_s:g} s: {'; '.join(late)}")
            await asyncio.sleep(POLL_S)

    async def plan(self) -> Plan:
        return await _ask(self._controller().plan.remote())

    async def scale(self, role: Role, replicas: int) -> None:
        await _ask(self._controller().scale.remote(role, replicas))

    async def drain(self, worker_id: str) -> None:
        await _ask(self._controller().drain.remote(worker_id))

    async def release(self, place: str) -> None:
        await _ask(self._controller().release.remote(place))

    async def restart(self, worker_ids: list[str]) -> None:
        await _ask(self._controller().restart.remote(worker_ids))

    async def switch_role(self, worker_id: str, role: Role) -> None:
        await _ask(self._controller().switch_role.remote(worker_id, role))

    async def profile(self, worker_id: str, seconds: float) -> bytes:
        return await _ask(self._controller().profile.remote(worker_id, seconds))

    def logs(self, process: str, *, num_lines: int, follow: bool) -> Any:
        """Yield the process's log in pieces, wherever in the cluster it runs."""
        from ray.util.state import get_log

        try:
            actor = ray.get_actor(f"{self._name}/{process}", namespace=NAMESPACE)
        except ValueError:
            raise OperationRefusedError(f"no process {process!r} runs; there are {', '.join(self._actors())}") from None
        actor_id: str = actor._actor_id.hex()  # pyright: ignore[reportPrivateUsage]
        return get_log(actor_id=actor_id, suffix="err", tail=num_lines, follow=follow, timeout=86_400)

    def _controller(self) -> Any:
        controller = find_controller(self._name)
        if controller is None:
            raise OperationRefusedError(f"no cluster {self._name!r} is up here; 'baton up CONFIG' brings one up")
        return controller


def join(address: str) -> None:
    """Connect to the running Ray at `address`."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise StartError("Ray", f"no cluster answers at {address!r}; start one with 'ray start --head'") from error


def for_running_ray(config: ClusterConfig) -> ClusterConfig:
    """`baton up` never starts Ray: what says `local` means the one that runs here."""
    if config.ray.address != LOCAL:
        return config
    return config.model_copy(update={"ray": config.ray.model_copy(update={"address": "auto"})})


async def _ask(answer: Any) -> Any:
    """Raise the controller's own ClusterErrors as such."""
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise ProcessLostError("the controller", str(error), certain=False) from error
