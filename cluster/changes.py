"""Turns what is wanted of each worker into one change at a time: launch, drain and remove, replace, switch its role.

A change is a task; the next round sees what it left and goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from baton.actors.messages import WorkerInfo
from baton.cluster.config import HealthConfig, WorkerSpec
from baton.cluster.desired import Desired
from baton.cluster.errors import ProcessLostError, ResourcesShortError
from baton.cluster.processes import Launcher
from baton.cluster.watched import WatchedGateway, WatchedWorker

logger = logging.getLogger(__name__)


class Changes:
    def __init__(
        self,
        launcher: Launcher,
        health: HealthConfig,
        tell_gateways: Callable[[], Awaitable[None]],
        record_death: Callable[[WorkerInfo], None],
        judge: Callable[[WatchedWorker], None],
        now_s: Callable[[], float],
    ) -> None:
        self._launcher = launcher
        self._health = health
        self._tell_gateways = tell_gateways
        self._record_death = record_death
        self._judge = judge
        self._now_s = now_s
        self._gone: set[str] = set()
        self._kills: dict[str, asyncio.Task[None]] = {}

    def begin(self, desired: Desired, workers: list[WatchedWorker], now_s: float) -> None:
        """Begin what can be begun now; `workers` gains those that are wanted and not there."""
        wanted = {spec.worker_id: spec for spec in desired.workers}
        for worker in workers:
            if worker.change is not None and worker.change.done():
                worker.change = None
            if not worker.backoff.num_deaths:
                worker.num_failures = 0
            if worker.change is None:
                self._try_one(worker, wanted.get(worker.name), workers, now_s)
        present = {worker.name for worker in workers}
        workers += [
            WatchedWorker(spec, self._health, now_s=now_s) for name, spec in wanted.items() if name not in present
        ]

    def _try_one(
        self, worker: WatchedWorker, spec: WorkerSpec | None, workers: Sequence[WatchedWorker], now_s: float
    ) -> None:
        try:
            self._begin_one(worker, spec, workers, now_s)
        except Exception as error:  # whatever Ray refuses for one worker must not keep the others waiting
            logger.exception("%s cannot be changed now", worker.name)
            worker.failure = f"{type(error).__name__}: {error}"
            worker.launch_at_s = now_s + max(worker.backoff.next_delay_s(), 1.0)

    def _begin_one(
        self, worker: WatchedWorker, spec: WorkerSpec | None, workers: Sequence[WatchedWorker], now_s: float
    ) -> None:
        if spec is None:
            worker.is_leaving = True
            self._start(worker, self._remove(worker))
        elif worker.process is None:
            if worker.launch_at_s <= now_s:
                self._launch(worker, spec, now_s)
        elif worker.state == "stuck" or worker.has_failed:
            self._start(worker, self._kill(worker))
        elif worker.current is None:
            pass  # starting, or out of reach: nothing can be asked of it
        elif _but_role(spec) != _but_role(worker.spec):
            if _can_be_spared(worker, workers):
                worker.is_leaving = True
                self._start(worker, self._replace(worker))
        elif spec.role != worker.spec.role:
            self._start(worker, self._switch_role(worker, spec))

    def is_outstanding(self, desired: Desired, workers: Sequence[WatchedWorker]) -> bool:
        wanted = {spec.worker_id: spec for spec in desired.workers}
        return {worker.name: worker.spec for worker in workers} != wanted or any(
            worker.change is not None and not worker.change.done() for worker in workers
        )

    def has_left(self, worker: WatchedWorker) -> bool:
        """Say once that a removed worker is gone."""
        if worker.name not in self._gone:
            return False
        self._gone.discard(worker.name)
        return True

    async def cancel(self, workers: Sequence[WatchedWorker]) -> None:
        tasks = [worker.change for worker in workers if worker.change is not None] + list(self._kills.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill_gateway(self, gateway: WatchedGateway) -> None:
        """It cannot go on. Its port and name are free for another once it has ended."""
        if gateway.name not in self._kills:
            self._kills[gateway.name] = task = asyncio.create_task(_logged(gateway.name, self._end_gateway(gateway)))
            task.add_done_callback(lambda _: self._kills.pop(gateway.name))

    async def _end_gateway(self, gateway: WatchedGateway) -> None:
        process = gateway.process
        assert process is not None
        await process.kill()
        if gateway.process is process:
            gateway.ended(now_s=self._now_s())

    # The changes.

    def _start(self, worker: WatchedWorker, change: Coroutine[Any, Any, None]) -> None:
        worker.change = asyncio.create_task(_logged(worker.name, change))

    def _launch(self, worker: WatchedWorker, spec: WorkerSpec, now_s: float) -> None:
        before = worker.spec
        if (spec.num_cpus, spec.num_gpus, spec.place) != (before.num_cpus, before.num_gpus, before.place):
            self._launcher.release(worker.name)
            worker.is_placed = False
            worker.num_failures = 0
        worker.spec = spec
        if not worker.is_placed:
            self._start(worker, self._place(worker))
            return
        worker.obituaries.clear()  # a new process has never met the dead
        worker.is_leaving = False
        worker.bind(self._launcher.launch_worker(spec), now_s=now_s)

    async def _place(self, worker: WatchedWorker) -> None:
        try:
            await self._launcher.place([worker.spec])
        except ResourcesShortError as error:
            worker.failure = str(error)
            worker.launch_at_s = self._now_s() + max(worker.backoff.next_delay_s(), 1.0)
            return
        worker.is_placed, worker.failure = True, None

    async def _kill(self, worker: WatchedWorker) -> None:
        """It cannot go on, whatever it says."""
        process, failure = worker.process, worker.failure
        assert process is not None
        logger.error("%s is killed and started anew: %s", worker.name, failure)
        await process.kill()
        self._note_end(worker, delay_s=None)
        worker.failure = failure
        worker.num_failures += 1
        self._judge(worker)

    async def _remove(self, worker: WatchedWorker) -> None:
        await self._retire(worker)
        self._launcher.release(worker.name)
        self._gone.add(worker.name)

    async def _replace(self, worker: WatchedWorker) -> None:
        """The next round launches it as it is wanted."""
        await self._retire(worker)
        worker.launch_at_s = self._now_s()

    async def _retire(self, worker: WatchedWorker) -> None:
        """End a worker: first nobody sends it work any more, then what runs ends or goes elsewhere."""
        process = worker.process
        if process is None:
            return
        worker.forget_probe()
        if worker.state == "ready":
            await self._tell_gateways()
            grace_s = self._health.stop_timeout_s
            await self._ask(worker, process.drain(self._health.drain_s), self._health.drain_s + grace_s)
            await self._ask(worker, process.stop(), grace_s)
        await process.kill()
        self._note_end(worker, delay_s=0.0)

    async def _switch_role(self, worker: WatchedWorker, spec: WorkerSpec) -> None:
        assert worker.process is not None
        worker.take(await worker.process.set_role(spec.role))
        worker.spec = spec
        await self._tell_gateways()

    def _note_end(self, worker: WatchedWorker, *, delay_s: float | None) -> None:
        if worker.process is None:
            return  # a probe has told of the end before
        ended = worker.ended(now_s=self._now_s(), delay_s=delay_s)
        if ended is not None:
            self._record_death(ended)

    async def _ask(self, worker: WatchedWorker, call: Awaitable[None], timeout_s: float) -> None:
        try:
            await asyncio.wait_for(call, timeout_s)
        except (ProcessLostError, TimeoutError) as error:
            logger.warning("%s did not end in order: %s", worker.name, error or f"no answer in {timeout_s:g} s")


def _but_role(spec: WorkerSpec) -> WorkerSpec:
    """A role is data: a worker changes it while it lives."""
    return spec.model_copy(update={"role": "both"})


def _can_be_spared(worker: WatchedWorker, workers: Sequence[WatchedWorker]) -> bool:
    """One at a time, and only while all the others serve."""
    return all(other.current is not None and not other.is_leaving for other in workers if other is not worker)


async def _logged(name: str, change: Coroutine[Any, Any, None]) -> None:
    try:
        await change
    except ProcessLostError as error:
        logger.warning("a change of %s was cut short and is tried again: %s", name, error)
    except Exception:  # the task's root: the next round tries again
        logger.exception("a change of %s failed and is tried again", name)
