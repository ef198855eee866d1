"""Public bug reports on what clients see, replayed with fake workers; numbers as in bug-reports.md.

Only what the tests of the parts themselves leave open: those of the detokenizer, of tools and of errors have the rest.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_workers import FakeWorker
from test_gateway import MESSAGES, telling

from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served, until
from tests.router.test_gateway_speech import CALLS, WEATHER


async def test_usage_of_several_choices_comes_once_and_last(tokenizer: Tokenizer) -> None:
    """Entry 3: no usage chunk, or one with choices, or a prompt counted for each choice."""
    async with served(tokenizer, FakeWorker(telling(tokenizer, "Hello, world"))) as api:
        events = await api.events(n=2, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        chunks = [json.loads(event) for event in events[:-1]]
        assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        whole = (await api.chat(n=2)).json()["usage"]
        alone = (await api.chat()).json()["usage"]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [chunks[-1]["usage"][name] for name in counts] == [whole[name] for name in counts]
        assert whole["prompt_tokens"] == alone["prompt_tokens"]
        assert whole["completion_tokens"] == 2 * alone["completion_tokens"]


@pytest.mark.parametrize("cut", [" world", '"city"', "</tool_call>"])
async def test_a_stop_string_among_calls_cuts_both_modes_alike(tokenizer: Tokenizer, cut: str) -> None:
    """Entry 5: text around calls was lost when a stop string interrupted the parser."""
    async with served(tokenizer, FakeWorker(telling(tokenizer, f"Hi world {CALLS}"))) as api:
        body: dict[str, Any] = {"tools": [WEATHER], "stop": [cut]}
        message = (await api.chat(**body)).json()["choices"][0]["message"]
        content, names, arguments = "", [], ""
        for event in (await api.events(**body))[:-1]:
            delta = json.loads(event)["choices"][0]["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                names += [call["function"]["name"]] if "name" in call["function"] else []
                arguments += call["function"].get("arguments", "")
        calls = message.get("tool_calls") or []
        assert content == message["content"] and content.startswith("Hi")
        assert names == [call["function"]["name"] for call in calls]
        assert arguments == "".join(call["function"]["arguments"] for call in calls)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("temperature", -0.0, 0.0),
        ("temperature", 1e-6, 1e-6),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 49152, 49152),
        ("top_k", 49153, 49152),
        ("top_k", 9_999_999, 49152),
    ],
)
async def test_edge_values_reach_the_worker_as_what_they_mean(
    tokenizer: Tokenizer, field: str, given: float, kept: float
) -> None:
    """Entries 6 and 7: a tiny temperature, or top_k beyond the vocabulary, killed the scheduler."""
    worker = FakeWorker(telling(tokenizer, "ok"))
    async with served(tokenizer, worker) as api:
        assert (await api.chat(**{field: given})).status_code == 200
        assert getattr(worker.submits[0].request.sampling, field) == kept


async def test_an_id_that_no_token_has_gives_no_text(tokenizer: Tokenizer) -> None:
    """Entry 8: models whose vocabulary is padded may have such ids."""
    worker = FakeWorker(lambda request: [(tokenizer.encode_prompt_now("a")[0],), (tokenizer.vocab_size + 5,)])
    async with served(tokenizer, worker) as api:
        choice = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
        assert choice["message"]["content"] == "a"
        assert choice["logprobs"]["content"][1]["bytes"] == []


async def test_several_choices_are_one_request_and_are_all_freed(tokenizer: Tokenizer) -> None:
    """Entry 10: counters counted each of the n as a request."""
    async with served(tokenizer, FakeWorker(telling(tokenizer, "Hello"))) as api:
        await api.chat(n=4, temperature=0)
        text = (await api.http.get("/metrics")).text
        assert 'baton_gateway_requests_total{endpoint="chat",status="200"} 1.0' in text
        assert 'baton_gateway_choices_total{finish="stop"} 4.0' in text
        assert api.is_idle()


async def test_a_regex_that_backtracks_elsewhere_is_just_a_regex(tokenizer: Tokenizer) -> None:
    """Entry 11: `(a+)+$` is no danger to an automaton; a schema may be `true`."""
    worker = FakeWorker(telling(tokenizer, "aaa"))
    async with served(tokenizer, worker) as api:
        assert (await api.chat(structured_outputs={"regex": "(a+)+$"})).status_code == 200
        schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": True}}
        assert (await api.chat(response_format=schema)).status_code == 200
        assert len(worker.submits) == 2


async def test_an_id_may_be_used_again_after_its_request_was_aborted(tokenizer: Tokenizer) -> None:
    """Entry 29: a client's id named the request inside, so that the dead one's state met the next."""
    worker = FakeWorker()
    worker.num_steps_allowed = 3
    headers = {"x-request-id": "same"}
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    async with served(tokenizer, worker) as api:
        async with api.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            assert await anext(response.aiter_lines())
        await until(lambda: worker.num_running == 0)
        worker.script, worker.num_steps_allowed = telling(tokenizer, "fresh"), None
        again = await api.http.post("/v1/chat/completions", json={**body, "stream": False}, headers=headers)
        assert again.headers["x-request-id"] == "same"
        assert again.json()["choices"][0]["message"]["content"] == "fresh"
        first, second = (submit.request.id for submit in worker.submits)
        assert first != second and "same" not in first + second


@pytest.mark.parametrize("id", [b"a\rb", b"a\nx-injected: 1", b"a\r\nx-injected: 1", b"\xff\xfe"])
async def test_an_id_cannot_write_headers(tokenizer: Tokenizer, id: bytes) -> None:
    """Entry 29, S4: whatever the bytes, they come back neither whole nor as a header."""
    async with served(tokenizer, FakeWorker()) as api:
        reader, writer = await asyncio.open_connection(*api.url.removeprefix("http://").split(":"))
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: " + id + b"\r\n\r\n")
        reply = await reader.read()
        writer.close()
        assert reply.startswith(b"HTTP/1.1 ") and b"x-injected" not in reply and id not in reply


async def test_parts_are_joined_and_turns_may_repeat_a_role(tokenizer: Tokenizer) -> None:
    """Entry S7: a list of parts was rendered as Python writes it."""
    worker = FakeWorker(telling(tokenizer, "ok"))
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    async with served(tokenizer, worker) as api:
        turns = [{"role": "user", "content": parts}, {"role": "user", "content": "three"}]
        assert (await api.chat(messages=turns)).status_code == 200
        prompt = tokenizer.decode(worker.submits[0].request.tokens)
        assert "one two" in prompt and "three" in prompt and "'type'" not in prompt and "[{" not in prompt
