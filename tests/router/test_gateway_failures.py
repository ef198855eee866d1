"""Clients that leave and workers that die: nothing hangs, nothing is left behind, no failure looks like an end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from fake_workers import FakeWorker

from baton.router.config import RouterConfig
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served, until

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_its_stream_frees_everything(tokenizer: Tokenizer, n: int) -> None:
    worker = FakeWorker(step_s=0.002)
    async with served(tokenizer, worker) as api:
        stream = await api.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=n)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: worker.num_running == 0 and api.is_idle())
        assert len(worker.cancels) == n
        assert 'requests_total{endpoint="chat",status="499"} 1.0' in (await api.http.get("/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_frees_everything(tokenizer: Tokenizer, stream: bool) -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with served(tokenizer, worker) as api:
        for i in range(20):
            call = asyncio.create_task(api.chat(stream=stream))
            await until(lambda: worker.num_running == 1)
            call.cancel()
            await until(lambda: worker.num_running == 0 and api.is_idle())
            assert len(worker.cancels) == i + 1
        worker.num_steps_allowed = None
        assert (await api.chat(max_tokens=1)).status_code == 200


async def test_a_fault_on_the_way_is_one_error_event_and_no_end(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 10
    async with served(tokenizer, worker) as api:
        call = asyncio.create_task(api.events(max_tokens=50))
        await until(lambda: worker.num_steps_allowed == 0)
        worker.error = "the GPU is on fire"
        worker.allow(1)
        events = [json.loads(event) for event in await call]
        assert events[-1]["error"]["code"] == "worker_failed"
        assert "the GPU is on fire" in events[-1]["error"]["message"]
        assert not any("error" in event for event in events[:-1])
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        assert 'requests_total{endpoint="chat",status="500"} 1.0' in (await api.http.get("/metrics")).text
        assert api.is_idle()


async def test_openais_client_raises_when_a_stream_fails(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 3
    async with served(tokenizer, worker) as api:
        stream = await api.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        worker.error = "broken"
        worker.allow(5)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_before_the_first_token_is_a_plain_5xx(tokenizer: Tokenizer, stream: bool) -> None:
    worker = FakeWorker()
    worker.error = "broken"
    async with served(tokenizer, worker) as api:
        reply = await api.chat(stream=stream)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "worker_failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_worker_before_the_first_token_with_no_other_is_503(tokenizer: Tokenizer, stream: bool) -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with served(tokenizer, worker) as api:
        call = asyncio.create_task(api.chat(stream=stream))
        await until(lambda: worker.num_running == 1)
        await worker.kill()
        reply = await call
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_lost")
        assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_killed_worker_is_not_noticed_in_the_text(tokenizer: Tokenizer, n: int) -> None:
    """64 tokens in all, none twice, logprobs and usage right; other requests go on."""
    workers = [FakeWorker(worker_id="a"), FakeWorker(worker_id="b")]
    fields: dict[str, Any] = {"max_tokens": 64, "temperature": 0, "n": n, "logprobs": True}
    async with served(tokenizer, *workers) as api:
        undisturbed = (await api.chat(**fields)).json()
        victim, spare = workers if workers[0].submits else reversed(workers)
        victim.num_steps_allowed = 20
        call = asyncio.create_task(api.events(**fields, stream_options={"include_usage": True}))
        await until(lambda: victim.num_steps_allowed == 0)
        await victim.kill()
        chunks = [json.loads(event) for event in (await call)[:-1]]
        for choice in undisturbed["choices"]:
            mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
            assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
            scored = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert scored == choice["logprobs"]["content"]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
            assert sum(c["delta"].get("role") == "assistant" for c in mine) == 1
        assert chunks[-1]["usage"]["completion_tokens"] == 64 * n
        assert len(spare.submits) == n and all(0 < submit.request.num_output <= 20 for submit in spare.submits)
        assert api.is_idle()


async def test_a_killed_worker_with_no_other_ends_the_stream_with_an_error(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 20
    async with served(tokenizer, worker) as api:
        call = asyncio.create_task(api.events(max_tokens=64))
        await until(lambda: worker.num_steps_allowed == 0)
        await worker.kill()
        events = await call
        assert json.loads(events[-1])["error"]["code"] == "worker_lost"
        assert "[DONE]" not in events


async def test_two_requests_of_one_client_id_do_not_mix(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(lambda r: [(300 + len(r.tokens) % 100,)] * 5, step_s=0.001)
    async with served(tokenizer, worker) as api:
        alone = [(await api.chat(messages=[{"role": "user", "content": "x" * i}])).json() for i in (1, 30)]
        calls = [
            api.http.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "x" * i}]},
                headers={"x-request-id": "same"},
            )
            for i in (1, 30)
        ]
        together = [reply.json() for reply in await asyncio.gather(*calls)]
        texts = [reply["choices"][0]["message"]["content"] for reply in together]
        assert texts == [reply["choices"][0]["message"]["content"] for reply in alone]
        assert texts[0] != texts[1]


async def test_a_stopping_gateway_ends_what_runs_and_refuses_what_comes(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 1
    async with served(tokenizer, worker, config=RouterConfig()) as api:
        api.gateway._config = api.gateway._config.model_copy(update={"drain_s": 5.0})  # pyright: ignore[reportPrivateUsage]
        call = asyncio.create_task(api.events(max_tokens=5))
        await until(lambda: worker.num_steps_allowed == 0)
        stop = asyncio.create_task(api.gateway.stop())
        await asyncio.sleep(0)
        assert (await api.http.get("/health")).json() == {"status": "draining"}
        assert (await api.http.get("/live")).status_code == 200
        assert (await api.chat()).status_code == 503
        worker.num_steps_allowed = None
        worker.wake()
        assert (await call)[-1] == "[DONE]"
        await stop


async def test_a_slow_reader_costs_nobody_else(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        async with api.http.stream("POST", "/v1/chat/completions", json=body):  # thousands of tokens, not read
            assert len((await api.chat(max_tokens=50)).json()["choices"][0]["message"]["content"]) > 0
        await until(api.is_idle)
