"""Ray's part: joins or starts a cluster, reserves one placement group per worker, starts actors and kills them.

Only configs, addresses, health and membership pass through Ray; tokens and KV never do.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray's own annotations are partial; what comes out of it is typed again at once.

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, RayActorError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import Role, WorkerInfo
from baton.cluster.config import LOCAL, ClusterConfig, WorkerSpec
from baton.cluster.errors import ProcessLostError, ResourcesShortError, StartError
from baton.cluster.gateway_actor import GatewayBuilder, build_gateway, gateway_actor_class
from baton.cluster.placement import Bundle, Node, Spread, check_fits, describe_bundles, describe_nodes
from baton.cluster.processes import GatewayProcess, Kept, Life, News, WorkerProcess
from baton.cluster.worker_actor import WorkerActor, WorkerBuilder, build_worker

if TYPE_CHECKING:
    from baton.router.usage import Usage


T = TypeVar("T")

NAMESPACE = "baton"
DEATH_POLL_S = 0.05
RESERVE_SLICE_S = 0.5  # how long a cancelled bring-up may hang in Ray
DEATH_S = 10.0  # how long a killed process may take to be known dead
ONCE = {"max_restarts": 0, "max_task_retries": 0}  # what is lost is begun again by the supervisor, never by Ray


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

    async def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_S):
                while not await self._is_dead():
                    await asyncio.sleep(DEATH_POLL_S)

    async def _is_dead(self) -> bool:
        try:
            await self.probe()
        except ProcessLostError as lost:
            return lost.certain
        return False


class RayWorker(RayProcess[WorkerInfo]):
    async def peer_dead(self, incarnation: str) -> None:
        await self._ask(self._actor.peer_dead.remote(incarnation))

    async def counts(self) -> BlockCounts:
        return await self._ask(self._actor.counts.remote())

    async def drain(self, wait_s: float) -> None:
        await self._ask(self._actor.drain.remote(wait_s))

    async def set_role(self, role: Role) -> WorkerInfo:
        return await self._ask(self._actor.set_role.remote(role))

    async def profile(self, seconds: float) -> bytes:
        return await self._ask(self._actor.profile.remote(seconds))


class RayGateway(RayProcess[str]):
    async def set_workers(self, news: News) -> None:
        await self._ask(self._actor.set_workers.remote(news))

    async def usage(self) -> Usage:
        return await self._ask(self._actor.usage.remote())

    async def is_connected(self) -> bool:
        return await self._ask(self._actor.is_connected.remote())


class RayLauncher:
    """See `Launcher`. Uses the Ray that this process is already connected to, if any, and leaves that one running.

    `detached` processes outlive this one: another launcher with the same cluster name finds them. The others end with
    the process that launched them.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        worker: WorkerBuilder = build_worker,
        gateway: GatewayBuilder = build_gateway,
        log_to_driver: bool = False,
        detached: bool = False,
    ) -> None:
        self._config = config
        self._build_worker = worker
        self._build_gateway = gateway
        self._log_to_driver = log_to_driver
        self._lifetime = "detached" if detached else None
        self._started_ray = False
        self._groups: dict[str, PlacementGroup] = {}
        self._spread = Spread()
        self._kept: dict[str, PlacementGroup | None] = {}  # by the reservation's name; None: it is gone
        self._bad_nodes: frozenset[str] = frozenset()
        self._has_asked = False  # the autoscaler, for nodes
        self._actors: dict[str, Any] = {}

    def connect(self) -> None:
        """Join Ray, or start it, once for the whole process."""
        self._started_ray |= connect(self._config, log_to_driver=self._log_to_driver)

    async def place(self, specs: Sequence[WorkerSpec]) -> None:
        self.connect()
        new = [spec for spec in specs if spec.worker_id not in self._groups]
        bundles = [Bundle(spec.num_cpus, spec.num_gpus) for spec in new]
        check_fits(bundles, [node.resources for node in self._nodes()])
        try:
            for spec, bundle in zip(new, bundles, strict=True):
                self._groups[spec.worker_id] = self._reserve(spec, bundle)
            await self._until_reserved([self._groups[spec.worker_id] for spec in new], bundles)
        except BaseException:
            for spec in new:
                self.release(spec.worker_id)
            raise

    def _reserve(self, spec: WorkerSpec, bundle: Bundle) -> PlacementGroup:
        others = {"ray.io/node-id": f"!in({','.join(sorted(self._bad_nodes))})"}
        return placement_group(
            [bundle.resources()],
            strategy="STRICT_PACK",  # of one bundle; Ray takes a wish for a node with no other strategy
            name=self._group_name(spec.worker_id, spec.place),
            lifetime=self._lifetime,
            _soft_target_node_id=self._spread.choose(spec.worker_id, spec.role, bundle, self._nodes()),
            bundle_label_selector=[others] if self._bad_nodes else None,  # pyright: ignore[reportArgumentType]
        )

    async def _until_reserved(self, groups: Sequence[PlacementGroup], bundles: Sequence[Bundle]) -> None:
        deadline = time.monotonic() + self._config.ray.placement_timeout_s
        pending = list(groups)
        while pending := [group for group in pending if not await asyncio.to_thread(group.wait, RESERVE_SLICE_S)]:
            if time.monotonic() > deadline:
                free = Bundle(*(ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")))
                nodes = describe_nodes([node.resources for node in self._nodes()])
                fix = "stop what holds the rest, lower a pool's replicas, or raise ray.placement_timeout_s"
                if self._kept:
                    fix += f"; {len(self._kept)} are in quarantine ('baton status', 'baton release')"
                present = f"{nodes}, but {len(pending)} not placed with {free} free"
                raise ResourcesShortError(describe_bundles(bundles), present, fix)

    def launch_worker(self, spec: WorkerSpec) -> WorkerProcess:
        place = PlacementGroupSchedulingStrategy(self._groups[spec.worker_id], placement_group_bundle_index=0)
        options = self._options(spec.worker_id, place, spec.num_cpus, spec.num_gpus)
        actor = ray.remote(WorkerActor).options(**options).remote(spec, self._build_worker)
        self._actors[spec.worker_id] = actor
        return RayWorker(spec.worker_id, actor)

    def launch_gateway(self, index: int) -> GatewayProcess:
        # Beside the command or controller that serves: its port is where the operator expects it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        name = f"gateway-{index}"
        actor = ray.remote(gateway_actor_class()).options(**self._options(name, here, 0, 0))
        self._actors[name] = actor.remote(self._config, index, self._build_gateway)
        return RayGateway(name, self._actors[name])

    def _options(self, name: str, place: object, num_cpus: float, num_gpus: float) -> dict[str, Any]:
        found = {"name": self._actor_name(name), "lifetime": self._lifetime, "namespace": NAMESPACE}
        where = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": place}
        return where | ONCE | (found if self._lifetime else {})

    def find_worker(self, spec: WorkerSpec) -> WorkerProcess | None:
        try:
            self._groups[spec.worker_id] = get_placement_group(self._group_name(spec.worker_id, spec.place))
        except ValueError:
            return None
        actor = self._find(spec.worker_id)
        return None if actor is None else RayWorker(spec.worker_id, actor)

    def find_gateway(self, index: int) -> GatewayProcess | None:
        actor = self._find(f"gateway-{index}")
        return None if actor is None else RayGateway(f"gateway-{index}", actor)

    def _find(self, name: str) -> Any | None:
        try:
            self._actors[name] = ray.get_actor(self._actor_name(name), namespace=NAMESPACE)
        except ValueError:
            return None
        return self._actors[name]

    def _actor_name(self, name: str) -> str:
        return f"{self._config.name}/{name}"

    def _group_name(self, worker_id: str, place: int) -> str:
        return f"{self._config.name}-{worker_id}.{place}"

    def _nodes(self) -> list[Node]:
        """List those that a worker may be put on."""
        return [node for node in _alive() if node.id not in self._bad_nodes]

    def release(self, worker_id: str) -> None:
        self._spread.forget(worker_id)
        group = self._groups.pop(worker_id, None)
        if group is not None and group not in self._kept.values():
            remove_placement_group(group)

    def keep(self, places: Collection[Kept]) -> None:
        """A reservation holds its GPUs. A worker without any is kept from its node altogether."""
        names = {self._group_name(bad.worker_id, bad.number) for bad in places}
        for name in names - self._kept.keys():
            try:
                self._kept[name] = get_placement_group(name)
            except ValueError:
                self._kept[name] = None
        for name in self._kept.keys() - names:
            if (group := self._kept.pop(name)) is not None:
                remove_placement_group(group)
        self._bad_nodes = frozenset(bad.place.node_id for bad in places if not bad.place.devices)

    def request(self, specs: Sequence[WorkerSpec]) -> None:
        """Ray's autoscaler holds what was asked for last until it is asked for something else."""
        self._has_asked = bool(specs)
        request_resources(bundles=[Bundle(spec.num_cpus, spec.num_gpus).resources() for spec in specs])

    def is_there(self, node_id: str) -> bool:
        return any(node.id == node_id for node in _alive())

    async def close(self) -> None:
        while self._actors:
            ray.kill(self._actors.popitem()[1], no_restart=True)
        self.keep(())
        if self._has_asked:
            self.request(())
        for name in list(self._groups):
            self.release(name)
        if self._started_ray:
            self._started_ray = False
            ray.shutdown()


def connect(config: ClusterConfig, *, log_to_driver: bool = False) -> bool:
    """Join Ray, or start it; blocks for seconds, and takes SIGTERM over as Ray does. False if that was done before."""
    if ray.is_initialized():
        return False
    settings = config.ray
    common: dict[str, Any] = {
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        "namespace": NAMESPACE,
    }
    if settings.address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local server reports to nobody unasked
        store = settings.object_store_bytes
        ray.init(address="local", include_dashboard=False, object_store_memory=store, **common)
        return True
    try:
        ray.init(address=settings.address, **common)
    except ConnectionError as error:
        fix = "start one with 'ray start --head', or set ray.address to local"
        raise StartError("Ray", f"no cluster answers at {settings.address!r}; {fix}") from error
    return True


def _alive() -> list[Node]:
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    return [Node(node["NodeID"], node["Resources"]) for node in nodes if node["Alive"]]
