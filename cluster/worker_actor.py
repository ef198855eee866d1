"""The process of one worker: an actor's thin shell around `baton.actors.worker.Worker`, which does everything.

Importing this module is cheap: torch comes in with `build_worker`, inside the actor's process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.actors.messages import WorkerInfo
from baton.cluster.config import WorkerSpec
from baton.cluster.processes import Life
from baton.cluster.startup import Startup


class ServingWorker(Protocol):
    """What the shell asks of the worker inside it. Called from the actor's asyncio loop."""

    async def start(self) -> WorkerInfo: ...

    def stats(self) -> dict[str, object]: ...

    async def peer_dead(self, incarnation: str) -> None: ...

    async def stop(self) -> None: ...


WorkerBuilder = Callable[[WorkerSpec], ServingWorker]


def build_worker(spec: WorkerSpec) -> ServingWorker:
    import ray.util

    from baton.actors.worker import Worker, WorkerConfig
    from baton.cluster.model_reference import resolve_model

    config = WorkerConfig(
        model_path=str(resolve_model(spec.model)),
        model_name=spec.model_name,
        host=spec.host or ray.util.get_node_ip_address(),
        engine=spec.engine,
        transfer=spec.transfer,
    )
    return Worker(worker_id=spec.worker_id, role=spec.role, config=config)


class WorkerActor:
    """A restart runs the constructor again in a new process, hence a worker with a new incarnation."""

    def __init__(self, spec: WorkerSpec, build: WorkerBuilder) -> None:
        self._spec = spec
        self._build = build
        self._worker: ServingWorker | None = None
        self._startup = Startup(self._start)

    async def _start(self) -> WorkerInfo:
        worker = self._build(self._spec)
        info = await worker.start()
        self._worker = worker
        return info

    async def probe(self) -> Life[WorkerInfo]:
        return self._startup.probe()

    async def stats(self) -> dict[str, object]:
        return self._worker.stats() if self._worker else {}

    async def peer_dead(self, incarnation: str) -> None:
        if self._worker:
            await self._worker.peer_dead(incarnation)

    async def stop(self) -> None:
        await self._startup.cancel()
        if self._worker:
            await self._worker.stop()
