"""/v1/messages: Anthropic's shape, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_workers import FakeWorker
from test_gateway import telling

from baton.router.generation import Delta
from baton.router.messages import MessagesRequest, MessageWriter, _chat
from baton.router.openai_models import PromptTokensDetails, Usage
from baton.router.parts import CallArguments, CallStart, Content, Reasoning
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, Served, served

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


async def stream(api: Served, **fields: Any) -> list[dict[str, Any]]:
    async with api.http.stream("POST", "/v1/messages", json={**ASK, "stream": True, **fields}) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in events]
    return events


async def test_a_message(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, "Hello, é👋"))
    async with served(tokenizer, worker) as api:
        system = [{"type": "text", "text": "Be brief."}]
        reply = (await api.http.post("/v1/messages", json={**ASK, "system": system, "top_k": 5})).json()
        assert reply["content"] == [{"type": "text", "text": "Hello, é👋"}]
        assert (reply["type"], reply["role"], reply["stop_reason"]) == ("message", "assistant", "end_turn")
        expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        request = worker.submits[0].request
        assert request.tokens == tokenizer.encode_chat_now(expected) and request.sampling.top_k == 5
        assert reply["usage"]["input_tokens"] == len(request.tokens) and reply["usage"]["output_tokens"] > 0


async def test_a_stream_tells_the_same_message(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "Hello, é👋"))) as api:
        events = await stream(api)
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert "".join(event["delta"]["text"] for event in events[2:-3]) == "Hello, é👋"
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_why_it_stopped(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "one two STOP three"))) as api:
        for fields, reason, sequence in (
            ({"stop_sequences": ["x", "STOP"]}, "stop_sequence", "STOP"),
            ({"max_tokens": 2}, "max_tokens", None),
            ({}, "end_turn", None),
        ):
            reply = (await api.http.post("/v1/messages", json={**ASK, **fields})).json()
            assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
            assert (await stream(api, **fields))[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "system", "content": "a"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"temperature": 1.5}, 400, "invalid_request_error"),
        ({"model": "claude"}, 404, "not_found_error"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_errors_have_anthropics_shape(
    tokenizer: Tokenizer, fields: dict[str, Any], status: int, kind: str, is_streamed: bool
) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        reply = await api.http.post("/v1/messages", json={**ASK, "stream": is_streamed, **fields})
        assert reply.status_code == status
        assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == kind


async def test_without_workers_the_stream_is_a_plain_error(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as api:
        reply = await api.http.post("/v1/messages", json={**ASK, "stream": True})
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded_error")


def test_tools_and_their_results_are_said_as_chat_says_them() -> None:
    use = {"type": "tool_use", "id": "c0", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c0", "content": [{"type": "text", "text": "2"}]}
    body = MessagesRequest.model_validate({
        "model": "m", "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking"}, {"type": "text", "text": "b"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "c"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    })  # fmt: skip
    chat = _chat(body)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool", "user"]
    (call,) = chat["messages"][1]["tool_calls"]
    assert (call["id"], call["function"]) == ("c0", {"name": "f", "arguments": '{"x": 1}'})
    assert chat["messages"][2] == {"role": "tool", "tool_call_id": "c0", "content": "2"}
    assert chat["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat["parallel_tool_calls"] is False and chat["thinking_budget"] == 1024


def test_thoughts_and_calls_are_blocks_of_their_own() -> None:
    parts = (Reasoning("hm"), Content("a"), CallStart(0, "c0", "f"), CallArguments(0, '{"x": 1}'))
    deltas = [
        Delta(0, index == 0, "", (), "tool_calls" if index == len(parts) - 1 else None, parts=(part,))
        for index, part in enumerate(parts)
    ]
    usage = Usage(3, 2, 5, PromptTokensDetails(1))
    whole = json.loads(MessageWriter("m", 3).body(deltas, usage, {}))
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"x": 1}},
    ]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == {"input_tokens": 2, "cache_read_input_tokens": 1, "output_tokens": 2}
    writer = MessageWriter("m", 3)
    events = [json.loads(event.split("data: ", 1)[1]) for event in writer.events(deltas).decode().split("\n\n")[:-1]]
    grown = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert grown == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "text_delta", "text": "a"},
        {"type": "input_json_delta", "partial_json": '{"x": 1}'},
    ]
