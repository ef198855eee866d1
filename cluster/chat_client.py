"""A streaming client of the gateway's chat endpoint: text as it comes, then what the server says about the request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import httpx
import msgspec

from baton.actors.messages import ServedBy
from baton.cluster.errors import RequestFailedError

TRACE = {"x-baton-trace": "1"}
TIMEOUT = httpx.Timeout(10.0, read=600.0)


class ChatMessage(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's `baton` extension. `served` has one entry per choice."""

    ttft_s: float
    e2e_s: float
    served: list[ServedBy | None]


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta


class _Failure(msgspec.Struct, frozen=True):
    message: str


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: Usage | None = None
    baton: Trace | None = None
    error: _Failure | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    usage: Usage
    trace: Trace


class ChatClient:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def model(self) -> str:
        """Return the name of the model that the server serves."""
        try:
            reply = await self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise RequestFailedError(f"no server answers at {self._http.base_url}: {error}") from error
        if reply.is_error:
            raise RequestFailedError(_failure_text(reply.content))
        return msgspec.json.decode(reply.content, type=_Models).data[0].id

    async def ask(
        self,
        model: str,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        temperature: float,
        on_text: Callable[[str], None],
    ) -> Answer:
        """Send one chat request; `on_text` gets each piece of the answer as it arrives."""
        body: dict[str, object] = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        parts: list[str] = []
        usage: Usage | None = None
        trace: Trace | None = None
        async for chunk in self._chunks(body):
            for choice in chunk.choices:
                if choice.delta.content:
                    parts.append(choice.delta.content)
                    on_text(choice.delta.content)
            usage, trace = chunk.usage or usage, chunk.baton or trace
        if usage is None or trace is None:
            raise RequestFailedError("the stream ended before its last chunk: the gateway or the connection was lost")
        return Answer("".join(parts), usage, trace)

    async def _chunks(self, body: dict[str, object]) -> AsyncGenerator[_Chunk]:
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=TRACE) as reply:
                if reply.is_error:
                    raise RequestFailedError(_failure_text(await reply.aread()))
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    chunk = msgspec.json.decode(data, type=_Chunk)
                    if chunk.error is not None:
                        raise RequestFailedError(chunk.error.message)
                    yield chunk
        except httpx.TransportError as error:
            raise RequestFailedError(f"the connection to {self._http.base_url} failed: {error}") from error


def _failure_text(body: bytes) -> str:
    """Return the message of an OpenAI-shaped error body, or the body's start if it is none."""
    try:
        failure = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.DecodeError:
        failure = None
    return failure.message if failure else body[:200].decode(errors="replace")
