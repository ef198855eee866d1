"""Entry S13: several gateways, each with an address of its own to scrape; no counter ever goes back."""

from __future__ import annotations

import httpx
from fake_workers import FakeWorker
from prometheus_client.parser import text_string_to_metric_families

from baton.router.config import RouterConfig
from baton.router.gateway import Gateway
from baton.router.generation_config import SamplingDefaults
from baton.router.tokenizer import Tokenizer
from tests.router.rig import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def counters(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families
        if family.type in ("counter", "histogram")
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_counters_of_four_gateways_only_grow(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(worker_id="w0")
    info = await worker.start()
    gateways = [Gateway(RouterConfig(drain_s=0), "unused", "m") for _ in range(4)]
    clients = [httpx.AsyncClient(base_url=await gateway.serve(tokenizer, SamplingDefaults())) for gateway in gateways]
    try:
        for gateway in gateways:
            await gateway.set_workers([info])
            await until(gateway.membership.decoders)
        seen: list[dict[str, float]] = [{} for _ in clients]
        for turn in range(20):
            await clients[turn % 4].post("/v1/chat/completions", json=CHAT)
            for index, client in enumerate(clients):
                now = counters((await client.get("/metrics")).text)
                assert all(now[name] >= value for name, value in seen[index].items())
                seen[index] = now
        totals = [sum(v for name, v in each.items() if "gateway_requests_total" in name) for each in seen]
        assert totals == [5, 5, 5, 5]
    finally:
        for client, gateway in zip(clients, gateways, strict=True):
            await client.aclose()
            await gateway.stop()
        await worker.kill()
