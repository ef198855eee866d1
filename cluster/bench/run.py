"""Sends jobs at a server and gathers what became of them.

Open loop: each at its time, whatever the server does; what the client itself sends late counts against the server's
latency as seen by a user, and is reported. Closed loop: a fixed number at once, the next when one ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.cluster.bench.client import Client, Outcome
from baton.cluster.bench.load import Job

OnEnd = Callable[[Outcome], None]


async def run_open(client: Client, jobs: Sequence[Job], on_end: OnEnd) -> list[Outcome]:
    """Send each job at its time; latencies count from that time."""
    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Outcome]] = []
        for job in sorted(jobs, key=lambda job: job.time_s):
            await asyncio.sleep(start + job.time_s - time.monotonic())
            tasks.append(group.create_task(_send(client, job, start + job.time_s, on_end)))
    return [task.result() for task in tasks]


async def run_closed(client: Client, jobs: Sequence[Job], on_end: OnEnd, concurrency: int) -> list[Outcome]:
    """Keep `concurrency` jobs going, in order."""
    todo = iter(jobs)
    outcomes: list[Outcome] = []

    async def one_after_the_other() -> None:
        for job in todo:
            outcomes.append(await _send(client, job, time.monotonic(), on_end))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_the_other())
    return outcomes


async def _send(client: Client, job: Job, intended: float, on_end: OnEnd) -> Outcome:
    outcome = await client.send(job, intended)
    on_end(outcome)
    return outcome
