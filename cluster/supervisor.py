"""Makes a cluster what its operator wants it to be, and keeps gateways and workers told who is alive.

Level-triggered: each tick compares what is wanted with what the processes say, and what they say with what gateways
and peers have been told, and does something about the difference again until it is gone. So a lost call, a dead
process, a larger pool and the controller's own restart are one case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import WorkerInfo
from baton.cluster.changes import Changes
from baton.cluster.desired import Desired
from baton.cluster.errors import ProcessLostError, StartError
from baton.cluster.memory import Memory
from baton.cluster.processes import Launcher, News, NoStore, Store
from baton.cluster.quarantine import judged
from baton.cluster.watched import ProcessStatus, WatchedGateway, WatchedWorker

if TYPE_CHECKING:
    from baton.router.usage import Usage


logger = logging.getLogger(__name__)


class Clock(Protocol):
    def now_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


Listener = Callable[[tuple[ProcessStatus, ...]], None]


class Supervisor:
    """`start` or `resume`, then `run`, at last `stop` or `leave`. `desired` may be replaced at any time."""

    def __init__(
        self,
        desired: Desired,
        launcher: Launcher,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        on_change: Listener = lambda statuses: None,
    ) -> None:
        self._desired = desired
        self._wanted = asyncio.Event()  # something else than before
        self._config = desired.config  # health, router and gateways of a running cluster do not change
        self._health = desired.config.health
        self._launcher = launcher
        self._clock = clock or SystemClock()
        self._on_change = on_change
        self._memory = Memory(store or NoStore())
        self._workers: list[WatchedWorker] = []
        self._gateways: list[WatchedGateway] = []
        self._reported: tuple[ProcessStatus, ...] = ()
        self._changes = Changes(
            launcher, self._health, self._tell_gateways, self._record_death, self._judge, self._clock.now_s
        )

    @property
    def desired(self) -> Desired:
        return self._desired

    @desired.setter
    def desired(self, desired: Desired) -> None:
        self._desired = desired
        self._wanted.set()

    # Life.

    async def start(self) -> str:
        """Return the first gateway's address once every process serves; leave nothing behind on failure."""
        try:
            await self._launcher.place(self.desired.workers)
            now_s = self._clock.now_s()
            self._workers = [WatchedWorker(spec, self._health, now_s=now_s) for spec in self.desired.workers]
            for worker in self._workers:
                worker.is_placed = True
            self._gateways = self._new_gateways(now_s)
            return await self._until_serving()
        except BaseException:
            await self.stop()
            raise

    def resume(self) -> bool:
        """Go on where a controller before this one has ended; False if there was none."""
        state = self._memory.recall()
        if state is None:
            return False
        self.desired = state.desired
        now_s = self._clock.now_s()
        for known in state.workers:
            worker = WatchedWorker(known.spec, self._health, now_s=now_s)
            self._workers.append(worker)
            process = self._launcher.find_worker(known.spec)
            worker.is_placed = process is not None
            if process is not None:
                worker.bind(process, now_s=now_s, found=True)
        alive = {worker.name for worker in self._workers if worker.process is not None}
        for known in state.workers:
            if known.info is not None and known.spec.worker_id not in alive:
                self._record_death(known.info)  # nobody has told the others yet
        self._gateways = self._new_gateways(now_s)
        for gateway in self._gateways:
            found = self._launcher.find_gateway(gateway.index)
            if found is not None:
                gateway.bind(found, now_s=now_s, found=True)
        return True

    def _new_gateways(self, now_s: float) -> list[WatchedGateway]:
        return [WatchedGateway(index, self._health, now_s=now_s) for index in range(self._config.gateways)]

    async def _until_serving(self) -> str:
        timeout_s = self._config.ray.start_timeout_s
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            await self.tick()
            for process in self._watched():
                if process.failure is not None:
                    where = f" (at {process.place})" if process.place is not None else ""
                    raise StartError(process.name, process.failure + where)
            waiting = [process.name for process in self._watched() if process.current is None]
            if not waiting and await self._all_connected():
                return self.addresses()[0]
            if self._clock.now_s() > deadline_s:
                late = ", ".join(waiting) or "a gateway's stream to a worker"
                raise StartError(late, f"not ready after {timeout_s:g} s; raise ray.start_timeout_s")
            await self._clock.sleep(self._health.poll_s)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await self._sleep()
            try:
                await self.tick()
            except Exception:  # the root of the watch: one process's fault must not end it for the others
                logger.exception("a round of supervision failed; the next one tries again")

    async def _sleep(self) -> None:
        """Wait for the next round, which comes at once when an operator wants something."""
        waits = [
            asyncio.ensure_future(self._clock.sleep(self._health.poll_s)),
            asyncio.ensure_future(self._wanted.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._wanted.clear()

    async def stop(self) -> None:
        """Stop the gateways (they drain), then the workers, then every process; idempotent."""
        await self._changes.cancel(self._workers)
        for process in self._watched():
            process.forget_probe()
        gateways, self._gateways = self._gateways, []
        workers, self._workers = self._workers, []
        grace_s = self._health.stop_timeout_s
        drain_s = self._config.router.drain_s + grace_s
        try:
            await asyncio.gather(
                *(self._end(g.process.stop(), drain_s) for g in gateways if g.process and g.current is not None)
            )
            await asyncio.gather(
                *(self._end(w.process.stop(), grace_s) for w in workers if w.process and w.current is not None)
            )
        finally:
            await self._launcher.close()
            self._memory.forget()

    # One round.

    async def tick(self) -> None:
        """Probe every process, change what is not as wanted, tell gateways and peers what they do not know yet."""
        workers = [worker for worker in self._workers if not worker.is_leaving]
        probes = [probe for process in (*workers, *self._gateways) if (probe := process.ask()) is not None]
        if probes:
            await asyncio.wait(probes, timeout=self._health.poll_s)
        now_s = self._clock.now_s()
        for worker in workers:
            ended = worker.settle(now_s=now_s)
            if ended is not None:
                self._record_death(ended)
        for gateway in self._gateways:
            gateway.settle(now_s=now_s)
        self._keep_quarantine()
        self._changes.begin(self.desired, self._workers, now_s)
        self._workers = [worker for worker in self._workers if not self._changes.has_left(worker)]
        self._launch_gateways(now_s)
        self._memory.keep(self.desired, self._workers)
        self._report()
        await asyncio.gather(self._tell_gateways(), *(self._tell_worker(worker) for worker in self._workers))

    def _judge(self, worker: WatchedWorker) -> None:
        bad = judged(worker, self._workers, self._health.quarantine_after)
        if bad is not None and any(spec.worker_id == worker.name for spec in self.desired.workers):
            logger.error("%s is in quarantine: %s", bad.name, bad.why)
            self.desired = self.desired.moved(bad)

    def _keep_quarantine(self) -> None:
        for bad in self.desired.quarantine:
            if not self._launcher.is_there(bad.place.node_id):
                self.desired = self.desired.released(bad.name)  # or Ray would move what is kept to a good node
        self._launcher.keep(self.desired.quarantine)

    def _launch_gateways(self, now_s: float) -> None:
        for gateway in self._gateways:
            if gateway.process is not None and (gateway.state == "stuck" or gateway.has_failed):
                self._changes.kill_gateway(gateway)
            elif gateway.process is None and gateway.launch_at_s <= now_s:
                gateway.told = None
                gateway.bind(self._launcher.launch_gateway(gateway.index), now_s=now_s)

    def _record_death(self, dead: WorkerInfo) -> None:
        for worker in self._workers:
            if worker.name != dead.peer.worker_id:
                worker.obituaries.add(dead.peer.incarnation)

    async def _tell_gateways(self) -> None:
        """Say who serves; say nothing while somebody found running has not been heard of: it may well serve."""
        if not any(worker.is_unheard for worker in self._workers):
            await asyncio.gather(*(self._tell_gateway(gateway) for gateway in self._gateways))

    async def _tell_gateway(self, gateway: WatchedGateway) -> None:
        process, news = gateway.process, self.news()
        if process is None or gateway.current is None or gateway.told == news:
            return
        if await self._tell(gateway.name, process.set_workers(news)) and gateway.process is process:
            gateway.told = news

    async def _all_connected(self) -> bool:
        """Return whether no gateway would have to refuse a request for want of a worker that is up."""
        for gateway in self._gateways:
            process = gateway.process
            if process is None or gateway.told != self.news():
                return False
            try:
                if not await asyncio.wait_for(process.is_connected(), self._health.silence_s):
                    return False
            except (ProcessLostError, TimeoutError):
                return False
        return True

    async def _tell_worker(self, worker: WatchedWorker) -> None:
        process = worker.process
        if process is None or worker.current is None:
            return
        for incarnation in sorted(worker.obituaries):
            if await self._tell(worker.name, process.peer_dead(incarnation)):
                worker.obituaries.discard(incarnation)

    async def _tell(self, name: str, call: Awaitable[None]) -> bool:
        """Return whether the call was acknowledged; if not, a later tick repeats it."""
        try:
            await asyncio.wait_for(call, self._health.silence_s)
        except (ProcessLostError, TimeoutError) as error:
            logger.warning("%s did not take the news: %s", name, error or "no answer")
            return False
        return True

    async def _end(self, call: Awaitable[None], timeout_s: float) -> None:
        try:
            await asyncio.wait_for(call, timeout_s)
        except (ProcessLostError, TimeoutError) as error:
            logger.warning(
                "a process did not stop by itself and is killed: %s", error or f"no answer in {timeout_s:g} s"
            )

    # What others want to know.

    def _watched(self) -> Sequence[WatchedWorker | WatchedGateway]:
        return [*self._workers, *self._gateways]

    def _report(self) -> None:
        statuses = self.statuses()
        if statuses != self._reported:
            self._reported = statuses
            self._on_change(statuses)

    def statuses(self) -> tuple[ProcessStatus, ...]:
        return tuple(process.status for process in self._watched())

    def is_settled(self) -> bool:
        """Everything is as wanted: all serve, with the settings that were asked for, and all gateways know."""
        return (
            not self._changes.is_outstanding(self.desired, self._workers)
            and all(process.current is not None and not process.has_left for process in self._watched())
            and all(gateway.told == self.news() for gateway in self._gateways)
        )

    def workers(self) -> list[WorkerInfo]:
        """List the workers that can be relied on now."""
        return [worker.current for worker in self._workers if worker.current is not None and not worker.is_leaving]

    def news(self) -> News:
        decoders = {spec.worker_id for spec in self.desired.workers if spec.role != "prefill"}
        coming = any(worker.is_coming and worker.name in decoders for worker in self._workers)
        return News(tuple(self.workers()), coming)

    def addresses(self) -> list[str]:
        """List the gateways that serve now."""
        return [gateway.current for gateway in self._gateways if gateway.current is not None and not gateway.has_left]

    def worker(self, worker_id: str) -> WatchedWorker | None:
        return next((worker for worker in self._workers if worker.name == worker_id), None)

    async def usages(self) -> dict[str, Usage]:
        """Ask every serving gateway what it has served and knows, by name; leave out who does not answer."""
        serving = [(g.name, g.process) for g in self._gateways if g.process is not None and g.current is not None]
        calls = (asyncio.wait_for(process.usage(), self._health.silence_s) for _, process in serving)
        answers = zip(serving, await asyncio.gather(*calls, return_exceptions=True), strict=True)
        return {name: answer for (name, _), answer in answers if not isinstance(answer, BaseException)}

    async def counts(self) -> dict[str, BlockCounts]:
        """Ask every serving worker for its block counts, by worker id; each checks their integrity first."""
        serving = [(w.name, w.process) for w in self._workers if w.process is not None and w.current is not None]
        answers = await asyncio.gather(*(process.counts() for _, process in serving))
        return {name: answer for (name, _), answer in zip(serving, answers, strict=True)}


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
