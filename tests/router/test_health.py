from __future__ import annotations

import asyncio

from fake_workers import FakeWorker

from baton.router.health import Health
from tests.router.rig import Rig, a_request, rig, until


def health(router: Rig, *, timeout_s: float = 5.0, fresh_s: float = 60.0) -> Health:
    return Health(router.membership, fresh_s=fresh_s, timeout_s=timeout_s)


async def test_an_idle_worker_proves_itself_by_one_token_which_holds_for_a_while() -> None:
    worker = FakeWorker()
    async with rig(worker) as router:
        checks = health(router)
        assert await asyncio.gather(*(checks.why_unusable() for _ in range(20))) == [None] * 20
        assert await checks.why_unusable() is None
        (probe,) = worker.submits
        assert (len(probe.request.tokens), probe.request.sampling.max_tokens) == (1, 1)
        assert router.is_idle() and worker.num_running == 0


async def test_a_worker_that_gives_no_token_is_not_believed() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with rig(worker) as router:
        reason = await health(router, timeout_s=0.05).why_unusable()
        assert reason == "none of the 1 connected decode workers gave a token within 0.05 s"
        await until(lambda: worker.num_running == 0)  # the probe was cancelled
        worker.num_steps_allowed = None
        assert await health(router).why_unusable() is None


async def test_a_worker_that_answers_with_an_error_is_not_believed() -> None:
    worker = FakeWorker()
    worker.error = "broken"
    async with rig(worker) as router:
        assert await health(router).why_unusable() is not None


async def test_one_good_worker_is_enough_and_is_not_kept_waiting_by_a_bad_one() -> None:
    good, bad = FakeWorker(worker_id="good"), FakeWorker(worker_id="bad")
    bad.num_steps_allowed = 0
    async with rig(good, bad) as router, asyncio.timeout(2):
        assert await health(router, timeout_s=3).why_unusable() is None


async def test_a_busy_worker_is_not_probed() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with rig(worker) as router:
        running = asyncio.create_task(router.run(a_request()))
        await until(lambda: worker.num_running == 1)
        assert await health(router, timeout_s=0.05).why_unusable() is None
        assert len(worker.submits) == 1
        worker.allow(100)
        await running


async def test_without_workers_it_says_so() -> None:
    async with rig() as router:
        assert await health(router).why_unusable() == "no decode worker has registered"
