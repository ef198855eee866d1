"""Large bodies and texts: read by another process, with the same results as here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_workers import FakeWorker

from baton.router.bodies import BODIES
from baton.router.errors import InvalidRequest, RouterError
from baton.router.heavy_lane import HeavyLane
from baton.router.openai_models import parse_body
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served

BIG = "word é\n " * 50_000


@pytest.fixture(scope="module")
def lane(smollm_path: Path) -> Iterator[HeavyLane]:
    lane = HeavyLane(smollm_path)
    yield lane
    lane.close()


BODY: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a\n"}, {"type": "text", "text": "é"}]}],
        "stop": "x",
        "logit_bias": {"1": 2},
    },
    "completions": {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "stop": ["a", "b"], "temperature": None},
    "embeddings": {"input": "a", "encoding_format": "base64"},
    "responses": {"input": [{"role": "user", "content": "a"}], "text": {"format": {"type": "text"}}},
    "messages": {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "tokenize": {"messages": [{"role": "user", "content": "hi"}]},
    "detokenize": {"tokens": [1, 2]},
}


@pytest.mark.parametrize("endpoint", BODIES)
async def test_a_body_means_the_same_after_it_was_written_again(lane: HeavyLane, endpoint: str) -> None:
    data = json.dumps({"model": MODEL, **BODY[endpoint], "unknown": [{}] * 5}).encode()
    written = await lane.canonical(endpoint, [data[:20], data[20:]], 1000)
    assert parse_body(BODIES[endpoint], written) == parse_body(BODIES[endpoint], data)
    assert b"unknown" not in written


async def test_refusals_come_through_with_field_and_fix(lane: HeavyLane) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await lane.canonical("chat", [b'{"model": "m", "messages": "x"}'], 1000)
    assert refused.value.param == "messages"
    body = json.dumps({"model": "m", "prompt": "x" * 1001}).encode()
    with pytest.raises(InvalidRequest, match="1002 characters of text; the context holds 1000 at the very most"):
        await lane.canonical("completions", [body], 1000)


async def test_texts_encode_to_the_same_tokens(lane: HeavyLane, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a <|im_end|> é"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"const": 10**40}}}]
    assert await lane.encode_chat(messages, tools, {}) == tokenizer.encode_chat_now(messages, tools)
    assert await lane.encode_prompt("a <|im_end|> é") == tokenizer.encode_prompt_now("a <|im_end|> é")


async def test_more_tokens_than_the_context_holds_are_refused_there(lane: HeavyLane) -> None:
    with pytest.raises(InvalidRequest, match="prompt has 5 tokens; the context is 5"):
        await lane.encode_prompt("a b c d e", context=5)
    assert len(await lane.encode_prompt("a b c d e", context=6)) == 5
    with pytest.raises(InvalidRequest, match=r"messages has \d+ tokens; the context is 5"):
        await lane.encode_chat([{"role": "user", "content": "hi"}], [], {}, context=5)


async def test_a_lost_process_costs_one_call_and_is_replaced(smollm_path: Path) -> None:
    lane = HeavyLane(smollm_path)
    try:
        await lane.encode_prompt("a")
        lane.kill_process()
        with pytest.raises(RouterError, match="was lost: try again"):
            await lane.encode_prompt("a")
        assert await lane.encode_prompt("a")
    finally:
        lane.close()


async def test_large_calls_are_answered_as_small_ones(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(max_context=400_000)
    async with served(tokenizer, worker) as api:
        messages = [{"role": "user", "content": BIG}]
        reply = await api.chat(messages=messages, max_tokens=1, junk=["x"] * 10_000)
        assert reply.status_code == 200, reply.text
        assert worker.submits[0].request.tokens == tokenizer.encode_chat_now(messages)
        assert (await api.complete(prompt=BIG, max_tokens=1)).status_code == 200
        assert worker.submits[1].request.tokens == tokenizer.encode_prompt_now(BIG)
        worker.max_context = 1000
        assert (await api.complete(prompt=BIG, temperature=3)).json()["error"]["param"] == "temperature"


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(max_context=100)) as api:
        reply = (await api.complete(prompt=BIG)).json()["error"]
        assert reply["code"] == "invalid_value" and "characters of text" in reply["message"]
