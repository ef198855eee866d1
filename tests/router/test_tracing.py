"""One request's trace through a gateway, a prefill and a decode worker, as an OTLP collector gets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from baton.actors.config import TracingConfig, WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.messages import Role
from baton.actors.spans import make_spans
from baton.actors.worker import Worker
from baton.router.config import RouterConfig
from baton.router.gateway import Gateway
from baton.router.generation_config import SamplingDefaults
from baton.router.tokenizer import Tokenizer
from baton.transfer.config import TransferConfig
from tests.actors.fake_engine import build_fake_engine
from tests.otlp_collector import Collector
from tests.router.rig import until

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    yield collector
    collector.shutdown()
    thread.join()
    collector.server_close()


def worker(role: Role, tracing: TracingConfig) -> Worker:
    config = WorkerConfig(
        model="fake",
        served_name="fake",
        engine=EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_step_tokens=16, max_prefill_chunk=8),
        transfer=TransferConfig(mover="nixl"),
    )
    made = Worker(worker_id=role, role=role, config=config, build=partial(build_fake_engine, step_s=0.03))
    made.spans = make_spans(tracing, role)
    return made


async def test_spans_of_all_processes_add_up_to_the_time_to_first_token(
    tokenizer: Tokenizer, collector: Collector
) -> None:
    tracing = TracingConfig(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
    workers = [worker("prefill", tracing), worker("decode", tracing)]
    gateway = Gateway(RouterConfig(policy="cache_aware"), "unused", "fake")  # `cost` would not hand so little over
    gateway.spans = make_spans(tracing, "gateway")
    async with httpx.AsyncClient(base_url=await gateway.serve(tokenizer, SamplingDefaults()), timeout=20) as http:
        await gateway.set_workers([await worker.start() for worker in workers])
        await until(lambda: gateway.membership.decoders() and gateway.membership.prefillers())
        body = {"model": "fake", "prompt": [1] * 60, "max_tokens": 4, "ignore_eos": True}
        reply = await http.post("/v1/completions", json=body, headers={"traceparent": CALLER, "x-baton-trace": "1"})
        ttft_s = reply.raise_for_status().json()["baton"]["ttft_s"]
    await asyncio.gather(gateway.stop(), *(worker.stop() for worker in workers))
    await asyncio.to_thread(check, collector, ttft_s)
    assert reply.headers["traceparent"].split("-")[1] == CALLER.split("-")[1]


def check(collector: Collector, ttft_s: float) -> None:
    assert {span.trace for span in collector.spans} == {CALLER.split("-")[1]}
    root = collector.named("completions", "gateway")
    assert root.parent == CALLER.split("-")[2]
    parts = [collector.named(name, "gateway") for name in ("plan", "queue", "first token")]
    assert sum(span.seconds for span in parts) == pytest.approx(ttft_s, rel=0.05)
    serve = collector.named("serve", "decode")
    assert {span.parent for span in parts} == {serve.parent} == {root.id}
    by_peer, handover = collector.named("prefill by peer", "decode"), collector.named("hand-over", "decode")
    assert {span.parent for span in (by_peer, handover)} == {serve.id}
    queue, prefill = collector.named("queue", "prefill"), collector.named("prefill", "prefill")
    assert queue.seconds + prefill.seconds <= by_peer.seconds <= parts[2].seconds
    assert prefill.seconds >= 2 * 0.03  # chunks, at so much a step
    for span in collector.spans:
        assert root.start_s - 0.001 <= span.start_s <= span.end_s <= root.end_s + 0.05


async def test_without_a_collector_nothing_is_recorded_and_nothing_said(tokenizer: Tokenizer) -> None:
    spans = make_spans(TracingConfig(), "w")
    span = spans.open("request", CALLER, 0.0)
    assert span.context == ""
    spans.close()


async def test_a_caller_that_does_not_sample_is_obeyed(collector: Collector) -> None:
    spans = make_spans(TracingConfig(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}"), "w")
    span = spans.open("request", CALLER[:-1] + "0", 0.0)
    span.end()
    await asyncio.to_thread(spans.close)
    assert span.context == "" and collector.spans == []
