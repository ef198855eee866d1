"""Gateways that do not talk to each other: the workers' frames tell each what the others sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fake_workers import FakeWorker

from baton.router.config import RouterConfig
from tests.router.rig import Rig, a_request, rig, tokens_of, until

LEAST_LOADED = RouterConfig(policy="least_loaded")


@asynccontextmanager
async def two_gateways(
    *workers: FakeWorker, config: RouterConfig | None = None
) -> AsyncGenerator[tuple[Rig, Rig], None]:
    for worker in workers:
        worker.tells_everybody = True
    async with rig(*workers, config=config) as one, rig(config=config) as other:
        await other.join(*workers)
        yield one, other


async def test_each_counts_what_the_other_has_sent() -> None:
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(2)]
    for worker in workers:
        worker.num_steps_allowed = 0
    async with two_gateways(*workers, config=LEAST_LOADED) as (one, other):
        tasks = [asyncio.create_task(one.run(a_request(f"one{i}", first=100 * i))) for i in range(6)]
        await until(lambda: [worker.num_running for worker in workers] == [3, 3])
        await until(lambda: [stream.num_requests for stream in other.membership.decoders()] == [3, 3])
        tasks += [asyncio.create_task(other.run(a_request(f"other{i}", first=100 * i))) for i in range(4)]
        await until(lambda: [worker.num_running for worker in workers] == [5, 5])
        for gateway in (one, other):
            streams = gateway.membership.decoders()
            await until(lambda streams=streams: [stream.num_requests for stream in streams] == [5, 5])
        for worker in workers:
            worker.allow(1000)
        await asyncio.gather(*tasks)
        await until(lambda: all(s.num_requests == 0 for g in (one, other) for s in g.membership.decoders()))
        assert one.is_idle() and other.is_idle()


async def test_a_burst_at_one_gateway_spreads_over_what_the_other_has_loaded_evenly() -> None:
    """Its own dispatches count on top of the frames at once: no herd runs to one worker between two frames."""
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(4)]
    for worker in workers:
        worker.num_steps_allowed = 0
    async with two_gateways(*workers, config=LEAST_LOADED) as (one, other):
        tasks = [asyncio.create_task(one.run(a_request(f"one{i}", first=100 * i))) for i in range(40)]
        await until(lambda: all(stream.num_requests == 10 for stream in other.membership.decoders()))
        tasks += [asyncio.create_task(other.run(a_request(f"other{i}", first=100 * i))) for i in range(20)]
        await until(lambda: sum(worker.num_running for worker in workers) == 60)
        assert all(13 <= worker.num_running <= 17 for worker in workers)
        for worker in workers:
            worker.allow(10_000)
        await asyncio.gather(*tasks)


async def test_a_gateway_that_starts_late_knows_the_caches_at_once() -> None:
    workers = [FakeWorker(worker_id=f"w{i}", step_s=0.002) for i in range(3)]
    async with rig(*workers) as old:
        for i in range(3):
            await old.run(a_request(f"warm{i}", first=1000 * (i + 1)))
        holder = {worker.submits[0].request.tokens[0]: worker for worker in workers}
        assert len(holder) == 3
        busy = [
            asyncio.create_task(old.run(a_request(f"busy{i}", first=5000 + 100 * i, max_tokens=250))) for i in range(6)
        ]
        await until(lambda: sum(worker.num_running for worker in workers) == 6)
        async with rig() as new:  # the old one goes on: a restart under load
            await new.join(*workers)
            assert not any(task.done() for task in busy)
            for first, worker in holder.items():
                outputs = await new.run(a_request(f"again{first}", first=first))
                assert worker.submits[-1].request.id == f"again{first}"
                assert outputs[0].cached_tokens == 64
                assert tokens_of(await old.run(a_request(f"old{first}", first=first))) == tokens_of(outputs)
            for outputs in await asyncio.gather(*busy):
                assert len(tokens_of(outputs)) == 250
