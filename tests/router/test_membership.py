from __future__ import annotations

import asyncio

import pytest
from fake_workers import FakeWorker

from baton.router.config import PolicyName, RouterConfig
from baton.router.errors import NoWorkers
from baton.router.tokenizer import Tokenizer
from tests.router.rig import a_request, rig, served, tokens_of, until


async def test_a_worker_that_leaves_ends_what_it_runs_and_gets_nothing_new() -> None:
    leaving, staying = FakeWorker(worker_id="a"), FakeWorker(worker_id="b")
    leaving.num_steps_allowed = 1
    async with rig(leaving, staying) as router:
        task = asyncio.create_task(router.run(a_request("old")))
        await until(lambda: leaving.num_running == 1)
        await router.membership.set_workers([staying.info()])
        await router.run(a_request("new"))
        assert [len(leaving.submits), len(staying.submits)] == [1, 1]
        leaving.allow(100)
        assert len(tokens_of(await task)) == 8
        assert not leaving.cancels
        await until(lambda: not leaving._streams)  # pyright: ignore[reportPrivateUsage] - hung up


async def test_a_worker_may_come_back_before_it_was_let_go() -> None:
    worker = FakeWorker(worker_id="a")
    worker.num_steps_allowed = 1
    async with rig(worker) as router:
        task = asyncio.create_task(router.run(a_request("old")))
        await until(lambda: worker.num_running == 1)
        await router.membership.set_workers([])
        assert router.membership.why_unusable() == "no decode worker has registered"
        await router.join(worker)
        worker.num_steps_allowed = None
        worker.wake()
        await task
        assert len(tokens_of(await router.run(a_request("new")))) == 8


async def test_a_new_life_of_a_worker_replaces_the_old_at_once() -> None:
    old, other = FakeWorker(worker_id="a"), FakeWorker(worker_id="a")
    old.num_steps_allowed = 2
    async with rig(old) as router:
        task = asyncio.create_task(router.run(a_request()))
        await until(lambda: old.num_running == 1)
        other.load = None
        await other.start()
        await router.membership.set_workers([other.info()])  # the old process hangs; the cluster says it is dead
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: router.membership.decoders())
        assert router.membership.decoders()[0].incarnation == other.incarnation
        assert len(tokens_of(await router.run(a_request("new")))) == 8
        await other.kill()


async def test_requests_wait_for_a_worker_that_is_coming() -> None:
    first, second = FakeWorker(worker_id="a"), FakeWorker(worker_id="a")
    first.num_steps_allowed = 3
    async with rig(first, grace_s=2) as router:
        running = asyncio.create_task(router.run(a_request("running")))
        await until(lambda: first.num_running == 1)
        await router.membership.set_workers([], is_decoder_coming=True)
        new = asyncio.create_task(router.run(a_request("new")))
        await first.kill()
        await asyncio.sleep(0.05)
        assert not running.done() and not new.done()
        await router.membership.set_workers([await second.start()], is_decoder_coming=False)
        assert tokens_of(await running) == tokens_of(await new)
        assert router.is_idle()
        await second.kill()


async def test_who_waits_for_a_worker_is_refused_when_none_comes_after_all() -> None:
    async with rig() as router:
        await router.membership.set_workers([], is_decoder_coming=True)
        new = asyncio.create_task(router.run(a_request("new")))
        await asyncio.sleep(0.01)
        await router.membership.set_workers([])
        with pytest.raises(NoWorkers):
            await new
    async with rig(config=RouterConfig(policy=PolicyName.CACHE_AWARE, max_queue_s=0.05)) as router:
        await router.membership.set_workers([], is_decoder_coming=True)
        with pytest.raises(NoWorkers, match="no decode worker has registered: try again"):
            await router.run(a_request("new"))


async def test_workers_with_one_id_are_refused() -> None:
    worker = FakeWorker()
    async with rig(worker) as router:
        with pytest.raises(ValueError, match="not unique"):
            await router.membership.set_workers([worker.info(), worker.info()])


async def test_it_says_why_nothing_can_be_served() -> None:
    decode, prefill = FakeWorker(worker_id="d", role="decode"), FakeWorker(worker_id="p", role="prefill")
    async with rig(decode, prefill) as router:
        assert router.membership.why_unusable() is None
        await decode.kill()
        await until(lambda: router.membership.why_unusable() is not None)
        assert router.membership.why_unusable() == "none of the 1 known decode workers is connected"
        await router.membership.set_workers([prefill.info()])
        assert router.membership.why_unusable() == "no decode worker has registered"


async def test_the_context_is_what_every_decode_worker_can_hold() -> None:
    workers = [FakeWorker(worker_id="a", max_context=4096), FakeWorker(worker_id="b", max_context=2048)]
    async with rig(*workers) as router:
        assert router.membership.max_context() == 2048


async def test_before_the_first_worker_nothing_may_be_asked(tokenizer: Tokenizer) -> None:
    """One that is coming for the first time may take minutes to load, and its context is not known."""
    async with served(tokenizer) as api:
        await api.gateway.set_workers([], is_decoder_coming=True)
        assert (await api.http.get("/health")).status_code == 503
        reply = await api.chat()
        assert (reply.status_code, reply.json()["error"]["message"]) == (
            503, "no decode worker has registered: try again shortly",
        )  # fmt: skip
