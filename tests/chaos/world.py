"""Real processes in the roles of a small cluster, and one cell of the chaos table played in them.

P prefills for D and for a spare D; requests of other clients run beside the one that the event hits. The world also
plays the cluster: it restarts what died and tells the others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import msgspec

from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import WorkerInfo
from baton.transfer.config import TransferConfig
from tests.chaos import control
from tests.chaos.cells import BEAT_S, BOUND_S, Cell, Event
from tests.chaos.gates import GateSpec
from tests.chaos.gateway import Gateway
from tests.chaos.processes import ChaosProcess, WorkerProcess, launch_gateway
from tests.fakes import fake_output

BLOCK_SIZE = 4
NUM_BLOCKS = {"P": 128, "D": 64, "spare": 64}
REACH_S = 5.0  # for the protocol to come to the point where the event happens
END_S = 5.0  # for a request to end after it
WHOLE_S = 5.0  # for every pool to be whole after that
EXIT_S = 8.0  # for a terminated worker to drain and end

MOVER: Any = os.environ.get("BATON_CHAOS_MOVER", "nixl")
SEEDS = itertools.count(1)


def worker_config(num_blocks: int, block_size: int = BLOCK_SIZE) -> WorkerConfig:
    return WorkerConfig(
        model="fake",
        served_name="fake",
        engine=EngineConfig(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=8, max_step_tokens=16, max_prefill_chunk=8
        ),
        transfer=TransferConfig(mover=MOVER, beat_s=BEAT_S, lease_s=BOUND_S, stall_s=BOUND_S, max_write_blocks=2),
    )


def new_request(num_prompt: int, max_tokens: int) -> Request:
    """Make a prompt that shares nothing with any other."""
    seed = next(SEEDS)
    return Request(
        id=f"r{seed}",
        tokens=(1 + seed % 40, *(1 + (seed // 40 + i * i) % 40 for i in range(num_prompt - 1))),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True),
    )


def is_right(request: Request, answered: control.Answered) -> bool:
    expected = fake_output(request, request.sampling.max_tokens)
    return answered.finish == "length" and list(answered.tokens) == expected


@dataclass(frozen=True)
class Outcome:
    """How one cell went: `problems` is empty when every claim held."""

    cell: Cell
    problems: tuple[str, ...]
    end_s: float  # event -> the request's end
    whole_s: float  # the request's end -> all pools whole
    prefill_worker: str | None  # who computed the prompt in the end
    num_streams: int


@dataclass
class World:
    workers: dict[str, WorkerProcess] = field(default_factory=dict[str, WorkerProcess])
    gateway: Gateway = field(default_factory=Gateway)  # of the other clients
    gateway_process: ChaosProcess | None = None
    pids: set[int] = field(default_factory=set[int])  # of everything ever started

    async def start(self, name: str, port: int = 0, block_size: int = BLOCK_SIZE) -> None:
        role = "prefill" if name.startswith("P") else "decode"
        config = worker_config(NUM_BLOCKS.get(name, 64), block_size).model_dump_json()
        spec = control.WorkerSpec(worker_id=name, role=role, config=config, port=port)
        self.workers[name] = await WorkerProcess.launch(spec)
        self.pids.add(self.workers[name].pid)

    async def gateway_in_process(self) -> ChaosProcess:
        if self.gateway_process is None:
            self.gateway_process = await launch_gateway()
            self.pids.add(self.gateway_process.pid)
        return self.gateway_process

    def tell_of_death(self, dead: WorkerInfo) -> None:
        for worker in self.workers.values():
            if worker.is_alive:
                worker.say(control.PeerDead(dead.peer.incarnation))

    async def repair(self) -> None:
        """Replace what died, and tell the others of it, as the cluster would."""
        for name, worker in list(self.workers.items()):
            if not worker.is_alive:
                await self.gateway.forget(worker.info)
                self.tell_of_death(worker.info)
                await worker.stop()
                await self.start(name)
        if self.gateway_process is not None and not self.gateway_process.is_alive:
            await self.gateway_process.stop()
            self.gateway_process = None

    async def restart_in_place(self, name: str) -> None:
        """Bring a killed worker back at its address; the others have to find out."""
        old = self.workers[name]
        await old.join(EXIT_S)
        await old.stop()
        await self.gateway.forget(old.info)
        await self.start(name, int(old.info.peer.address.rsplit(":", 1)[1]))

    async def whole(self) -> list[str]:
        """Wait until no worker holds anything; name what some still hold after the bound."""
        deadline = time.monotonic() + WHOLE_S
        while True:
            states = {name: await worker.state() for name, worker in self.workers.items() if worker.is_alive}
            bad = {name: state for name, state in states.items() if not state.is_whole}
            if not bad:
                return []
            if time.monotonic() > deadline:
                return [f"{name} still holds after {WHOLE_S} s: {state}" for name, state in bad.items()]
            await asyncio.sleep(0.03)

    async def rebuild(self) -> None:
        """Start afresh, so that what one cell broke does not fail the next."""
        for worker in self.workers.values():
            worker.process.kill()
            await worker.join(EXIT_S)
        await self.repair()

    async def close(self) -> list[int]:
        """Stop everything; return the processes that are left."""
        await self.gateway.close()
        processes = [*self.workers.values(), *([self.gateway_process] if self.gateway_process else [])]
        for process in processes:
            await process.stop()
        return [pid for pid in self.pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class CellRun:
    """Play one cell: hold the request at the phase's point, let the event happen, and check every claim."""

    def __init__(self, world: World, cell: Cell) -> None:
        self.world = world
        self.cell = cell
        self.request = new_request(45, 40)  # long enough for three frames, even where a busy machine joins some
        self.own_gateway = Gateway()
        self.others: list[tuple[str, Request, asyncio.Task[control.Answered]]] = []
        self.problems: list[str] = []

    async def run(self) -> Outcome:
        phase, event = self.cell.phase, self.cell.event
        host = self.world.workers[phase.place]
        if phase.is_full:
            await self._fill(host)
        if phase.is_new:
            self.world.workers["D"].say(control.DropPeers())
            await self.world.workers["D"].state()  # which comes after
        host.say(GateSpec(phase.point, "Hello" if phase.is_new else self.request.id, event.act, phase.nth))
        self._start_others()
        main = asyncio.create_task(await self._main())
        await self._reached(host)
        begun = time.monotonic()
        await self._happen(host, main)
        answered = await self._end_of(main)
        end_s = time.monotonic() - begun
        await self._check_others()
        await self._check_exit()
        await self.world.repair()
        begun = time.monotonic()
        self.problems += await self.world.whole()
        whole_s = time.monotonic() - begun
        await self.own_gateway.close()
        prefill_worker, num_streams = (answered.prefill_worker, answered.num_streams) if answered else (None, 0)
        return Outcome(self.cell, tuple(self.problems), end_s, whole_s, prefill_worker, num_streams)

    @property
    def _decodes(self) -> tuple[WorkerInfo, ...]:
        return (self.world.workers["D"].info, self.world.workers["spare"].info)

    async def _fill(self, host: WorkerProcess) -> None:
        """Let another request reserve nearly all of D, and hold its first write."""
        hog = new_request(4 * 53, 10)
        host.say(GateSpec("write", hog.id, "hold"))
        self._start_other("the one that fills D", hog, self._decodes)
        await self._reached(host)

    def _start_others(self) -> None:
        spare = self._decodes[1:]
        self._start_other("from P to D", new_request(30, 30), self._decodes)
        self._start_other("from P to the spare D", new_request(37, 30), spare)
        self._start_other("on the spare D alone", new_request(20, 40), spare, alone=True)

    def _start_other(self, name: str, request: Request, decodes: tuple[WorkerInfo, ...], alone: bool = False) -> None:
        prefill = None if alone else self.world.workers["P"].info.peer
        work = self.world.gateway.generate(request, prefill, decodes)
        self.others.append((name, request, asyncio.create_task(work)))

    async def _main(self) -> Coroutine[Any, Any, control.Answered]:
        prefill = self.world.workers["P"].info.peer
        if self.cell.event.victim != "gateway":
            return self.own_gateway.generate(self.request, prefill, self._decodes)
        process = await self.world.gateway_in_process()
        process.say(control.Generate(self.request, prefill, self._decodes))
        return process.answered(REACH_S + END_S)

    async def _reached(self, host: WorkerProcess) -> None:
        async with asyncio.timeout(REACH_S):
            await host.reached.get()

    async def _happen(self, host: WorkerProcess, main: asyncio.Task[control.Answered]) -> None:
        event = self.cell.event
        victim = self._process(event)
        if event.victim == "link":
            await asyncio.sleep(event.pause_s)
        elif event.name == "cancels":
            self.own_gateway.cancel(self.request.id)
        elif event.name == "vanishes":
            await self.own_gateway.close()
        if victim is not None and event.signal is not None:
            victim.signal(event.signal)
        host.say(control.OpenGates())
        if event.signal is SIGKILL and isinstance(victim, WorkerProcess) and not event.restarts_in_place:
            await victim.join(EXIT_S)
            self.world.tell_of_death(victim.info)
        if event.restarts_in_place:
            await self.world.restart_in_place(event.victim)
        if victim is not None and event.signal is SIGSTOP:
            await asyncio.sleep(event.pause_s)
            victim.signal(SIGCONT)
        if event.loses_client:
            main.cancel()

    def _process(self, event: Event) -> ChaosProcess | None:
        if event.victim == "gateway":
            return self.world.gateway_process
        return self.world.workers.get(event.victim)

    async def _end_of(self, main: asyncio.Task[control.Answered]) -> control.Answered | None:
        if self.cell.event.loses_client:
            await asyncio.wait([main])
            return None
        try:
            async with asyncio.timeout(END_S):
                answered = await main
        except TimeoutError:
            self.problems.append(f"the request did not end within {END_S} s")
            return None
        self._check_text("the request", self.request, answered)
        return answered

    async def _check_others(self) -> None:
        _, pending = await asyncio.wait([task for _, _, task in self.others], timeout=END_S)
        for name, request, task in self.others:
            if task in pending:
                task.cancel()
                self.problems.append(f"the request {name} did not end within {END_S} s")
            else:
                self._check_text(f"the request {name}", request, task.result())

    def _check_text(self, name: str, request: Request, answered: control.Answered) -> None:
        if not is_right(request, answered):
            got = msgspec.to_builtins(answered)
            self.problems.append(f"{name} should have got {fake_output(request, request.sampling.max_tokens)}: {got}")

    async def _check_exit(self) -> None:
        """A terminated worker drains and ends by itself; a killed one is dead before the others are told so."""
        event = self.cell.event
        victim = self._process(event)
        if victim is None or not event.ends_process or event.restarts_in_place:
            return
        await victim.join(EXIT_S)
        if victim.is_alive:
            self.problems.append(f"{event.victim} did not end within {EXIT_S} s")
        elif event.victim in "PD" and event.signal is SIGTERM and victim.process.exitcode != 0:
            self.problems.append(f"{event.victim} ended with {victim.process.exitcode}")
