"""One request to an OpenAI-compatible server as seen from outside: when its tokens came, or how it failed.

Uses /v1/completions with prompts of token ids, which needs no tokenizer and makes lengths and shared prefixes exact.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from baton.cluster.bench.load import Job
from baton.cluster.errors import ClusterError

CONNECT_S = 30.0

Fate = Literal["ok", "refused", "failed"]  # refused: 429 or 503, by a server that protects itself


class ServerError(ClusterError):
    """The server cannot be reached, or says what no OpenAI-compatible server would."""


@dataclass(slots=True)
class Outcome:
    """Times are on time.monotonic. Latencies count from `intended`, when the request should have been sent."""

    intended: float
    sent: float
    prompt_len: int
    status: int = 0
    error: str = ""
    retry_after_s: float | None = None
    first: float | None = None  # token
    last: float | None = None  # token
    ended: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0
    gaps: list[float] = field(default_factory=list[float])  # seconds between events with text

    @property
    def fate(self) -> Fate:
        if self.status in (429, 503):
            return "refused"
        return "failed" if self.error else "ok"

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.intended

    @property
    def itl_s(self) -> float | None:
        """The mean time between tokens."""
        if self.first is None or self.last is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)

    def is_good(self, ttft_s: float | None, itl_s: float | None) -> bool:
        """Whether it was answered in full and within these targets."""
        if self.fate != "ok" or self.ttft_s is None:
            return False
        return (ttft_s is None or self.ttft_s <= ttft_s) and (
            itl_s is None or self.itl_s is None or self.itl_s <= itl_s
        )


class Client:
    def __init__(self, url: str, model: str, headers: Mapping[str, str], *, timeout_s: float) -> None:
        self._model = model
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=timeout, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, job: Job, intended: float) -> Outcome:
        """Ask and read to the end. Every failure is an outcome."""
        outcome = Outcome(intended, time.monotonic(), len(job.prompt))
        try:
            async with self._http.stream("POST", "/v1/completions", json=self._body(job)) as response:
                outcome.status = response.status_code
                if response.status_code == 200:
                    await _read(response, outcome)
                else:
                    await response.aread()
                    outcome.error = _message(response.content)
                    outcome.retry_after_s = _retry_after(response)
        except httpx.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = time.monotonic()
        return outcome

    def _body(self, job: Job) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(job.prompt),
            "max_tokens": job.output_len,
            "ignore_eos": True,  # Baton, vLLM and SGLang know it
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def find_model(url: str, headers: Mapping[str, str]) -> str:
    """Return the first model that the server names. Raises ServerError."""
    try:
        async with httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=CONNECT_S) as http:
            reply = (await http.get("/v1/models")).raise_for_status().json()
        return str(reply["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{url}/v1/models names no model ({error}): is --url right, or --api-key wanted?") from error


async def _read(response: httpx.Response, outcome: Outcome) -> None:
    has_ended = False
    async for data in _events(response):
        if data == b"[DONE]":
            has_ended = True
            continue
        now = time.monotonic()
        event = msgspec.json.decode(data)
        if "error" in event:
            outcome.error = str(event["error"])[:200]
            return
        if usage := event.get("usage"):
            outcome.num_tokens = usage["completion_tokens"]
            details: dict[str, int | None] = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens") or 0
        if any(choice.get("text") for choice in event["choices"]):
            if outcome.last is not None:
                outcome.gaps.append(now - outcome.last)
            outcome.first = outcome.first or now
            outcome.last = now
    if not has_ended:
        outcome.error = "the stream ended without [DONE]"


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])[:200]
    except (msgspec.DecodeError, LookupError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None
