"""The controller of a cluster: an operator's requests become a new `Desired`, the supervisor makes it true.

A plain class. `baton serve` has it in its own process; `baton up` has it in a detached Ray actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.actors.messages import Role
from baton.cluster.config import ClusterConfig
from baton.cluster.controller_http import ControllerServer
from baton.cluster.controller_metrics import ControllerMetrics
from baton.cluster.desired import Desired
from baton.cluster.errors import OperationRefusedError
from baton.cluster.planning import Plan, Planning
from baton.cluster.processes import Launcher, Store
from baton.cluster.quarantine import Quarantined
from baton.cluster.supervisor import Clock, Listener, Supervisor, SystemClock
from baton.cluster.watched import ProcessStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """`is_settled`: everything serves, and is as was asked for."""

    name: str
    model: str
    controller: str  # host:port of /metrics, /targets and /status
    gateways: tuple[str, ...]  # addresses of those that serve
    desired: dict[Role, int]
    is_settled: bool
    processes: tuple[ProcessStatus, ...]
    quarantine: tuple[Quarantined, ...]


class Controller:
    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        on_change: Listener = lambda statuses: None,
    ) -> None:
        self._config = config
        self.metrics = ControllerMetrics()
        self._on_change = on_change
        clock = clock or SystemClock()
        self.supervisor = Supervisor(
            Desired.of(config), launcher, store=store, clock=clock, on_change=self._note_change
        )
        self.planning = Planning(config.planner, self.supervisor, launcher, clock, self.metrics.set_plan)
        self._server = ControllerServer(config.controller, self.metrics.registry, self.status)
        self._tasks: list[asyncio.Task[None]] = []

    # Life.

    async def start(self) -> str:
        """Bring the cluster up, or go on with one that is; return the first gateway's address.

        A cluster that was up before need not be whole: the address is then that of whichever gateway serves first.
        """
        await self._server.start()
        try:
            if self.supervisor.resume():
                await self.supervisor.tick()
                address = next(iter(self.supervisor.addresses()), "")
            else:
                address = await self.supervisor.start()
        except BaseException:
            await self._server.stop()
            raise
        self._tasks.append(asyncio.create_task(self.supervisor.run()))
        if self._config.planner.mode != "off":
            self._tasks.append(asyncio.create_task(self.planning.run()))
        return address

    async def stop(self) -> None:
        """Take the cluster down. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.supervisor.stop()
        await self._server.stop()

    # What an operator may ask.

    def status(self) -> ClusterStatus:
        desired = self.supervisor.desired
        return ClusterStatus(
            name=self._config.name,
            model=self._config.worker.served_name,
            controller=self._server.address,
            gateways=tuple(self.supervisor.addresses()),
            desired={role: len(desired.of_role(role)) for role in desired.config.pools},
            is_settled=self.supervisor.is_settled(),
            processes=self.supervisor.statuses(),
            quarantine=desired.quarantine,
        )

    def plan(self) -> Plan:
        """Say what the planner decided last."""
        return self.planning.last

    def scale(self, role: Role, replicas: int) -> None:
        self.supervisor.desired = self.supervisor.desired.scaled(role, replicas)

    def drain(self, worker_id: str) -> None:
        """Take one worker away in order; its pool is smaller by one from now on."""
        self.supervisor.desired = self.supervisor.desired.without(worker_id)

    def release(self, place: str) -> None:
        """Let workers be put into a place that was in quarantine."""
        self.supervisor.desired = self.supervisor.desired.released(place)

    def switch_role(self, worker_id: str, role: Role) -> None:
        self.supervisor.desired = self.supervisor.desired.with_role(worker_id, role)

    def restart(self, worker_ids: Sequence[str]) -> None:
        """Start these workers anew, or all, one after the other, each once the others serve."""
        desired = self.supervisor.desired
        chosen = worker_ids or [spec.worker_id for spec in desired.workers]
        self.supervisor.desired = desired.restarted(chosen)

    def apply(self, config: ClusterConfig) -> None:
        """Take over another configuration's pools and workers; what differs is started anew, one at a time."""
        running = self.supervisor.desired.config
        for field in ("router", "gateways", "health", "controller", "planner", "ray"):
            if getattr(config, field) != getattr(running, field):
                raise OperationRefusedError(
                    f"{field} cannot change while the cluster runs; leave it as it is, or take the cluster down and up"
                )
        if config.worker.served_name != running.worker.served_name:
            raise OperationRefusedError("worker.served_name cannot change while the cluster runs: clients ask for it")
        self.supervisor.desired = self.supervisor.desired.applied(config)

    async def profile(self, worker_id: str, seconds: float) -> bytes:
        worker = self.supervisor.worker(worker_id)
        if worker is None or worker.process is None or worker.current is None:
            raise OperationRefusedError(f"no worker {worker_id!r} serves now; 'baton status' shows who does")
        return await worker.process.profile(seconds)

    def _note_change(self, statuses: tuple[ProcessStatus, ...]) -> None:
        self.metrics.set_processes(statuses, self.supervisor.desired)
        self._on_change(statuses)


@asynccontextmanager
async def controlled(controller: Controller) -> AsyncGenerator[str]:
    """Serve for the length of the block, at the address it yields."""
    address = await controller.start()
    try:
        yield address
    finally:
        await controller.stop()
