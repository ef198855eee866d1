"""The whole of Baton on real Ray with SmolLM2 on CPUs, through OpenAI's own clients."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import psutil
import pytest
import yaml
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field

from baton.cluster.config import ClusterConfig, parse_config

if TYPE_CHECKING:
    from tests.cluster.conftest import Serve, ServingCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def config(name: str, **overrides: Any) -> ClusterConfig:
    text = (Path(__file__).parents[2] / "deploy" / f"{name}.yaml").read_text()
    tree: dict[str, Any] = yaml.safe_load(text) | {
        "router": {"port": 0, "policy": "cache_aware"},  # prefills apart, however short the prompt
        "health": {"poll_s": 0.2, "silence_s": 20},
    }
    return parse_config(tree | overrides, {}, source=name)


def client(cluster: ServingCluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.address}/v1", api_key="none", max_retries=0, timeout=120)


async def settled(cluster: ServingCluster) -> None:
    """Every worker's blocks are free or cached, none is held."""
    async with asyncio.timeout(20):
        while True:
            counts = await cluster.supervisor.counts()
            if all(count.held == 0 for count in counts.values()):
                break
            await asyncio.sleep(0.1)
    assert all(count.free + count.cached == count.total for count in counts.values())


async def traced(cluster: ServingCluster, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=cluster.address, timeout=120) as http:
        body = {"model": MODEL, "messages": messages, "temperature": 0, **fields}
        return (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()


async def test_openai_clients_are_served_by_one_prefill_and_two_decode_workers(serving_cluster: Serve) -> None:
    cluster = await serving_cluster(config("1p2d"))
    await asyncio.to_thread(check_sync_client, cluster.address)
    async with client(cluster) as api:
        await check_streaming(api)
        await check_sampling(api)
        await check_prompts(api)
        await check_other_shapes(api)
        await check_structured(api)
        await check_refusals(api)
    await check_second_turn(cluster)
    await check_disconnects(cluster)


def check_sync_client(address: str) -> None:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as api:
        assert [model.id for model in api.models.list()] == [MODEL]
        chat = api.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == "The capital of France is Paris."
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None and chat.usage.prompt_tokens == 37 and chat.usage.completion_tokens == 8
        text = api.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
        assert " Paris" in text.choices[0].text and text.choices[0].finish_reason == "length"


async def check_streaming(api: AsyncOpenAI) -> None:
    stream = await api.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


async def check_sampling(api: AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16}
    one, two = [await api.completions.create(**ask, n=3, seed=7, temperature=1.0) for _ in range(2)]
    texts = [choice.text for choice in one.choices]
    assert texts == [choice.text for choice in two.choices]
    assert len(set(texts)) == 3
    stopped = await api.completions.create(**ask, temperature=0, stop=[","])
    assert "," not in stopped.choices[0].text and stopped.choices[0].finish_reason == "stop"
    scored = await api.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, logprobs=True, top_logprobs=2
    )  # type: ignore[call-overload]
    content = scored.choices[0].logprobs.content
    assert len(content) == scored.usage.completion_tokens
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in content)


async def check_prompts(api: AsyncOpenAI) -> None:
    """Prompts are scored and pooled whole, cached or not, whoever prefills."""
    ask: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is Paris.", "echo": True, "logprobs": 1}
    scored, again = [await api.completions.create(**ask, max_tokens=0, temperature=0) for _ in range(2)]
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == ask["prompt"] and "".join(logprobs.tokens) == ask["prompt"]
    assert logprobs.token_logprobs[0] is None and all(score < 0 for score in logprobs.token_logprobs[1:])
    assert logprobs.token_logprobs[1:] == pytest.approx(again.choices[0].logprobs.token_logprobs[1:], abs=1e-4)
    texts = ["Paris is in France.", "France contains Paris.", "x = [i for i in range(3)]"]
    reply = await api.embeddings.create(model=MODEL, input=texts, extra_body={"pooling": "mean"})
    city, same, code = (entry.embedding for entry in reply.data)
    assert sum(value * value for value in city) == pytest.approx(1, abs=1e-4)
    assert dot(city, same) > dot(city, code)


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


async def check_other_shapes(api: AsyncOpenAI) -> None:
    large = {"unknown": "x" * 300_000}  # read by the gateway's second process
    reply = await api.responses.create(model=MODEL, input=CAPITAL[0]["content"], temperature=0, extra_body=large)
    assert reply.output_text == "The capital of France is Paris."
    async with httpx.AsyncClient(base_url=str(api.base_url), timeout=120) as http:
        body = {"model": MODEL, "max_tokens": 30, "messages": CAPITAL, "temperature": 0}
        message = (await http.post("messages", json=body)).raise_for_status().json()
    assert message["content"] == [{"type": "text", "text": "The capital of France is Paris."}]


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool
    tags: list[Literal["old", "large", "north"]] = Field(max_length=2)


COUNTRY = {"country": {"enum": ["France", "Italy"]}}
PARAMETERS = {"type": "object", "properties": COUNTRY, "required": ["country"], "additionalProperties": False}
GIVE = {"type": "function", "function": {"name": "capital_of", "strict": True, "parameters": PARAMETERS}}


