from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from fake_workers import FakeWorker
from rich.console import Console
from test_playground import browser

from baton.cluster.top import run_top
from baton.router.status import GatewayStatus, _quantile
from baton.router.tokenizer import Tokenizer
from tests.router.rig import served


async def test_the_page_and_its_events_tell_what_goes_on(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(worker_id="w0"), FakeWorker(worker_id="w1")) as gateway:
        page = await gateway.http.get("/status")
        assert page.status_code == 200 and "EventSource" in page.text and "http" not in page.text
        await gateway.complete(max_tokens=3)
        async with gateway.http.stream("GET", "/status/events") as reply:
            lines = reply.aiter_lines()
            await _next_event(lines)
            await gateway.complete(max_tokens=3)
            await gateway.http.post("/v1/completions", json={"model": "nobody", "prompt": "hi"})
            status = await _next_event(lines)
    assert [worker.name for worker in status.workers] == ["w0", "w1"]
    assert status.output_tokens_per_s > 0 and status.ttft_p50_s is not None
    assert status.refusals == 1


async def _next_event(lines: AsyncIterator[str]) -> GatewayStatus:
    while not (line := await anext(lines)).startswith("data: "):
        pass
    return msgspec.json.decode(line.removeprefix("data: "), type=GatewayStatus)


async def test_top_draws_the_same(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(worker_id="w0")) as gateway:
        console = Console(file=StringIO(), width=140)
        await run_top(gateway.url, console=console, num_updates=1)
        text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "w0" in text and "goodput" in text


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.15), (0.99, 0.198), (0.01, 0.102)])
def test_a_quantile_lies_inside_its_bucket(share: float, expected: float) -> None:
    before = {0.1: 5.0, 0.2: 5.0, math.inf: 5.0}
    now = {0.1: 5.0, 0.2: 15.0, math.inf: 15.0}
    found = _quantile(before, now, share)
    assert found is not None and found == pytest.approx(expected, abs=0.002)


def test_no_observation_has_no_quantile_and_the_last_bucket_no_end() -> None:
    assert _quantile({0.1: 3.0, math.inf: 3.0}, {0.1: 3.0, math.inf: 3.0}, 0.5) is None
    assert _quantile({}, {0.1: 0.0, math.inf: 2.0}, 0.5) == 0.1


@pytest.mark.browser
@pytest.mark.slow
async def test_the_page_shows_workers_and_figures_as_they_change(tokenizer: Tokenizer, tmp_path: Path) -> None:
    workers = [FakeWorker(worker_id="decode-0", role="decode"), FakeWorker(worker_id="prefill-0", role="prefill")]
    async with asyncio.timeout(110), browser(tmp_path / "profile") as page, served(tokenizer, *workers) as gateway:
        await page.call("url", url=f"{gateway.url}/status")
        await page.until("document.querySelectorAll('#workers tr').length === 2")
        await gateway.complete(max_tokens=3)
        await page.until("document.querySelectorAll('dd')[1].textContent !== '0.0'")
        text = await page.run("return document.body.innerText")
        assert "decode-0" in text and "goodput, tokens/s" in text and "TTFT p50" in text
        assert (await page.screenshot()).startswith(b"\x89PNG")
        await gateway.gateway.set_workers([workers[0].info()])
        await page.until("document.querySelectorAll('#workers tr').length === 1")
