"""The process of one worker: an actor's thin shell around `baton.actors.worker.Worker`, which does everything.

Importing this module is cheap: torch comes in with `build_worker`, inside the actor's process only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from baton.actors.collector import spare_startup
from baton.actors.engine.updates import BlockCounts
from baton.actors.logs import set_up_logs
from baton.actors.messages import Role, WorkerInfo
from baton.actors.spans import make_spans
from baton.cluster.config import WorkerSpec
from baton.cluster.placement import host_of_this_node, place_of_this_process
from baton.cluster.processes import Life
from baton.cluster.startup import Startup, described

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0  # for a failed worker to tell the controller why, which then ends the process


class ServingWorker(Protocol):
    """What the shell asks of the worker inside it. Called from the actor's asyncio loop."""

    failed: asyncio.Future[None]  # there after `start`; ends with an exception when the worker cannot go on

    async def start(self) -> WorkerInfo: ...

    def info(self) -> WorkerInfo: ...

    @property
    def busy_s(self) -> float: ...

    def set_role(self, role: Role) -> None: ...

    async def counts(self) -> BlockCounts: ...

    async def peer_dead(self, incarnation: str) -> None: ...

    async def drain(self, wait_s: float) -> None: ...

    async def profile(self, seconds: float) -> bytes: ...

    async def stop(self) -> None: ...


WorkerBuilder = Callable[[WorkerSpec], ServingWorker]


def build_worker(spec: WorkerSpec) -> ServingWorker:
    from baton.actors.worker import Worker

    host = spec.host or host_of_this_node()
    spans = make_spans(spec.tracing, spec.worker_id)
    worker = Worker(worker_id=spec.worker_id, role=spec.role, config=spec.config, host=host)
    worker.spans = spans
    return worker


class WorkerActor:
    """A restart is another actor, hence a worker with a new incarnation."""

    def __init__(self, spec: WorkerSpec, build: WorkerBuilder) -> None:
        set_up_logs(spec.logs, worker=spec.worker_id)
        self._spec = spec
        self._build = build
        self._worker: ServingWorker | None = None
        self._startup = Startup(self._start)
        self._place = place_of_this_process()
        self._profiling = asyncio.Lock()  # torch aborts the process that begins a second profile beside the first

    async def _start(self) -> WorkerInfo:
        worker = self._build(self._spec)
        info = await worker.start()
        worker.failed.add_done_callback(self._end_process)
        self._worker = worker
        spare_startup()
        logger.info("serves as %s at %s", info.role, info.peer.address)
        return info

    def _end_process(self, failed: asyncio.Future[None]) -> None:
        """A worker that cannot go on needs a new process."""
        if not failed.cancelled() and (error := failed.exception()) is not None:
            logger.error("%s failed, and its process ends", self._spec.worker_id, exc_info=error)
            asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)

    async def probe(self) -> Life[WorkerInfo]:
        life = replace(self._startup.probe(), place=self._place)
        if life.ready is None:
            return life
        failed = self._ready.failed
        if failed.done() and not failed.cancelled() and (error := failed.exception()) is not None:
            return replace(life, failure=described(error))
        return replace(life, ready=self._ready.info(), busy_s=self._ready.busy_s)

    @property
    def _ready(self) -> ServingWorker:
        assert self._worker is not None, "only a ready worker is asked to do something"
        return self._worker

    async def counts(self) -> BlockCounts:
        return await self._ready.counts()

    async def peer_dead(self, incarnation: str) -> None:
        await self._ready.peer_dead(incarnation)

    async def drain(self, wait_s: float) -> None:
        await self._ready.drain(wait_s)

    async def set_role(self, role: Role) -> WorkerInfo:
        self._ready.set_role(role)
        return self._ready.info()

    async def profile(self, seconds: float) -> bytes:
        async with self._profiling:
            return await self._ready.profile(seconds)

    async def stop(self) -> None:
        await self._startup.cancel()
        if self._worker:
            await self._worker.stop()