async def check_structured(api: AsyncOpenAI) -> None:
    """Models as openai parses them, and calls as it assembles them; streamed like whole."""
    ask: dict[str, Any] = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 100}
    whole = await api.chat.completions.parse(**ask, response_format=City)
    assert isinstance(whole.choices[0].message.parsed, City)
    called = await api.chat.completions.create(**ask, tools=[GIVE], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["country"] in ("France", "Italy")
    async with api.chat.completions.stream(**ask, response_format=City) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == whole.choices[0].message.parsed
    async with api.chat.completions.stream(
        **ask, tools=[GIVE], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        (streamed,) = (await stream.get_final_completion()).choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


async def check_refusals(api: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match=MODEL):
        await api.chat.completions.create(model="gpt-9", messages=CAPITAL)  # type: ignore[arg-type]
    for field, value in {"temperature": -1, "max_tokens": 100_000, "top_p": "high", "n": 1000}.items():
        with pytest.raises(BadRequestError) as refused:
            await api.chat.completions.create(model=MODEL, messages=CAPITAL, extra_body={field: value})  # type: ignore[arg-type]
        assert refused.value.param == field


async def check_second_turn(cluster: ServingCluster) -> None:
    """The worker that holds the conversation gets its next turn."""
    turns = [{"role": "user", "content": "Name three rivers in Europe, with one sentence about each of them."}]
    first = await traced(cluster, turns, max_tokens=60)
    answer = first["choices"][0]["message"]["content"]
    turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And in Asia?"}]
    second = await traced(cluster, turns, max_tokens=5)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    holders = [reply["baton"]["served"][0]["decode_worker"] for reply in (first, second)]
    assert holders[0] == holders[1]
    assert second["baton"]["served"][0]["blocks_moved"] < second["usage"]["prompt_tokens"] // 16


async def check_disconnects(cluster: ServingCluster) -> None:
    """100 clients leave at random moments; nothing stays behind on any worker."""
    rng = random.Random(0)

    async def leave() -> None:
        body = {"model": MODEL, "messages": CAPITAL, "max_tokens": 400, "stream": True, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=cluster.address, timeout=60) as http:
            try:
                async with (
                    asyncio.timeout(rng.random() * 2),
                    http.stream("POST", "/v1/chat/completions", json=body) as reply,
                ):
                    async for _ in reply.aiter_bytes():
                        pass
            except TimeoutError:
                pass

    for _ in range(10):
        await asyncio.gather(*(leave() for _ in range(10)))
    await settled(cluster)


async def test_a_killed_prefill_worker_costs_no_answer_and_returns(serving_cluster: Serve) -> None:
    cluster = await serving_cluster(config("2p1d"))
    long = [{"role": "user", "content": "Tell me a story. " + "It was a dark and stormy night. " * 60}]
    asked = asyncio.create_task(traced(cluster, long, max_tokens=20))
    await asyncio.sleep(0.3)
    prefill = {info.peer.worker_id: info for info in cluster.supervisor.workers() if info.role == "prefill"}
    for info in prefill.values():  # whichever serves it, it dies in mid-request
        os.kill(info.pid, signal.SIGKILL)
    try:
        assert (await asked)["usage"]["completion_tokens"] == 20
    except httpx.HTTPStatusError as refused:  # a clear error will do
        assert refused.response.status_code == 503
    async with asyncio.timeout(120):
        while {info.peer.worker_id for info in cluster.supervisor.workers()} != {"prefill-0", "prefill-1", "decode-0"}:
            await asyncio.sleep(0.2)
    lives = {info.peer.incarnation for info in cluster.supervisor.workers()}
    assert lives.isdisjoint(info.peer.incarnation for info in prefill.values())
    async with asyncio.timeout(60):
        while (again := await traced(cluster, [*long, *CAPITAL], max_tokens=3))["baton"]["served"][0][
            "blocks_moved"
        ] == 0:
            await asyncio.sleep(0.5)
            long.append({"role": "user", "content": "again"})
    assert again["baton"]["served"][0]["prefill_worker"].startswith("prefill-")
    await settled(cluster)


async def test_a_worker_of_three_ranks_answers_and_returns_when_one_is_killed(serving_cluster: Serve) -> None:
    """Three, for SmolLM2 has nine heads and three KV heads."""
    pool = {"num_cpus": 0.5, "worker": {"tensor_parallel": 3, "num_threads": 1}}
    cluster = await serving_cluster(config("both", pools={"both": pool}))
    await asyncio.to_thread(check_sync_client, cluster.address)
    (before,) = cluster.supervisor.workers()
    ranks = [child for child in psutil.Process(before.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    ranks[0].kill()
    async with asyncio.timeout(120):
        while [info.pid for info in cluster.supervisor.workers()] in ([], [before.pid]):
            await asyncio.sleep(0.2)
        async with httpx.AsyncClient(base_url=cluster.address, timeout=60) as http:
            while (await http.get("/health")).status_code != 200:  # the gateway connects a moment later
                await asyncio.sleep(0.2)
    await asyncio.to_thread(check_sync_client, cluster.address)
    assert not any(rank.is_running() for rank in ranks)
    await settled(cluster)
