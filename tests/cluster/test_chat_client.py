from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from baton.cluster.chat_client import ChatClient
from baton.cluster.errors import RequestFailedError

SERVED = {
    "decode_worker": "decode-0",
    "prefill_worker": "prefill-0",
    "mover": "nixl",
    "blocks_moved": 3,
    "bytes_moved": 1_105_920,
    "times": {"queue_s": 0.001, "prefill_s": 0.2, "handover_s": 0.03, "first_step_s": 0.04},
}
TRACE = {"ttft_s": 0.25, "e2e_s": 0.9, "served": [SERVED]}
USAGE = {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45, "prompt_tokens_details": {"cached_tokens": 0}}
LAST = {"choices": [], "usage": USAGE, "baton": TRACE}


def piece(text: str) -> dict[str, object]:
    return {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}


def stream(*chunks: dict[str, object]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def client(handler: Callable[[httpx.Request], httpx.Response]) -> ChatClient:
    return ChatClient(httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(handler)))


async def ask(chat: ChatClient, pieces: list[str] | None = None) -> str:
    seen = [] if pieces is None else pieces
    question = [{"role": "user", "content": "Hi"}]
    answer = await chat.ask("m", question, max_tokens=5, temperature=0.0, on_text=seen.append)  # type: ignore[arg-type]
    return answer.text


async def test_text_is_shown_piece_by_piece_and_the_last_chunk_tells_the_rest() -> None:
    requests: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        return httpx.Response(200, text=stream(role, piece("Pa"), piece("ris"), LAST))

    pieces: list[str] = []
    assert await ask(client(serve), pieces) == "Paris"
    assert pieces == ["Pa", "ris"]
    assert requests[0].headers["x-baton-trace"] == "1"
    assert json.loads(requests[0].content)["stream_options"] == {"include_usage": True}


async def test_a_refused_request_fails_with_the_servers_message() -> None:
    chat = client(lambda request: httpx.Response(429, json={"error": {"message": "queue is full", "code": "x"}}))
    with pytest.raises(RequestFailedError, match="queue is full"):
        await ask(chat)


async def test_an_error_inside_the_stream_is_no_answer() -> None:
    body = stream(piece("Pa"), {"error": {"message": "the worker died"}})
    with pytest.raises(RequestFailedError, match="the worker died"):
        await ask(client(lambda request: httpx.Response(200, text=body)))


async def test_a_stream_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(RequestFailedError, match="ended before its last chunk"):
        await ask(client(lambda request: httpx.Response(200, text=stream(piece("Pa")))))


async def test_a_server_that_is_not_there_is_named() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(RequestFailedError, match="no server answers at http://gateway"):
        await client(refuse).model()
    with pytest.raises(RequestFailedError, match="the connection to http://gateway failed"):
        await ask(client(refuse))


async def test_an_error_page_that_is_not_json_is_quoted() -> None:
    with pytest.raises(RequestFailedError, match="bad gateway"):
        await client(lambda request: httpx.Response(502, text="<h1>bad gateway</h1>")).model()


async def test_the_model_is_the_first_one_served() -> None:
    assert await client(lambda request: httpx.Response(200, json={"data": [{"id": "m"}]})).model() == "m"
