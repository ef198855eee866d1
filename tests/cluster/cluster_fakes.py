"""Processes and a clock under a test's control, in place of Ray and time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

import psutil

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import PeerAddress, Role, WorkerInfo
from baton.cluster.config import WorkerSpec
from baton.cluster.errors import ProcessLostError
from baton.cluster.processes import Kept, Life, News, Place
from baton.cluster.quarantine import Quarantined
from baton.router.usage import Usage


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
    """One process. Ready at its first probe unless `loading` or `failure` is set; `heard` is all it was told."""

    name: str
    role: Role = "both"
    life: int = 0
    loading: bool = False
    failure: str | None = None
    busy_s: float = 0.0
    hangs: bool = False
    lost: ProcessLostError | None = None
    heard: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # drain, stop and kill, in order
    spec: WorkerSpec | None = None
    place: Place | None = None
    is_serving: bool = False  # and fails then
    may_drain: asyncio.Event = field(default_factory=asyncio.Event)

    async def probe(self) -> Life[WorkerInfo]:
        await self._answer()
        if self.failure and self.is_serving:
            info = worker_info(self.name, role=self.role, life=self.life)
            return Life(ready=info, failure=self.failure, place=self.place)
        if self.failure or self.loading:
            return Life(failure=self.failure, place=self.place)
        return Life(ready=worker_info(self.name, role=self.role, life=self.life), place=self.place, busy_s=self.busy_s)

    async def _answer(self) -> None:
        if self.lost:
            raise self.lost
        if self.hangs:
            await asyncio.Event().wait()

    def die(self, *, certain: bool) -> None:
        self.lost = ProcessLostError(self.name, "signal 9", certain=certain)

    async def peer_dead(self, incarnation: str) -> None:
        await self._answer()
        self.heard.append(incarnation)

    async def counts(self) -> BlockCounts:
        await self._answer()
        return BlockCounts(total=8, free=8, cached=0, held=0)

    async def drain(self, wait_s: float) -> None:
        self.asked.append("drain")
        await self.may_drain.wait()

    async def set_role(self, role: Role) -> WorkerInfo:
        self.role = role
        return worker_info(self.name, role=role, life=self.life)

    async def profile(self, seconds: float) -> bytes:
        return b"trace"

    async def stop(self) -> None:
        await self._answer()
        self.asked.append("stop")

    async def kill(self) -> None:
        self.asked.append("kill")
        self.die(certain=True)


@dataclass
class FakeGateway:
    name: str = "gateway-0"
    failure: str | None = None
    lost: ProcessLostError | None = None
    refusals: int = 0  # how many further calls of set_workers are lost
    calls: list[list[str]] = field(default_factory=list)
    stopped: bool = False
    is_decoder_coming: bool = False  # as told last
    served: Usage = field(default_factory=Usage)
    num_polls_to_connect: int = 0

    async def probe(self) -> Life[str]:
        if self.lost:
            raise self.lost
        if self.failure:
            return Life(failure=self.failure)
        return Life(ready="http://127.0.0.1:8000")

    async def set_workers(self, news: News) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ProcessLostError(self.name, "no route", certain=False)
        self.calls.append([worker.peer.incarnation for worker in news.workers])
        self.is_decoder_coming = news.is_decoder_coming

    async def usage(self) -> Usage:
        return self.served

    async def is_connected(self) -> bool:
        self.num_polls_to_connect -= 1
        return self.num_polls_to_connect < 0

    async def stop(self) -> None:
        self.stopped = True

    async def kill(self) -> None:
        self.lost = ProcessLostError(self.name, "signal 9", certain=True)


class FakeLauncher:
    """`workers` and `gateway` are the processes launched last under each name."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.gateway = FakeGateway()
        self.refusal: Exception | None = None
        self.is_closed = False
        self.placed: set[str] = set()
        self.launched: list[str] = []
        self.kept: list[str] = []
        self.requested: list[str] = []
        self.gone_nodes: set[str] = set()
        self._prepared: dict[str, FakeWorker] = {}

    def prepare(self, worker: FakeWorker) -> FakeWorker:
        """Say how the next process of this name will behave."""
        self._prepared[worker.name] = worker
        return worker

    async def place(self, specs: Sequence[WorkerSpec]) -> None:
        if self.refusal:
            raise self.refusal
        self.placed |= {spec.worker_id for spec in specs}

    def launch_worker(self, spec: WorkerSpec) -> FakeWorker:
        assert spec.worker_id in self.placed
        before = self.workers.get(spec.worker_id)
        life = 0 if before is None else before.life + 1
        worker = self._prepared.pop(spec.worker_id, None) or FakeWorker(spec.worker_id, spec.role)
        worker.life, worker.spec = life, spec
        self.workers[spec.worker_id] = worker
        self.launched.append(spec.worker_id)
        return worker

    def launch_gateway(self, index: int) -> FakeGateway:
        is_first = f"gateway-{index}" not in self.launched
        self.launched.append(f"gateway-{index}")
        if not is_first:
            self.gateway = FakeGateway(calls=self.gateway.calls)
        return self.gateway

    def find_worker(self, spec: WorkerSpec) -> FakeWorker | None:
        worker = self.workers.get(spec.worker_id)
        return None if worker is None or worker.lost else worker

    def find_gateway(self, index: int) -> FakeGateway | None:
        return None if self.gateway.lost else self.gateway

    def release(self, worker_id: str) -> None:
        self.placed.discard(worker_id)

    def keep(self, places: Collection[Kept]) -> None:
        self.kept = [bad.name for bad in cast("Collection[Quarantined]", places)]

    def request(self, specs: Sequence[WorkerSpec]) -> None:
        self.requested = [spec.worker_id for spec in specs]

    def is_there(self, node_id: str) -> bool:
        return node_id not in self.gone_nodes

    async def close(self) -> None:
        self.is_closed = True


class MemoryStore:
    def __init__(self) -> None:
        self.state: bytes | None = None
        self.num_saves = 0

    def load(self) -> bytes | None:
        return self.state

    def save(self, state: bytes) -> None:
        self.state = state
        self.num_saves += 1

    def clear(self) -> None:
        self.state = None


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
