"""Processes and a clock under a test's control, in place of Ray and time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import PeerAddress, Role, WorkerInfo
from baton.cluster.config import WorkerSpec
from baton.cluster.errors import ProcessLostError
from baton.cluster.processes import Life


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        await asyncio.sleep(0)


def worker_info(worker_id: str, *, role: Role = "both", life: int = 0) -> WorkerInfo:
    return WorkerInfo(
        peer=PeerAddress(worker_id, "127.0.0.1:1", f"{worker_id}/{life}"),
        role=role,
        model="m",
        block_size=16,
        num_blocks=8,
        max_context=128,
        mover="local",
        metrics_address="127.0.0.1:2",
        pid=1,
    )


@dataclass
class FakeWorker:
    """Ready at its first probe unless `loading` or `failure` is set. `die` and `restart` are what Ray would see."""

    name: str
    role: Role = "both"
    life: int = 0
    loading: bool = False
    failure: str | None = None
    hangs: bool = False
    lost: ProcessLostError | None = None
    heard: list[str] = field(default_factory=list)
    stopped: bool = False

    async def probe(self) -> Life[WorkerInfo]:
        await self._answer()
        boot = f"boot {self.life}"
        if self.failure or self.loading:
            return Life(boot, failure=self.failure)
        return Life(boot, ready=worker_info(self.name, role=self.role, life=self.life))

    async def _answer(self) -> None:
        if self.lost:
            raise self.lost
        if self.hangs:
            await asyncio.Event().wait()

    def die(self, *, certain: bool) -> None:
        self.lost = ProcessLostError(self.name, "signal 9", certain=certain)

    def restart(self) -> None:
        self.lost = None
        self.life += 1
        self.heard = []

    async def peer_dead(self, incarnation: str) -> None:
        await self._answer()
        self.heard.append(incarnation)

    async def counts(self) -> BlockCounts:
        await self._answer()
        return BlockCounts(total=8, free=8, cached=0, held=0)

    async def stop(self) -> None:
        await self._answer()
        self.stopped = True


@dataclass
class FakeGateway:
    name: str = "gateway"
    life: int = 0
    failure: str | None = None
    refusals: int = 0  # how many further calls of set_workers are lost
    calls: list[list[str]] = field(default_factory=list)
    stopped: bool = False

    async def probe(self) -> Life[str]:
        if self.failure:
            return Life(f"boot {self.life}", failure=self.failure)
        return Life(f"boot {self.life}", ready="http://127.0.0.1:8000")

    async def set_workers(self, workers: list[WorkerInfo]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ProcessLostError(self.name, "no route", certain=False)
        self.calls.append([worker.peer.incarnation for worker in workers])

    async def stop(self) -> None:
        self.stopped = True


class FakeLauncher:
    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.gateway = FakeGateway()
        self.refusal: Exception | None = None
        self.is_closed = False

    def prepare(self, worker: FakeWorker) -> FakeWorker:
        """Say how a worker will behave before it is launched."""
        return self.workers.setdefault(worker.name, worker)

    async def place(self, specs: Sequence[WorkerSpec]) -> None:
        if self.refusal:
            raise self.refusal

    def launch_worker(self, spec: WorkerSpec) -> FakeWorker:
        return self.prepare(FakeWorker(spec.worker_id, spec.role))

    def launch_gateway(self) -> FakeGateway:
        return self.gateway

    async def close(self) -> None:
        self.is_closed = True


async def until_gone(pids: Sequence[int], *, timeout_s: float = 20.0) -> None:
    """Wait until none of these processes is left; TimeoutError says that one is."""
    async with asyncio.timeout(timeout_s):
        while any(_is_running(pid) for pid in pids):
            await asyncio.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
