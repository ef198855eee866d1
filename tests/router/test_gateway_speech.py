"""Structured output, tools, reasoning and best_of as clients see them: fake workers, the real app."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from fake_workers import FakeWorker, saying
from test_gateway import MESSAGES, telling

from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
CALLS = (
    'Sure. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call>'
)


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_parsed_output_and_its_grammar(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, '{"name": "Ada", "age": 36}'))
    async with served(tokenizer, worker) as api:
        reply = await api.client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person)
        assert reply.choices[0].message.parsed == Person(name="Ada", age=36)
        (submit,) = worker.submits
        format = json.loads(submit.request.grammar)["format"]
        assert format["type"] == "json_schema" and list(format["json_schema"]["properties"]) == ["name", "age"]


@pytest.mark.parametrize(
    ("asked", "format"),
    [
        ({"regex": "^[0-9]+$"}, {"type": "regex", "pattern": "[0-9]+"}),
        ({"grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        (
            {"choice": ["a", "b"]},
            {"type": "or", "elements": [{"type": "const_string", "value": text} for text in "ab"]},
        ),
    ],
)
async def test_other_formats_reach_the_worker(
    tokenizer: Tokenizer, asked: dict[str, Any], format: dict[str, Any]
) -> None:
    worker = FakeWorker(telling(tokenizer, "1"))
    async with served(tokenizer, worker) as api:
        assert (await api.chat(structured_outputs=asked)).status_code == 200
        assert (await api.complete(structured_outputs=asked)).status_code == 200
        assert [json.loads(submit.request.grammar)["format"] for submit in worker.submits] == [format] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "stringg"}}}}, "#/type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, "tools"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"best_of": 3, "stream": True}, "best_of"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    worker = FakeWorker()
    async with served(tokenizer, worker) as api:
        reply = await api.chat(**fields)
        assert reply.status_code == 400 and param in reply.json()["error"]["message"]
        assert not worker.submits


async def test_a_workers_refusal_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    worker.error, worker.is_refusal = "Rule root is not defined", True
    async with served(tokenizer, worker) as api:
        for stream in (False, True):
            reply = await api.chat(structured_outputs={"grammar": "x"}, stream=stream)
            assert reply.status_code == 400 and "Rule root" in reply.json()["error"]["message"]
        assert api.is_idle()


async def test_streamed_calls_are_those_of_the_body(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, CALLS))
    async with served(tokenizer, worker) as api:
        reply = await api.client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER])
        message = reply.choices[0].message
        assert (message.content, reply.choices[0].finish_reason) == ("Sure. ", "tool_calls")
        assert message.tool_calls is not None
        calls: list[Any] = list(message.tool_calls)
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {"city": "東京"}]
        async with api.client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[WEATHER]) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.message.tool_calls is not None and streamed.finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls] == [
            (call.function.name, call.function.arguments) for call in calls
        ]
        assert len({call.id for call in streamed.message.tool_calls}) == 2
        assert "get_weather" in tokenizer.decode(worker.submits[0].request.tokens)
        assert not worker.submits[0].request.grammar  # the model is free to call or not


async def test_forced_and_strict_calls_have_grammars(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, CALLS))
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with served(tokenizer, worker) as api:
        await api.chat(tools=[WEATHER], tool_choice="required")
        await api.chat(tools=[WEATHER], tool_choice=named)
        await api.chat(tools=[strict])
        await api.chat(tools=[WEATHER], tool_choice="none")
        grammars = [submit.request.grammar for submit in worker.submits]
    required, by_name, free = (json.loads(grammar)["format"] for grammar in grammars[:3])
    assert (required["type"], required["at_least_one"], required["stop_after_first"]) == (
        "tags_with_separator", True, False,
    )  # fmt: skip
    assert by_name["stop_after_first"] and free["type"] == "triggered_tags" and not grammars[3]
    assert free["tags"][0]["content"]["json_schema"]["required"] == ["city"]


async def test_calls_and_results_of_earlier_turns_are_rendered(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, "It rains."))
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain<|im_end|>"},
    ]
    async with served(tokenizer, worker) as api:
        assert (await api.chat(messages=messages, tools=[WEATHER])).status_code == 200
        prompt = tokenizer.decode(worker.submits[0].request.tokens)
        assert '"arguments": {"city": "Paris"}' in prompt
        assert "<tool_response>\nrain<|im_end|>\n</tool_response>" in prompt  # what looks like control is text
        bad = {**call, "function": {"name": "f", "arguments": "{"}}
        reply = await api.chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [bad]}])
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"


async def test_the_best_of_several_are_returned(tokenizer: Tokenizer) -> None:
    """To the fake worker a smaller token id is likelier."""
    worker = FakeWorker(lambda request: [(1000 + request.sampling.seed % 97,)])
    async with served(tokenizer, worker) as api:
        body = (await api.complete(best_of=5, n=2, seed=3, max_tokens=1)).json()
        assert len(worker.submits) == 5 and body["usage"]["completion_tokens"] == 5
        ids = sorted(1000 + submit.request.sampling.seed % 97 for submit in worker.submits)
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert [choice["text"] for choice in body["choices"]] == [tokenizer.decode([id]) for id in ids[:2]]
        assert all(choice["logprobs"] is None for choice in body["choices"])


async def test_the_answer_that_most_give_is_returned(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(lambda request: [tokenizer.encode_prompt_now("42" if request.sampling.seed % 3 else "7")])
    async with served(tokenizer, worker) as api:
        seed = 3  # choice 0 keeps it: 3 % 3 == 0 says 7
        choices = (await api.chat(best_of=8, n=2, seed=seed, rank_by="votes")).json()["choices"]
        said = ["42" if submit.request.sampling.seed % 3 else "7" for submit in worker.submits]
        most = max(set(said), key=said.count)
        assert {"7", "42"} == set(said) and said.count("7") != 4
        assert [choice["message"]["content"] for choice in choices] == [most, most]
        assert (await api.chat(rank_by="votes")).json()["error"]["param"] == "rank_by"


async def test_reasoning_is_streamed_apart(tokenizer: Tokenizer) -> None:
    thinker = Tokenizer(tokenizer._hf)
    thinker.chat_template += "{# </think> #}"
    worker = FakeWorker(saying(*[[t] for t in tokenizer.encode_prompt_now("<think>\nhm\n</think>\n\nYes.")]))
    async with served(thinker, worker) as api:
        reply = (await api.chat(thinking_budget=64)).json()
        message = reply["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm\n", "Yes.")
        assert 0 < reply["usage"]["completion_tokens_details"]["reasoning_tokens"] < reply["usage"]["completion_tokens"]
        events = [json.loads(event) for event in (await api.events())[:-1]]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm\n"
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        grammar = json.loads(worker.submits[0].request.grammar)["format"]
        assert {"type": "any_text", "excludes": ["</think>"], "max_tokens": 64} in grammar["elements"][0]["elements"]
        assert not worker.submits[1].request.grammar
