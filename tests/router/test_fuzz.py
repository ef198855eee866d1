"""Mutated bodies on every endpoint are answered or refused; nothing breaks. tests/clients/fuzz.py does many more."""

from __future__ import annotations

import asyncio

import httpx
from fake_workers import FakeWorker
from fuzz_bodies import Fuzzed, fuzzed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, Served, served

JSON = {"content-type": "application/json"}
BATCH = 25


async def check_batch(api: Served, worker: FakeWorker, batch: list[Fuzzed]) -> None:
    """Send all at once; then the gateway and its worker must be as good as before."""

    async def send(one: Fuzzed) -> httpx.Response:
        return await api.http.post(one.path, content=one.body, headers=JSON)

    for one, reply in zip(batch, await asyncio.gather(*map(send, batch)), strict=True):
        assert reply.status_code < 500, (one, reply.text)
        assert reply.status_code == 200 or "error" in reply.json(), (one, reply.text)
        assert '"error"' not in reply.text or reply.status_code != 200 or '"error":null' in reply.text, (
            one,
            reply.text,
        )
    assert (await api.http.get("/health")).status_code == 200
    plain = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    assert (await api.http.post("/v1/completions", json=plain)).status_code == 200
    assert api.is_idle() and worker.num_running == 0


def fuzz(tokenizer: Tokenizer, num_batches: int) -> None:
    with asyncio.Runner() as runner:
        worker = FakeWorker(max_context=200)
        context = served(tokenizer, worker, limit_s=3600)
        api = runner.run(context.__aenter__())

        @settings(
            max_examples=num_batches, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.lists(fuzzed(), min_size=BATCH, max_size=BATCH))
        def check(batch: list[Fuzzed]) -> None:
            runner.run(check_batch(api, worker, batch))

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))


def test_mutated_bodies_break_nothing(tokenizer: Tokenizer) -> None:
    fuzz(tokenizer, num_batches=12)
