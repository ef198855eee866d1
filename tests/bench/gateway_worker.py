"""The gateway benchmark's worker: a fake one in a process of its own, which notes what it did when."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec
import uvloop
from fake_workers import FakeRunning, FakeStream, FakeWorker, counting

from baton.actors.engine.request import Request
from baton.actors.messages import Output, Submit, WorkerInfo


@dataclass(frozen=True, slots=True)
class Pace:
    """How it works: seconds to a first token (on average) and from step to step, and how many must come first."""

    first_token_s: float = 0.0
    step_s: float = 0.0
    num_sequences: int = 1


@dataclass(slots=True)
class Times:
    """On time.monotonic, by the request's seed: when it was received, and its first token given."""

    received: dict[int, float] = field(default_factory=dict[int, float])
    answered: dict[int, float] = field(default_factory=dict[int, float])

    def own_s(self, seed: int) -> float:
        return self.answered[seed] - self.received[seed]


class TimedWorker(FakeWorker):
    """Caches nothing."""

    def __init__(self, max_context: int) -> None:
        super().__init__(counting, eos=-1, max_context=max_context)
        self.times = Times()
        self._pace = Pace()
        self._is_held = False

    def set_pace(self, pace: Pace) -> None:
        """Call it while nothing runs."""
        self._pace, self.step_s, self.times = pace, pace.step_s, Times()
        self._is_held = True
        self.num_steps_allowed = 0

    def _admitted(self, submit: Submit) -> FakeRunning:
        self.times.received[submit.request.sampling.seed] = time.monotonic()
        running = super()._admitted(submit)
        running.ready_at = math.inf
        wait_s = self._pace.first_token_s * random.uniform(0.5, 1.5)
        asyncio.get_running_loop().call_later(wait_s, self._make_ready, running)
        if self._is_held and self.num_running + 1 >= self._pace.num_sequences:
            self._is_held, self.num_steps_allowed = False, None
        return running

    def _make_ready(self, running: FakeRunning) -> None:
        """A timer may fire before its time: what it says counts, not the clock."""
        running.ready_at = 0.0
        self.wake()

    def _advance(self, running: FakeRunning) -> Output:
        self.times.answered.setdefault(running.submit.request.sampling.seed, time.monotonic())
        return super()._advance(running)

    def _blocks(self, request: Request) -> Sequence[bytes]:
        return ()

    def _remember(self, request: Request, stream: FakeStream) -> None:
        pass


class WorkerProcess:
    def __init__(self, pipe: Connection, process: BaseProcess, info: WorkerInfo) -> None:
        self._pipe = pipe
        self._process = process
        self.info = info

    async def set_pace(self, pace: Pace) -> None:
        """Forget the times so far."""
        await self._ask(pace)

    async def times(self) -> Times:
        answer = await self._ask(None)
        assert isinstance(answer, Times)
        return answer

    async def _ask(self, message: Pace | None) -> object:
        self._pipe.send(message)
        return await asyncio.to_thread(self._pipe.recv)


@asynccontextmanager
async def worker_process(max_context: int = 8192) -> AsyncGenerator[WorkerProcess, None]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, max_context))
    process.start()
    theirs.close()  # so that a worker that dies is noticed
    try:
        info = msgspec.msgpack.decode(await asyncio.to_thread(ours.recv), type=WorkerInfo)
        yield WorkerProcess(ours, process, info)
    finally:
        process.kill()


def _serve(parent: Connection, max_context: int) -> None:
    async def run() -> None:
        worker = TimedWorker(max_context)
        parent.send(msgspec.msgpack.encode(await worker.start()))
        while True:
            pace = await asyncio.to_thread(parent.recv)
            if isinstance(pace, Pace):
                worker.set_pace(pace)
            parent.send(worker.times)

    uvloop.run(run())
