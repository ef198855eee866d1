"""Ray's part: joins or starts a cluster, reserves one placement group per worker, starts actors and kills them.

Only configs, addresses, health and membership pass through Ray; tokens and KV never do.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray's own annotations are partial; what comes out of it is typed again at once.

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import WorkerInfo
from baton.cluster.config import LOCAL, ClusterConfig, WorkerSpec
from baton.cluster.errors import ProcessLostError, ResourcesShortError, StartError
from baton.cluster.gateway_actor import GatewayActor, GatewayBuilder, build_gateway
from baton.cluster.placement import Bundle, check_fits, describe_bundles, describe_nodes
from baton.cluster.processes import GatewayProcess, Life, WorkerProcess
from baton.cluster.worker_actor import WorkerActor, WorkerBuilder, build_worker

T = TypeVar("T")

RESERVE_SLICE_S = 0.5  # how long a cancelled bring-up may hang in Ray
FOR_EVER = {"max_restarts": -1, "max_task_retries": 0}  # a lost call is asked again by the supervisor, never by Ray


class RayProcess(Generic[T]):
    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except RayActorError as error:
            raise ProcessLostError(self.name, str(error), certain=isinstance(error, ActorDiedError)) from error

    async def probe(self) -> Life[T]:
        return await self._ask(self._actor.probe.remote())

    async def stop(self) -> None:
        await self._ask(self._actor.stop.remote())


class RayWorker(RayProcess[WorkerInfo]):
    async def peer_dead(self, incarnation: str) -> None:
        await self._ask(self._actor.peer_dead.remote(incarnation))

    async def counts(self) -> BlockCounts:
        return await self._ask(self._actor.counts.remote())


class RayGateway(RayProcess[str]):
    async def set_workers(self, workers: list[WorkerInfo]) -> None:
        await self._ask(self._actor.set_workers.remote(workers))


class RayLauncher:
    """See `Launcher`. Uses the Ray that this process is already connected to, if any, and leaves that one running."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        worker: WorkerBuilder = build_worker,
        gateway: GatewayBuilder = build_gateway,
        log_to_driver: bool = False,
    ) -> None:
        self._config = config
        self._build_worker = worker
        self._build_gateway = gateway
        self._log_to_driver = log_to_driver
        self._started_ray = False
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: list[Any] = []

    async def place(self, specs: Sequence[WorkerSpec]) -> None:
        self.connect()
        bundles = [Bundle(spec.num_cpus, spec.num_gpus) for spec in specs]
        check_fits(bundles, _nodes())
        try:
            for spec, bundle in zip(specs, bundles, strict=True):
                self._groups[spec.worker_id] = placement_group([bundle.resources()], name=f"baton-{spec.worker_id}")
            await self._until_reserved(bundles)
        except BaseException:
            self._release()
            raise

    def connect(self) -> None:
        """Join Ray, or start it; blocks for seconds, and takes SIGTERM over as Ray does. Idempotent."""
        if ray.is_initialized():
            return
        settings = self._config.ray
        common: dict[str, Any] = {"log_to_driver": self._log_to_driver, "logging_level": logging.ERROR}
        if settings.address == LOCAL:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local server reports to nobody unasked
            store = settings.object_store_bytes
            ray.init(address="local", include_dashboard=False, object_store_memory=store, **common)
        else:
            try:
                ray.init(address=settings.address, **common)
            except ConnectionError as error:
                fix = "start one with 'ray start --head', or set ray.address to local"
                raise StartError("Ray", f"no cluster answers at {settings.address!r}; {fix}") from error
        self._started_ray = True

    async def _until_reserved(self, bundles: Sequence[Bundle]) -> None:
        deadline = time.monotonic() + self._config.ray.placement_timeout_s
        pending = list(self._groups.values())
        while pending := [group for group in pending if not await asyncio.to_thread(group.wait, RESERVE_SLICE_S)]:
            if time.monotonic() > deadline:
                free = Bundle(*(ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")))
                raise ResourcesShortError(
                    describe_bundles(bundles),
                    f"{describe_nodes(_nodes())}, but {len(pending)} not placed with {free} free",
                    "stop what holds the rest, lower a pool's replicas, or raise ray.placement_timeout_s",
                )

    def launch_worker(self, spec: WorkerSpec) -> WorkerProcess:
        place = PlacementGroupSchedulingStrategy(self._groups[spec.worker_id], placement_group_bundle_index=0)
        actor = self._launch(WorkerActor, place, spec.num_cpus, spec.num_gpus).remote(spec, self._build_worker)
        self._actors.append(actor)
        return RayWorker(spec.worker_id, actor)

    def launch_gateway(self) -> GatewayProcess:
        # Beside the command that serves: its port is where the operator expects it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = self._launch(GatewayActor, here, 0, 0).remote(self._config, self._build_gateway)
        self._actors.append(actor)
        return RayGateway("gateway", actor)

    def _launch(self, actor: type, place: object, num_cpus: float, num_gpus: float) -> Any:
        return ray.remote(actor).options(num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=place, **FOR_EVER)

    async def close(self) -> None:
        while self._actors:
            ray.kill(self._actors.pop(), no_restart=True)
        self._release()
        if self._started_ray:
            self._started_ray = False
            ray.shutdown()

    def _release(self) -> None:
        while self._groups:
            remove_placement_group(self._groups.popitem()[1])


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
