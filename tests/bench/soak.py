"""Soak: many short requests over real processes, some aborted, some of whose workers are killed.

Two workers live through it all: their memory must not grow. Two more are killed in turn and restarted. Every request is
accounted for, every text is checked, and every pool is whole at the end.
Run: python tests/bench/soak.py [--requests 20000] [--json]
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Annotated

import msgspec
import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.chaos.world import World, is_right, new_request

SURVIVORS = ("P", "D")
VICTIMS = ("P2", "D2")
CONCURRENCY = 12
NUM_SAMPLES = 100
WARM_UP = 0.25  # the share of the run after which memory must be flat
MAX_KIB_PER_1000_REQUESTS = 128  # no trace of a request's own objects is smaller than 1 KiB
MAX_ABORT_AFTER_S = 0.03
MAX_KILLS_BEHIND = 2  # a restart takes longer than the requests between two kills: clients wait for it then


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One process's resident memory from the end of the warm-up to the end of the run."""

    name: str
    mean_mib: float
    kib_per_1000_requests: float  # slope of the least-squares line
    growth_mib: float  # that slope over the whole span


@dataclass(frozen=True, kw_only=True)
class Report:
    num_requests: int
    num_right: int
    num_aborted: int
    num_wrong: int  # another text than the right one, or an error
    num_kills: int
    num_failovers: int  # answered over more than one stream
    requests_per_s: float
    memory: tuple[Memory, ...]
    problems: tuple[str, ...]


@dataclass
class Soak:
    num_requests: int
    abort_share: float
    kill_share: float
    random: random.Random = field(default_factory=lambda: random.Random(1))
    world: World = field(default_factory=World)
    tally: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    samples: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    num_done: int = 0

    async def run(self, progress: Progress) -> Report:
        for name in (*SURVIVORS, *VICTIMS):
            await self.world.start(name)
        begun = time.monotonic()
        task = progress.add_task("requests", total=self.num_requests)
        numbers = iter(range(self.num_requests))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill_now_and_then())
            for _ in range(CONCURRENCY):
                tasks.create_task(self._client(numbers, progress, task))
        seconds = time.monotonic() - begun
        problems = [*self.wrong[:10], *await self.world.whole()]
        left = await self.world.close()
        problems += [f"processes {left} are left"] if left else []
        return self._report(seconds, problems)

    async def _client(self, numbers: Iterator[int], progress: Progress, task: TaskID) -> None:
        for _ in numbers:
            while self.num_done * self.kill_share > self.tally["kill"] + MAX_KILLS_BEHIND:
                await asyncio.sleep(0.01)
            await self._request()
            self.num_done += 1
            progress.update(task, completed=self.num_done)
            if self.num_done % max(1, self.num_requests // NUM_SAMPLES) == 0:
                self._sample()

    async def _request(self) -> None:
        """Prefill at one of the two prefill workers or at none; decode at one of the two, with the other to spare."""
        request = new_request(self.random.randint(1, 60), self.random.randint(1, 8))
        workers = self.world.workers
        prefill = self.random.choice([workers["P"], workers["P2"], None])
        decodes = self.random.sample([workers["D"].info, workers["D2"].info], 2)
        gateway = self.world.gateway
        work = asyncio.create_task(gateway.generate(request, prefill and prefill.info.peer, [*decodes, decodes[0]]))
        if self.random.random() < self.abort_share:
            await asyncio.wait([work], timeout=self.random.uniform(0, MAX_ABORT_AFTER_S))
            gateway.cancel(request.id)
            work.cancel()
            self.tally["aborted"] += 1
            return
        answered = await work
        self.tally["failover"] += answered.num_streams > 1
        if is_right(request, answered):
            self.tally["right"] += 1
        else:
            self.wrong.append(f"wrong: {msgspec.to_builtins(answered)}")

    async def _kill_now_and_then(self) -> None:
        for number in range(1, int(self.num_requests * self.kill_share) + 1):
            while self.num_done * self.kill_share < number:
                await asyncio.sleep(0.01)
            victim = self.world.workers[VICTIMS[number % 2]]
            victim.signal(SIGKILL)
            await victim.join(5)
            self.tally["kill"] += 1
            await self.world.repair()

    def _sample(self) -> None:
        processes = {name: self.world.workers[name].pid for name in SURVIVORS} | {"gateway": psutil.Process().pid}
        for name, pid in processes.items():
            self.samples.setdefault(name, []).append((self.num_done, psutil.Process(pid).memory_info().rss))

    def _report(self, seconds: float, problems: list[str]) -> Report:
        memory = tuple(_memory(name, samples) for name, samples in self.samples.items())
        problems += [
            f"{one.name} grew by {one.kib_per_1000_requests:.0f} KiB per 1,000 requests after its warm-up"
            for one in memory
            if one.kib_per_1000_requests > MAX_KIB_PER_1000_REQUESTS
        ]
        num_accounted = self.tally["right"] + self.tally["aborted"] + len(self.wrong)
        if num_accounted != self.num_requests:
            problems.append(f"{self.num_requests - num_accounted} requests are not accounted for")
        return Report(
            num_requests=self.num_requests,
            num_right=self.tally["right"],
            num_aborted=self.tally["aborted"],
            num_wrong=len(self.wrong),
            num_kills=self.tally["kill"],
            num_failovers=self.tally["failover"],
            requests_per_s=self.num_requests / seconds,
            memory=memory,
            problems=tuple(problems),
        )


def _memory(name: str, samples: list[tuple[int, int]]) -> Memory:
    kept = np.array(samples[int(len(samples) * WARM_UP) :], dtype=np.float64)
    slope = float(np.polyfit(kept[:, 0], kept[:, 1], 1)[0])
    return Memory(
        name=name,
        mean_mib=float(kept[:, 1].mean()) / 2**20,
        kib_per_1000_requests=slope * 1000 / 1024,
        growth_mib=slope * float(kept[-1, 0] - kept[0, 0]) / 2**20,
    )


def as_table(report: Report) -> Table:
    table = Table("what", "value", title="Soak")
    for name, value in asdict(report).items():
        if name not in ("memory", "problems"):
            table.add_row(name, f"{value:,.0f}")
    for one in report.memory:
        growth = f"{one.kib_per_1000_requests:+.0f} KiB per 1,000 requests, {one.growth_mib:+.2f} MiB in all"
        table.add_row(f"RSS of {one.name}", f"{one.mean_mib:.0f} MiB, {growth}")
    for problem in report.problems:
        table.add_row("PROBLEM", problem)
    return table


async def soak(num_requests: int, *, abort_share: float = 0.1, kill_share: float = 0.01) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        return await Soak(num_requests, abort_share, kill_share).run(progress)


def main(
    requests: Annotated[int, typer.Option(help="how many short requests")] = 20_000,
    abort_share: Annotated[float, typer.Option(help="share of requests whose client leaves")] = 0.1,
    kill_share: Annotated[float, typer.Option(help="worker kills per request")] = 0.01,
    json: Annotated[bool, typer.Option(help="print the report as JSON")] = False,
) -> None:
    report = asyncio.run(soak(requests, abort_share=abort_share, kill_share=kill_share))
    if json:
        print(msgspec.json.encode(report).decode())
    else:
        Console().print(as_table(report))
    raise typer.Exit(code=bool(report.problems))


if __name__ == "__main__":
    typer.run(main)
