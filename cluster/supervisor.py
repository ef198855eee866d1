"""Brings a cluster up, keeps gateways and workers told who is alive, and takes it all down again.

Level-triggered: each tick compares what the processes say with what gateways and peers have been told, and tells the
difference again until it is acknowledged. So a lost call, a restarted gateway and a restarted worker are one case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import WorkerInfo
from baton.cluster.config import ClusterConfig
from baton.cluster.errors import ProcessLostError, StartError
from baton.cluster.processes import GatewayProcess, Launcher, WorkerProcess
from baton.cluster.tracking import State, Tracked

logger = logging.getLogger(__name__)


class Clock(Protocol):
    def now_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Status(NamedTuple):
    name: str
    state: State


class WatchedWorker(Tracked[WorkerInfo]):
    def __init__(self, process: WorkerProcess, *, now_s: float) -> None:
        super().__init__(process, now_s=now_s)
        self.process = process
        self.obituaries: set[str] = set()  # incarnations of dead peers that this worker has not acknowledged yet


class WatchedGateway(Tracked[str]):
    def __init__(self, process: GatewayProcess, *, now_s: float) -> None:
        super().__init__(process, now_s=now_s)
        self.process = process
        self.told: tuple[str | None, list[WorkerInfo]] | None = None  # boot and workers of the last acknowledged call


Listener = Callable[[tuple[Status, ...]], None]


class Supervisor:
    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        *,
        clock: Clock | None = None,
        on_change: Listener = lambda statuses: None,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._clock = clock or SystemClock()
        self._on_change = on_change
        self._workers: list[WatchedWorker] = []
        self._gateway: WatchedGateway | None = None
        self._reported: tuple[Status, ...] = ()

    async def start(self) -> str:
        """Return the gateway's address once every worker serves; leave nothing behind on failure."""
        try:
            await self._launcher.place(self._config.worker_specs())
            now_s = self._clock.now_s()
            for spec in self._config.worker_specs():
                self._workers.append(WatchedWorker(self._launcher.launch_worker(spec), now_s=now_s))
            self._gateway = WatchedGateway(self._launcher.launch_gateway(), now_s=now_s)
            return await self._until_serving(self._gateway)
        except BaseException:
            await self.stop()
            raise

    async def _until_serving(self, gateway: WatchedGateway) -> str:
        timeout_s = self._config.ray.start_timeout_s
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            await self.tick()
            for process in self._watched():
                if process.failure is not None:
                    raise StartError(process.name, process.failure)
            waiting = [process.name for process in self._watched() if process.current is None]
            if gateway.current is not None and not waiting and gateway.told is not None:
                return gateway.current
            if self._clock.now_s() > deadline_s:
                raise StartError(", ".join(waiting), f"not ready after {timeout_s:g} s; raise ray.start_timeout_s")
            await self._clock.sleep(self._config.health.poll_s)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await self._clock.sleep(self._config.health.poll_s)
            try:
                await self.tick()
            except Exception:  # the root of the watch: one process's fault must not end it for the others
                logger.exception("a round of supervision failed; the next one tries again")

    async def tick(self) -> None:
        """Probe every process, then tell gateways and peers what they do not know yet."""
        health = self._config.health
        await asyncio.wait([process.ask() for process in self._watched()], timeout=health.poll_s)
        now_s = self._clock.now_s()
        for worker in self._workers:
            boot = worker.boot
            ended = worker.settle(now_s=now_s, silence_s=health.silence_s)
            if worker.boot != boot:
                worker.obituaries.clear()  # a new process has never met the dead
            if ended is not None:
                self._record_death(worker, ended)
        if self._gateway:
            self._gateway.settle(now_s=now_s, silence_s=health.silence_s)
        self._report()
        await asyncio.gather(self._tell_gateway(), *(self._tell_worker(worker) for worker in self._workers))

    def _record_death(self, dead: WatchedWorker, ended: WorkerInfo) -> None:
        for worker in self._workers:
            if worker is not dead:
                worker.obituaries.add(ended.peer.incarnation)

    async def _tell_gateway(self) -> None:
        gateway = self._gateway
        if gateway is None or gateway.current is None:
            return
        news = (gateway.boot, self.workers())
        if gateway.told != news and await self._tell(gateway.name, gateway.process.set_workers(news[1])):
            gateway.told = news

    async def _tell_worker(self, worker: WatchedWorker) -> None:
        if worker.current is None:
            return
        for incarnation in sorted(worker.obituaries):
            if await self._tell(worker.name, worker.process.peer_dead(incarnation)):
                worker.obituaries.discard(incarnation)

    async def _tell(self, name: str, call: Awaitable[None]) -> bool:
        """Return whether the call was acknowledged; if not, a later tick repeats it."""
        try:
            await asyncio.wait_for(call, self._config.health.silence_s)
        except (ProcessLostError, TimeoutError) as error:
            logger.warning("%s did not take the news: %s", name, error or "no answer")
            return False
        return True

    def _watched(self) -> list[WatchedWorker | WatchedGateway]:
        return [*self._workers, *([self._gateway] if self._gateway else [])]

    def _report(self) -> None:
        statuses = tuple(Status(process.name, process.state) for process in self._watched())
        if statuses != self._reported:
            self._reported = statuses
            self._on_change(statuses)

    def workers(self) -> list[WorkerInfo]:
        """List the workers that can be relied on now."""
        return [worker.current for worker in self._workers if worker.current is not None]

    async def counts(self) -> dict[str, BlockCounts]:
        """Ask every serving worker for its block counts, by worker id; each checks their integrity first."""
        serving = [worker for worker in self._workers if worker.current is not None]
        answers = await asyncio.gather(*(worker.process.counts() for worker in serving))
        return {worker.name: answer for worker, answer in zip(serving, answers, strict=True)}

    async def stop(self) -> None:
        """Stop the gateway (it drains), then the workers, then every process; idempotent."""
        for process in self._watched():
            process.forget_probe()
        gateway, self._gateway = self._gateway, None
        workers, self._workers = self._workers, []
        grace_s = self._config.health.stop_timeout_s
        try:
            if gateway and gateway.current is not None:
                await self._end(gateway.process.stop(), self._config.router.drain_s + grace_s)
            await asyncio.gather(*(self._end(w.process.stop(), grace_s) for w in workers if w.current is not None))
        finally:
            await self._launcher.close()

    async def _end(self, call: Awaitable[None], timeout_s: float) -> None:
        try:
            await asyncio.wait_for(call, timeout_s)
        except (ProcessLostError, TimeoutError) as error:
            logger.warning(
                "a process did not stop by itself and is killed: %s", error or f"no answer in {timeout_s:g} s"
            )


@asynccontextmanager
async def supervised(supervisor: Supervisor) -> AsyncGenerator[str]:
    """Serve for the length of the block, at the address it yields."""
    address = await supervisor.start()
    watch = asyncio.create_task(supervisor.run())
    try:
        yield address
    finally:
        watch.cancel()
        await asyncio.wait([watch])
        await supervisor.stop()
