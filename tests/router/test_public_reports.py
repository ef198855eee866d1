"""Public bug reports on routing and overload, replayed with fake workers; numbers as in bug-reports.md."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fake_workers import FakeWorker

from baton.actors.engine.request import Request
from baton.router.config import RouterConfig
from baton.router.errors import Overloaded
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, a_request, rig, served, until

POLICIES = ["cost", "cache_aware"]


def long_prompt(id: str, first: int) -> Request:
    request = a_request(id, prompt_len=1600, first=first, max_tokens=1)
    return msgspec.structs.replace(request, deadline_s=None)


def num_submits(workers: list[FakeWorker]) -> list[int]:
    return [len(worker.submits) for worker in workers]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_dead_or_restarted_worker_is_credited_with_nothing(policy: Any) -> None:
    """Entry 24: its cached prefixes win the score although it is dead, or although it lost them."""
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(2)]
    async with rig(*workers, config=RouterConfig(policy=policy)) as router:
        await router.run(a_request("warm"))
        warm, cold = workers if workers[0].submits else reversed(workers)
        await warm.kill()
        await until(lambda: len(router.membership.decoders()) == 1)
        for i in range(50):
            await router.run(a_request(f"dead{i}"))
        assert len(cold.submits) == 50 and len(warm.submits) == 1
        restarted = FakeWorker(worker_id=warm.worker_id)
        await restarted.start()
        await router.join(restarted, cold)
        for i in range(5):
            outputs = await router.run(a_request(f"again{i}"))
            assert outputs[0].cached_tokens == 64
        assert not restarted.submits  # the other has the prefix, and this one is known to be empty
        await restarted.kill()


@pytest.mark.parametrize("policy", POLICIES)
async def test_unique_prompts_one_at_a_time_spread(policy: Any) -> None:
    """Entry S14: every miss went to one worker, the first or the least cached, however loaded it was."""
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(4)]
    async with rig(*workers, config=RouterConfig(policy=policy)) as router:
        for i in range(40):
            await router.run(long_prompt(f"r{i}", 10_000 * i))
        assert max(num_submits(workers)) <= 15
        assert router.is_idle()


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_hot_prefix_spills_over(policy: Any) -> None:
    """Entry S14: 480 requests with one prefix at once, and all of them on the worker that got the first."""
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(4)]
    for worker in workers:
        worker.num_steps_allowed = 0
    async with rig(*workers, config=RouterConfig(policy=policy)) as router:
        prompt = long_prompt("r", 0)
        requests = [msgspec.structs.replace(prompt, id=f"r{i}", tokens=(*prompt.tokens, i)) for i in range(480)]
        tasks = [asyncio.create_task(router.run(request)) for request in requests]
        await until(lambda: sum(num_submits(workers)) == 480)
        assert min(num_submits(workers)) > 0 and max(num_submits(workers)) <= 240
        for worker in workers:
            worker.num_steps_allowed = None
            worker.wake()
        await asyncio.gather(*tasks)
        assert router.is_idle()


async def test_a_failed_or_cancelled_request_gives_its_load_back() -> None:
    """Entry S14: load was given back on one path only."""
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(4)]
    async with rig(*workers) as router:
        for worker in workers:
            worker.error = "broken"
        results = await asyncio.gather(*(router.run(a_request(f"e{i}")) for i in range(20)), return_exceptions=True)
        assert all(isinstance(result, Exception) for result in results)
        assert router.is_idle()
        for worker in workers:
            worker.error, worker.num_steps_allowed = None, 0
        tasks = [asyncio.create_task(router.run(a_request(f"c{i}"))) for i in range(20)]
        await until(lambda: sum(worker.num_running for worker in workers) == 20)
        for task in tasks:
            task.cancel()
        await until(lambda: sum(worker.num_running for worker in workers) == 0)
        assert router.is_idle()


async def test_a_huge_prompt_and_a_crowd_of_small_ones_do_not_starve_each_other() -> None:
    """Entry 25, before the workers: they are busy, so who goes next is decided here."""
    worker = FakeWorker()
    worker.step_tokens = 64  # two small prompts' worth
    worker.num_steps_allowed = 0
    order: list[str] = []
    async with rig(worker) as router:

        async def ask(request: Request) -> None:
            await router.run(msgspec.structs.replace(request, deadline_s=None))

        tasks = [
            asyncio.create_task(ask(a_request(f"first{i}", first=20_000 + 100 * i, max_tokens=1))) for i in range(2)
        ]
        await until(lambda: worker.num_running == 2)
        tasks.append(asyncio.create_task(ask(a_request("huge", prompt_len=6400, first=7, max_tokens=1))))
        tasks += [asyncio.create_task(ask(a_request(f"small{i}", first=100 * i, max_tokens=1))) for i in range(300)]
        await until(lambda: router.admission.num_queued == 301)
        worker.num_steps_allowed = None
        worker.wake()
        await asyncio.gather(*tasks)
        order = [submit.request.id for submit in worker.submits]
    assert 10 < order.index("huge") < 200


async def test_thousands_of_short_requests_leave_nothing_behind() -> None:
    """Entry 27: lists that grow with each request. One in ten is cancelled, one in ten refused."""
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(2)]
    async with rig(*workers, config=RouterConfig(max_queued_requests=50)) as router:
        sizes: list[list[int]] = []
        for _ in range(4):
            for _ in range(10):
                requests = [a_request(f"r{i}", max_tokens=1, first=i) for i in range(55)]
                tasks = [asyncio.create_task(router.run(request)) for request in requests]
                await asyncio.sleep(0)
                for task in tasks[:5]:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert sum(isinstance(result, Overloaded) for result in results) == 5
            await until(lambda: not any(worker.num_running for worker in workers))
            sizes.append(container_sizes(router))
        assert sizes[1] == sizes[2] == sizes[3]
        assert router.is_idle()


def container_sizes(owner: object) -> list[int]:
    """Measure every container that hangs on the router, its admission, its streams and its metrics."""
    seen: set[int] = set()
    sizes: list[int] = []

    def walk(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth > 6:
            return
        seen.add(id(thing))
        if isinstance(thing, dict | list | set):
            sizes.append(len(thing))
            for item in list(thing.values() if isinstance(thing, dict) else thing)[:100]:
                walk(item, depth + 1)
        elif type(thing).__module__.startswith(("baton.", "prometheus_client.")):
            fields = list(vars(thing)) if hasattr(thing, "__dict__") else getattr(type(thing), "__slots__", ())
            for name in fields:
                walk(getattr(thing, name, None), depth + 1)

    for thing in vars(owner).values():
        walk(thing, 0)
    return sizes


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_refused_alike_on_every_path_and_ends(tokenizer: Tokenizer, path: str, stream: bool) -> None:
    """Entry 28: accepted without bound, or told as something else on one path."""
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with served(tokenizer, worker, config=RouterConfig(max_queued_requests=4)) as api:
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        body = {"model": MODEL, "max_tokens": 1, "stream": stream, **prompt}
        accepted = [asyncio.create_task(api.http.post(path, json=body)) for _ in range(4)]
        await until(lambda: worker.num_running == 4)
        for _ in range(36):
            reply = await api.http.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
            assert int(reply.headers["retry-after"]) >= 1
        assert len(worker.submits) == 4  # no prefill was spent on the others
        worker.num_steps_allowed = None
        worker.wake()
        assert {reply.status_code for reply in await asyncio.gather(*accepted)} == {200}
        assert (await api.http.post(path, json=body)).status_code == 200
        await until(api.is_idle)
