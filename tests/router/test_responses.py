"""/v1/responses through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_workers import FakeWorker
from test_gateway import telling

from baton.router.errors import WorkerLost
from baton.router.generation import Delta
from baton.router.openai_models import PromptTokensDetails, Usage
from baton.router.parts import CallArguments, CallStart, Content, Reasoning
from baton.router.responses import ResponsesRequest, ResponseWriter
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served


async def test_text_in_and_text_out(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, "Hello, é👋"))
    async with served(tokenizer, worker) as api:
        reply = await api.client.responses.create(
            model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"}
        )
        assert (reply.output_text, reply.status, reply.object) == ("Hello, é👋", "completed", "response")
        assert reply.usage is not None and reply.usage.input_tokens == len(worker.submits[0].request.tokens)
        assert reply.usage.input_tokens_details.cached_tokens == 0
        assert (reply.metadata, reply.instructions) == ({"a": "b"}, "Be brief.")
        expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        assert worker.submits[0].request.tokens == tokenizer.encode_chat_now(expected)
        cut = await api.client.responses.create(model=MODEL, input="hi", max_output_tokens=2, temperature=0, top_p=0.5)
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        sampling = worker.submits[1].request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (2, 0, 0.5)


async def test_a_conversation_is_read_as_chat_reads_it(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    async with served(tokenizer, worker) as api:
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"role": "developer", "content": "d"},
        ]
        await api.client.responses.create(model=MODEL, input=items, max_output_tokens=1)
        expected = [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "c"},
            {"role": "system", "content": "d"},
        ]
        assert worker.submits[0].request.tokens == tokenizer.encode_chat_now(expected)


async def test_streamed_events_tell_the_same_response(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "Hello, é👋"))) as api:
        events: list[Any] = []
        async for event in await api.client.responses.create(model=MODEL, input="hi", stream=True):
            events.append(event)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events[-1].response.output_text == events[-4].text == "Hello, é👋"
        assert events[-1].response.usage.output_tokens > 0
        async with api.client.responses.stream(model=MODEL, input="hi") as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_text == "Hello, é👋"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"priority": 2**40}, "priority"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_a_bad_field_is_refused_by_its_own_name(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    async with served(tokenizer, FakeWorker(max_context=512)) as api:
        reply = await api.http.post("/v1/responses", json={"model": MODEL, "input": "a", **fields})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_failure_on_the_way_is_an_error_and_never_completed(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    async with served(tokenizer, worker) as api:
        worker.num_steps_allowed = 3
        stream = await api.client.responses.create(model=MODEL, input="hi", stream=True)
        kinds: list[str] = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                worker.error = "broken"
                worker.num_steps_allowed = None
                worker.wake()
        assert kinds[-2:] == ["error", "response.failed"] and "response.completed" not in kinds


USAGE = Usage(1, 2, 3, PromptTokensDetails(0))


def test_thoughts_and_calls_are_items_of_their_own_streamed_or_not() -> None:
    body = ResponsesRequest(model="m", input="a")
    parts = (Reasoning("hm"), Content("a"), CallStart(0, "c0", "f"), CallArguments(0, '{"x": 1}'))
    deltas = [
        Delta(0, index == 0, "", (), "tool_calls" if index == len(parts) - 1 else None, parts=(part,))
        for index, part in enumerate(parts)
    ]
    whole = json.loads(ResponseWriter("m", body).body(deltas, USAGE, {}))
    writer = ResponseWriter("m", body)
    streamed = (writer.events(deltas) + writer.last_events(USAGE, None)).decode().split("\n\n")[:-1]
    events = [json.loads(event.split("data: ", 1)[1]) for event in streamed]

    def without_ids(items: list[Any]) -> list[Any]:
        return [{key: value for key, value in item.items() if key != "id"} for item in items]

    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][2]["arguments"] == '{"x": 1}' and whole["output"][2]["call_id"] == "c0"
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_an_error_event_ends_in_a_failed_response() -> None:
    writer = ResponseWriter("m", ResponsesRequest(model="m", input="a"))
    told = writer.error_event(WorkerLost("gone")).decode()
    assert "event: error" in told and '"status":"failed"' in told
