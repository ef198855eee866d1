"""Fake workers behind a real router: `rig` without the HTTP surface, `served` with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fake_workers import FakeWorker

from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Output
from baton.router.admission import Admission, AdmissionLimits
from baton.router.config import PolicyName, RouterConfig
from baton.router.dispatch import Dispatcher
from baton.router.gateway import Gateway
from baton.router.generation_config import SamplingDefaults
from baton.router.membership import Membership
from baton.router.metrics import Metrics
from baton.router.policies import make_policy
from baton.router.prefix_index import PrefixIndex
from baton.router.routing import Router
from baton.router.slo import Terms
from baton.router.tokenizer import Tokenizer
from baton.router.worker_stream import Reconnect

MODEL = "smollm2"
APART = RouterConfig(policy=PolicyName.CACHE_AWARE)  # prefills apart, however short the prompt
FAST = Reconnect(first_s=0.01, max_s=0.05)


@dataclass(frozen=True)
class Rig:
    membership: Membership
    metrics: Metrics
    dispatcher: Dispatcher
    admission: Admission

    async def join(self, *workers: FakeWorker) -> None:
        await self.membership.set_workers([worker.info() for worker in workers])
        await until(lambda: len(self.streams()) == len(workers))

    def streams(self) -> list[object]:
        return [*self.membership.decoders(), *self.membership.prefillers()]

    def is_idle(self) -> bool:
        """No charge and no queue place is left anywhere."""
        streams = [*self.membership.decoders(), *self.membership.prefillers()]
        return self.admission.num_requests == self.admission.num_tokens == 0 and not any(
            stream.num_own_requests or stream.num_own_tokens for stream in streams
        )

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        (place,) = self.dispatcher.admit([request], Terms())
        return self.dispatcher.generate(request, place, Terms())

    async def run(self, request: Request) -> list[Output]:
        return [output async for output in self.generate(request)]


@asynccontextmanager
async def rig(
    *workers: FakeWorker, config: RouterConfig | None = None, timeout_s: float = 20, grace_s: float = 0
) -> AsyncGenerator[Rig, None]:
    config = config or APART
    metrics = Metrics()
    index = PrefixIndex(predicted_s=config.predicted_prefix_s)
    membership = Membership(index, FAST, grace_s=grace_s)
    limits = AdmissionLimits(
        max_requests=config.max_queued_requests,
        max_tokens=config.max_queued_tokens,
        max_wait_s=config.max_queue_s,
    )
    router = Router(membership, index, make_policy(config))
    dispatcher = Dispatcher(membership, router, limits, metrics, max_attempts=config.max_attempts)
    for worker in workers:
        await worker.start()
    try:
        async with asyncio.timeout(timeout_s):
            rig = Rig(membership, metrics, dispatcher, dispatcher.admission)
            await rig.join(*workers)
            yield rig
    finally:
        await membership.close()
        for worker in workers:
            await worker.kill()


@dataclass(frozen=True)
class Served:
    """A gateway on a real port, with the clients that people use."""

    gateway: Gateway
    url: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})

    async def events(self, path: str = "/v1/chat/completions", **fields: Any) -> list[str]:
        """Stream a call; return the data of its events as they came."""
        headers = fields.pop("headers", None)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        async with self.http.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]

    def is_idle(self) -> bool:
        return all(
            stream.num_own_requests == stream.num_own_tokens == 0
            for stream in (*self.gateway.membership.decoders(), *self.gateway.membership.prefillers())
        )


@asynccontextmanager
async def served(
    tokenizer: Tokenizer,
    *workers: FakeWorker,
    config: RouterConfig | None = None,
    defaults: SamplingDefaults | None = None,
    limit_s: float = 30,
) -> AsyncGenerator[Served, None]:
    quick = {"reconnect_first_s": 0.01, "reconnect_max_s": 0.05, "drain_s": 0.0}
    gateway = Gateway((config or APART).model_copy(update=quick), "unused", MODEL)
    url = await gateway.serve(tokenizer, defaults or SamplingDefaults())
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    http = httpx.AsyncClient(base_url=url, timeout=20)
    try:
        async with asyncio.timeout(limit_s):
            await gateway.set_workers([await worker.start() for worker in workers])
            members = gateway.membership
            await until(lambda: len(members.decoders()) + len(members.prefillers()) == len(workers))
            yield Served(gateway, url, client, http)
    finally:
        await client.close()
        await http.aclose()
        await gateway.stop()
        for worker in workers:
            await worker.kill()


def a_request(id: str = "r", *, prompt_len: int = 64, first: int = 0, max_tokens: int = 8) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return Request(id=id, tokens=tuple(range(first, first + prompt_len)), sampling=sampling, deadline_s=60.0)


async def until(condition: object) -> None:
    """Wait for what another task will make true; the caller's timeout bounds it."""
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.002)


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]
