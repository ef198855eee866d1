"""The page at /: one file with nothing to load from elsewhere, used in headless Chromium as a person would."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_workers import FakeWorker
from test_gateway import telling

from baton.router.tokenizer import Tokenizer
from tests.router.rig import served

CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # W3C WebDriver's key of an element's id


async def test_the_page_is_served_whole_and_loads_nothing_from_elsewhere(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        page = await api.http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"(src|href)\s*=|https?://|import ", page.text)
        assert "innerHTML" not in page.text  # what a model says is text, never markup


class Browser:
    """The little of WebDriver that a chat needs."""

    def __init__(self, http: httpx.AsyncClient, session: str) -> None:
        self._http = http
        self._path = f"/session/{session}"

    async def call(self, path: str, **body: Any) -> Any:
        reply = await self._http.post(f"{self._path}/{path}", json=body)
        return reply.raise_for_status().json()["value"]

    async def find(self, selector: str) -> str:
        return (await self.call("element", using="css selector", value=selector))[ELEMENT]

    async def type(self, selector: str, text: str) -> None:
        await self.call(f"element/{await self.find(selector)}/value", text=text)

    async def click(self, selector: str) -> None:
        await self.call(f"element/{await self.find(selector)}/click")

    async def run(self, script: str) -> Any:
        return await self.call("execute/sync", script=script, args=[])

    async def until(self, condition: str) -> None:
        async with asyncio.timeout(30):
            while not await self.run(f"return Boolean({condition})"):
                await asyncio.sleep(0.05)

    async def screenshot(self) -> bytes:
        return base64.b64decode((await self._http.get(f"{self._path}/screenshot")).json()["value"])


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = await asyncio.create_subprocess_exec("chromedriver", f"--port={port}", stdout=asyncio.subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            async with asyncio.timeout(30):
                while True:
                    try:
                        await http.get("/status")
                        break
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
            options = {"binary": shutil.which("chromium"), "args": [*CHROMIUM, f"--user-data-dir={profile}"]}
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            session = (await http.post("/session", json=wanted)).raise_for_status().json()["value"]["sessionId"]
            try:
                yield Browser(http, session)
            finally:
                await http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        await driver.wait()


@pytest.mark.browser
@pytest.mark.slow
async def test_a_person_chats_and_sees_who_served_it_and_how_fast(tokenizer: Tokenizer, tmp_path: Path) -> None:
    says = "Hello <b>you</b> é👋"
    decode = FakeWorker(telling(tokenizer, says), worker_id="decode-0", role="decode", step_s=0.02)
    prefill = FakeWorker(worker_id="prefill-0", role="prefill")
    async with (
        asyncio.timeout(110),
        browser(tmp_path / "profile") as page,
        served(tokenizer, decode, prefill, limit_s=100) as api,
    ):
        await page.call("url", url=api.url)
        await page.type("#text", "What is up?")
        await page.click("#send")
        await page.until("document.querySelector('article.assistant[data-done]')")
        answer, facts = await page.run(
            "const a = document.querySelector('article.assistant');"
            "return [a.querySelector('p').textContent, a.querySelector('small').textContent]"
        )
        assert answer == says
        assert re.search(r"TTFT [\d.]+ ms · ITL [\d.]+ ms median", facts)
        assert "(0 cached)" in facts and "prefill prefill-0, decode decode-0" in facts
        asked = decode.submits[0].request.tokens
        assert tokenizer.decode(asked).count("What is up?") == 1
        await page.type("#text", "And now?\ue007")  # Enter sends
        await page.until("document.querySelectorAll('article.assistant[data-done]').length === 2")
        assert says in tokenizer.decode(decode.submits[-1].request.tokens)  # the first answer is context now
        decode.error = "broken"
        await page.type("#text", "Again\ue007")
        await page.until("document.querySelector('article.failed')")
        assert (await page.screenshot()).startswith(b"\x89PNG")
