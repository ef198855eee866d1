"""What the supervisor keeps beside a process's life: what it is meant to be, what it was told, what happens to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.actors.messages import Role, WorkerInfo
from baton.cluster.config import HealthConfig, WorkerSpec
from baton.cluster.processes import GatewayProcess, News, WorkerProcess
from baton.cluster.tracking import State, Tracked

FEW = 3  # deaths in a row after which nobody is told to wait for a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    name: str
    kind: str
    state: State
    role: Role | None = None
    address: str | None = None  # of a worker its gRPC server, of a gateway its HTTP
    metrics_address: str | None = None
    pid: int | None = None
    failure: str | None = None
    num_restarts: int = 0


class WatchedWorker(Tracked[WorkerInfo, WorkerProcess]):
    def __init__(self, spec: WorkerSpec, health: HealthConfig, *, now_s: float) -> None:
        super().__init__(spec.worker_id, health, now_s=now_s)
        self.spec = spec  # what its process was launched with; the role follows its switches
        self.is_placed = False
        self.num_failures = 0  # in a row, in this place, by its own words
        self.is_leaving = False  # gets no new requests, and will be stopped
        self.change: asyncio.Task[None] | None = None  # the one change under way
        self.obituaries: set[str] = set()  # incarnations of dead peers that this worker has not acknowledged yet

    @property
    def is_coming(self) -> bool:
        """It does not serve now, but soon will: it is replaced, or has ended and did not do so again and again."""
        return (self.current is None or self.is_leaving) and self.backoff.num_deaths < FEW

    @property
    def status(self) -> ProcessStatus:
        info = self.last_known
        return ProcessStatus(
            name=self.name,
            kind="worker",
            state="draining" if self.is_leaving and self.state == "ready" else self.state,
            role=self.spec.role,
            address=info.peer.address if info else None,
            metrics_address=info.metrics_address if info else None,
            pid=info.pid if info else None,
            failure=self.failure,
            num_restarts=self.num_restarts,
        )


class WatchedGateway(Tracked[str, GatewayProcess]):
    def __init__(self, index: int, health: HealthConfig, *, now_s: float) -> None:
        super().__init__(f"gateway-{index}", health, now_s=now_s)
        self.index = index
        self.told: News | None = None  # with the last acknowledged call

    @property
    def status(self) -> ProcessStatus:
        address = self.last_known
        return ProcessStatus(
            name=self.name,
            kind="gateway",
            state="draining" if self.has_left and self.state == "ready" else self.state,
            address=address,
            metrics_address=address.partition("//")[2] if address else None,
            pid=self.pid,
            failure=self.failure,
            num_restarts=self.num_restarts,
        )
