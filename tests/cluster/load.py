"""Steady load of streams whose every text is known, and an account of what each client saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from tests.cluster.fake_cluster import MODEL

PROMPTS = [[1 + (7 * seed + i * i) % 40 for i in range(24 + 8 * seed)] for seed in range(6)]


@dataclass
class Account:
    """`wrong`: a text that differs from the undisturbed one. `lost`: ended by an error after its first token.
    `refused`: by every gateway, before its first token."""

    ends: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])
    longest_pause_s: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))


class Load:
    """`num_clients` at a time ask one of the gateways, in turn, and the next one if that cannot be reached."""

    def __init__(self, gateways: Callable[[], Sequence[str]], *, num_clients: int = 6, max_tokens: int = 60) -> None:
        self.account = Account()
        self._gateways = gateways
        self._num_clients = num_clients
        self._max_tokens = max_tokens
        self._expected: dict[int, str] = {}
        self._num_asked = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def __aenter__(self) -> Load:
        for index in range(len(PROMPTS)):
            self._expected[index] = await self._ask(self._gateways()[0], index)
        self.account = Account()
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        while not self._is_over:
            self._num_asked += 1
            index = self._num_asked % len(PROMPTS)
            try:
                text = await self._ask_any(index, self._num_asked)
            except _Lost as lost:
                self.account.ends["lost"] += 1
                self.account.errors.append(str(lost))
            except _Refused as refused:
                self.account.ends["refused"] += 1
                self.account.errors.append(str(refused))
                await asyncio.sleep(0.2)
            else:
                self.account.ends["right" if text == self._expected[index] else "wrong"] += 1

    async def _ask_any(self, index: int, turn: int) -> str:
        gateways = list(self._gateways())
        last = _Refused("no gateway is known")
        for i in range(len(gateways)):
            try:
                return await self._ask(gateways[(turn + i) % len(gateways)], index)
            except _Refused as refused:
                last = refused
        raise last

    async def _ask(self, gateway: str, index: int) -> str:
        body = {
            "model": MODEL, "prompt": PROMPTS[index], "max_tokens": self._max_tokens, "ignore_eos": True,
            "temperature": 0, "seed": 7, "stream": True,
        }  # fmt: skip
        parts: list[str] = []
        try:
            async with (
                httpx.AsyncClient(base_url=gateway, timeout=30) as http,
                http.stream("POST", "/v1/completions", json=body) as reply,
            ):
                if reply.is_error:
                    raise _Refused((await reply.aread()).decode()[:200])
                await self._read(reply, parts)
        except httpx.TransportError as error:
            raise (_Lost if parts else _Refused)(f"{gateway}: {type(error).__name__}") from error
        return "".join(parts)

    async def _read(self, reply: httpx.Response, parts: list[str]) -> None:
        last_s = time.monotonic()
        async for line in reply.aiter_lines():
            now = time.monotonic()
            self.account.longest_pause_s = max(self.account.longest_pause_s, now - last_s)
            last_s = now
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise _Lost(event["error"]["message"])
                parts += [choice["text"] for choice in event["choices"]]
        raise _Lost("the stream ended without its end")


class _Lost(Exception):
    pass


class _Refused(Exception):
    pass
