"""How long /health waits while one gateway process reads bodies of 64 MB and prompts of 128k tokens.

Run: PYTHONPATH=<root of the repository>:tests python tests/bench/large_bodies.py
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from baton.router.config import RouterConfig
from tests.bench.gateway import MODEL, Running, gateway_process, smollm
from tests.bench.gateway_worker import worker_process

MB = 1_000_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """What is sent, where, and the body."""
    chat = '{{"model": "{}", "max_tokens": 1, "messages": [{{"role": "user", "content": "{}"}}]{}}}'
    yield "128k-token chat", CHAT, chat.format(MODEL, "word one two " * 43_000, "").encode()
    tokens = ",".join(["12345"] * 130_000)
    yield "128k token ids", COMPLETIONS, f'{{"model": "{MODEL}", "max_tokens": 1, "prompt": [{tokens}]}}'.encode()
    yield "64 MB of text", CHAT, chat.format(MODEL, "word " * (64 * MB // 5), "").encode()
    yield "64 MB of escapes", CHAT, chat.format(MODEL, "\\u00e9" * (64 * MB // 6), "").encode()
    yield "64 MB of unknown fields", CHAT, chat.format(MODEL, "hi", f', "x": [{",".join(["1"] * (32 * MB))}]').encode()
    messages = ",".join(['{"role": "user", "content": "hi"}'] * (64 * MB // 34))
    yield "64 MB of messages", CHAT, f'{{"model": "{MODEL}", "messages": [{messages}]}}'.encode()


async def bench() -> None:
    config = RouterConfig(drain_s=0, max_body_bytes=100 * MB)
    table = Table("body", "status", "answered in s", "checks", "/health p50 ms", "p99 ms", "max ms")
    async with worker_process(200_000) as worker, gateway_process(smollm(), worker.info, config) as gateway:
        url = f"http://{gateway.host}:{gateway.port}"
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            await http.post(CHAT, content=b" " * MB)  # starts the process for large bodies
            for name, path, body in bodies():
                table.add_row(name, *await measure(http, gateway, path, body))
    Console().print(table)


async def measure(http: httpx.AsyncClient, gateway: Running, path: str, body: bytes) -> list[str]:
    checks: list[float] = []
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "content-type: application/json", "-H", "expect:",
        "--data-binary", "@-", f"http://{gateway.host}:{gateway.port}{path}",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    call = asyncio.create_task(process.communicate(body))
    while not call.done():
        start = time.monotonic()
        assert (await http.get("/health")).status_code == 200
        checks.append((time.monotonic() - start) * 1e3)
        await asyncio.sleep(0.002)
    status = (await call)[0].decode()
    cuts = statistics.quantiles(checks, n=100)
    figures = (cuts[49], cuts[98], max(checks))
    return [status, f"{time.monotonic() - started:.2f}", str(len(checks)), *(f"{value:.1f}" for value in figures)]


if __name__ == "__main__":
    uvloop.run(bench())
