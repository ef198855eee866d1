"""Thoughts that are made to go on, with fake workers."""

from __future__ import annotations

import copy
import json

import pytest
from fake_workers import FakeWorker

from baton.actors.engine.request import Request
from baton.router.tokenizer import Tokenizer
from tests.router.rig import served


@pytest.fixture
def thinker(tokenizer: Tokenizer) -> Tokenizer:
    hf = copy.deepcopy(tokenizer._hf)
    hf.add_tokens(["<think>", "</think>"])
    hf.chat_template += "{# </think> #}"
    return Tokenizer(hf)


def thinking_worker(thinker: Tokenizer) -> FakeWorker:
    """Thinks "a", and " b" after each time that it is told to go on; would then close, and answer."""

    def script(request: Request) -> list[list[int]]:
        num_waits = thinker.decode(request.tokens[request.prompt_len :]).count("Wait")
        pieces = ["<think>", "a", *["\nWait", " b"] * num_waits, "</think>", "Yes."]
        return [[token] for piece in pieces for token in thinker.encode_prompt_now(piece)]

    return FakeWorker(script)


@pytest.mark.parametrize(
    ("fields", "thoughts", "answer", "finish"),
    [
        ({}, "a", "Yes.", "stop"),
        ({"thinking_waits": 1}, "a\nWait b", "Yes.", "stop"),
        ({"thinking_waits": 3}, "a" + "\nWait b" * 3, "Yes.", "stop"),
        ({"thinking_waits": 3, "thinking_budget": 7}, "a\nWait b", "Yes.", "stop"),  # the second would go beyond it
        ({"thinking_waits": 1, "max_tokens": 5}, "a\nWait b", "", "length"),
        ({"thinking_waits": 1, "max_tokens": 3}, "a", "", "length"),
    ],
)
async def test_a_thought_goes_on_as_often_as_asked(
    thinker: Tokenizer, fields: dict[str, int], thoughts: str, answer: str, finish: str
) -> None:
    worker = thinking_worker(thinker)
    async with served(thinker, worker) as api:
        reply = (await api.chat(**fields)).json()
        choice = reply["choices"][0]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"] or "") == (thoughts, answer)
        assert choice["finish_reason"] == finish
        chunks = [
            json.loads(event) for event in (await api.events(**fields, stream_options={"include_usage": True}))[:-1]
        ]
        deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
        assert "".join(delta.get("content", "") for delta in deltas) == answer
        assert chunks[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]
        first, *legs = [submit.request for submit in worker.submits[: len(worker.submits) // 2]]
        assert all(leg.tokens[: len(first.tokens)] == first.tokens and leg.num_output for leg in legs)
        assert api.is_idle() and worker.num_running == 0


async def test_each_choice_goes_on_by_itself(thinker: Tokenizer) -> None:
    async with served(thinker, thinking_worker(thinker)) as api:
        choices = (await api.chat(n=3, thinking_waits=2)).json()["choices"]
        assert [choice["message"]["reasoning_content"] for choice in choices] == ["a\nWait b\nWait b"] * 3


async def test_waits_are_refused_where_there_is_nothing_to_wait_for(tokenizer: Tokenizer, thinker: Tokenizer) -> None:
    for serving, fields in ((tokenizer, {}), (thinker, {"logprobs": True})):
        async with served(serving, FakeWorker()) as api:
            reply = await api.chat(thinking_waits=1, **fields)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "thinking_waits")
