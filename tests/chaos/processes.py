"""Chaos processes as the test sees them: start, command, signal, and know when they end.

They are forked from a server that has imported everything, so one starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import TypeVar

from baton.actors.messages import WorkerInfo
from baton.transfer.nixl_mover import set_env_defaults
from tests.chaos import chaos_worker, control, gateway

START_S = 30.0
ANSWER_S = 10.0
A = TypeVar("A")


def context() -> ForkServerContext:
    set_env_defaults(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it reports every death that is played here
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.chaos.chaos_worker", "tests.chaos.gateway", "nixl"])
    return found


@dataclass
class ChaosProcess:
    """One process and the socket to it; answers other than `Reached` come in the order of the questions."""

    process: BaseProcess
    reached: asyncio.Queue[control.Reached] = field(default_factory=asyncio.Queue[control.Reached])
    answers: asyncio.Queue[control.Answer] = field(default_factory=asyncio.Queue[control.Answer])
    _writer: asyncio.StreamWriter = field(init=False)
    _listener: asyncio.Task[None] = field(init=False)

    @classmethod
    async def start(cls, target: Callable[..., None], *args: object) -> tuple[ChaosProcess, control.Started]:
        ours, theirs = socket.socketpair()
        process = context().Process(target=target, args=(theirs, *args), daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        self = cls(process)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._listener = asyncio.create_task(self._listen(reader))
        return self, await self._answer(control.Started, START_S)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def say(self, command: control.Command) -> None:
        self._writer.write(control.encode(command) + b"\n")

    async def state(self) -> control.State:
        self.say(control.AskState())
        return await self._answer(control.State, ANSWER_S)

    async def answered(self, within_s: float) -> control.Answered:
        return await self._answer(control.Answered, within_s)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def stop(self) -> None:
        """Close the socket, which ends the process; kill what does not end."""
        self._writer.close()
        await self.join(ANSWER_S)
        if self.is_alive:
            self.process.kill()
            await self.join(ANSWER_S)

    async def join(self, within_s: float) -> None:
        await asyncio.to_thread(self.process.join, within_s)

    async def _answer(self, kind: type[A], within_s: float) -> A:
        async with asyncio.timeout(within_s):
            answer = await self.answers.get()
        assert isinstance(answer, kind), answer
        return answer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                answer = control.decode_answer(line)
                if isinstance(answer, control.Reached):
                    self.reached.put_nowait(answer)
                else:
                    self.answers.put_nowait(answer)
        except ConnectionError:
            pass  # killed


@dataclass
class WorkerProcess(ChaosProcess):
    info: WorkerInfo = field(init=False)

    @classmethod
    async def launch(cls, spec: control.WorkerSpec) -> WorkerProcess:
        self, started = await cls.start(chaos_worker.main, spec)
        assert isinstance(self, WorkerProcess) and started.info is not None
        self.info = started.info
        return self


async def launch_gateway() -> ChaosProcess:
    process, _ = await ChaosProcess.start(gateway.main)
    return process
