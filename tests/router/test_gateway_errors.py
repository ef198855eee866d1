"""What a gateway refuses, and how: status, field, limit and fix; nothing that the client sent comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from fake_workers import FakeWorker

from baton.router.config import RouterConfig
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, Served, served

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[Served]:
    worker = FakeWorker(max_context=512)
    async with served(tokenizer, worker, config=RouterConfig(max_body_bytes=1 << 20)) as running:
        yield running
        assert not worker.submits, "a refused request has reached a worker"


def raw(field: str) -> bytes:
    return f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hi"}}], {field}}}'.encode()


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"temperature": 1e400', "temperature"),
        ('"temperature": -0.1', "temperature"),
        ('"temperature": 2.1', "temperature"),
        ('"temperature": "1"', "temperature"),
        ('"temperature": true', "temperature"),
        ('"top_p": 0', "top_p"),
        ('"top_p": 1.1', "top_p"),
        ('"top_k": -2', "top_k"),
        ('"top_k": 1.5', "top_k"),
        ('"min_p": 1.1', "min_p"),
        ('"presence_penalty": 3', "presence_penalty"),
        ('"frequency_penalty": NaN', "frequency_penalty"),
        ('"repetition_penalty": 0', "repetition_penalty"),
        ('"n": 0', "n"),
        ('"n": 129', "n"),
        ('"n": 1000000', "n"),
        ('"logprobs": true, "top_logprobs": 21', "top_logprobs"),
        ('"logprobs": true, "top_logprobs": 1000000', "top_logprobs"),
        ('"top_logprobs": 2', "top_logprobs"),
        ('"logit_bias": {"191222": -100}', "logit_bias"),
        ('"logit_bias": {"49152": 1}', "logit_bias"),
        ('"logit_bias": {"-1": 1}', "logit_bias"),
        ('"logit_bias": {"abc": 1}', "logit_bias"),
        ('"logit_bias": {"1.5": 1}', "logit_bias"),
        ('"logit_bias": {"1": 101}', "logit_bias"),
        ('"logit_bias": {"1": NaN}', "logit_bias"),
        ('"stop_token_ids": [1000000000]', "stop_token_ids"),
        ('"stop_token_ids": [-1]', "stop_token_ids"),
        ('"stop": ""', "stop"),
        ('"stop": ["a", ""]', "stop"),
        ('"stop": ["a", "b", "c", "d", "e"]', "stop"),
        ('"max_tokens": 0', "max_tokens"),
        ('"max_tokens": 512', "max_tokens"),
        ('"max_completion_tokens": 512', "max_completion_tokens"),
        ('"min_tokens": 5, "max_tokens": 4', "min_tokens"),
        ('"seed": 9223372036854775808', "seed"),
        ('"stream_options": {"include_usage": true}', "stream_options"),
        ('"tools": [{"type": "function"}]', "tools"),
        ('"tool_choice": "required"', "tool_choice"),
        ('"response_format": {"type": "json"}', "response_format"),
        ('"response_format": 7', "response_format"),
        ('"structured_outputs": {}', "structured_outputs"),
        ('"structured_outputs": {"regex": "[a-"}', "structured_outputs.regex"),
        ('"structured_outputs": {"choice": [""]}', "structured_outputs.choice"),
        ('"thinking_budget": 5', "thinking_budget"),
        ('"thinking_waits": 2', "thinking_waits"),
        ('"thinking_waits": 9', "thinking_waits"),
        ('"rank_by": "votes"', "rank_by"),
        ('"best_of": 2, "rank_by": "luck"', "rank_by"),
        ('"prompt_logprobs": 1', "prompt_logprobs"),
        ('"messages": []', "messages"),
        (
            '"messages": [' + '{"role": "user", "content": "a"},' * 4096 + '{"role": "user", "content": "a"}]',
            "messages",
        ),
        ('"metadata": {' + ", ".join(f'"{i}": "a"' for i in range(17)) + "}", "metadata"),
        ('"metadata": {"a": "' + "b" * 513 + '"}', "metadata"),
        ('"messages": "hi"', "messages"),
        ('"messages": [{"role": "wizard", "content": "hi"}]', "messages.0.role"),
        ('"messages": [{"role": "user", "content": [{"type": "image_url"}]}]', "messages.0.content"),
        ('"messages": [{"role": "user", "content": "' + "long " * 600 + '"}]', "messages"),
        ('"model": 5', "model"),
    ],
)
async def test_a_bad_field_is_refused_by_name(api: Served, field: str, param: str) -> None:
    reply = await api.http.post(CHAT, content=raw(field), headers=JSON)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ],
)
async def test_a_bad_completion_is_refused_by_name(api: Served, fields: dict[str, Any], param: str) -> None:
    reply = await api.complete(**fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_errors_name_the_limit_and_the_fix(api: Served) -> None:
    message = (await api.chat(max_tokens=511)).json()["error"]["message"]
    room = int(message.rsplit(" ", 1)[1])
    facts = f"max_tokens is 511, the prompt has {512 - room} tokens and the context is 512"
    assert message == f"{facts}: ask for at most {room}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        raw('"user": "\\ud800"'),
        raw('"stop": "\\ud83d"'),
        raw('"model": "\\ud800"'),
        raw('"cache_salt": "\\ud800"'),
        raw('"metadata": {"a": "\\ud800"}'),
        raw('"tools": [{"type": "function", "function": {"name": "\\ud800"}}]'),
        raw('"structured_outputs": {"choice": ["\\ud800"]}'),
        raw(
            '"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["\\ud800"]}}}'
        ),
        raw('"messages": [{"role": "user", "content": "\\udc00"}]'),
        raw('"user": "\xff"').replace("ÿ".encode(), b"\xff"),
        b'{"a":' * 5000,
    ],
)
async def test_what_is_not_a_json_object_of_unicode_is_400(api: Served, body: bytes) -> None:
    reply = await api.http.post(CHAT, content=body, headers=JSON)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_value"


async def test_another_content_type_is_400(api: Served) -> None:
    assert (await api.http.post(CHAT, data={"model": MODEL})).status_code == 400


async def test_openais_client_raises_its_own_errors(api: Served) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        await api.client.chat.completions.create(model="gpt-9", messages=messages)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await api.client.chat.completions.create(model=MODEL, messages=messages, temperature=9, stream=True)
    assert bad.value.param == "temperature"


async def test_an_unknown_route_and_method_have_the_same_shape(api: Served) -> None:
    assert (await api.http.post("/v1/nothing")).json()["error"]["code"] == "no_such_route"
    wrong_method = await api.http.get(CHAT)
    assert (wrong_method.status_code, wrong_method.json()["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize("framing", ["content-length: 67108864", "transfer-encoding: chunked"])
async def test_a_body_too_large_is_refused_before_it_is_read(api: Served, framing: str) -> None:
    reader, writer = await asyncio.open_connection(*api.url.removeprefix("http://").split(":"))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
    writer.write(head.encode())
    if "chunked" in framing:
        writer.write(b"180000\r\n" + b" " * 0x180000 + b"\r\n")  # 1.5 MiB, and more would come
    assert b" 413 " in await reader.readline()
    writer.close()


async def test_a_client_that_sends_before_it_reads_still_learns_why(api: Served) -> None:
    reply = await api.http.post(CHAT, content=b" " * (8 << 20), headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert (await api.http.get("/live")).status_code == 200


async def test_endless_headers_are_cut_off(api: Served) -> None:
    reader, writer = await asyncio.open_connection(*api.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(100_000)))
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_error_bodies_are_small_and_echo_nothing(api: Served) -> None:
    secret = "s3cret" * 10
    for field in (
        f'"messages": [{",".join([f"{{{chr(34)}role{chr(34)}: {chr(34)}{secret}{chr(34)}}}"] * 5000)}]',
        f'"logit_bias": {{"{secret}": 1}}',
        f'"logit_bias": {{"{secret}": 1000}}',
        f'"stop": ["{secret * 100}"]',
        f'"metadata": "{secret}"',
        f'"tool_choice": "{secret}"',
        f'"model": "{secret}"',
    ):
        reply = await api.http.post(CHAT, content=raw(field), headers=JSON)
        assert reply.status_code in (400, 404)
        assert len(reply.content) < 1000
        assert "s3cret" not in reply.text


async def test_huge_bodies_do_not_hold_up_a_health_check(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        body = raw('"messages": [{"role": "user", "content": "' + "word " * 1_000_000 + '"}]')
        calls = [asyncio.create_task(api.http.post(CHAT, content=body, headers=JSON)) for _ in range(2)]
        slowest = 0.0
        while not all(call.done() for call in calls):
            start = time.monotonic()
            assert (await api.http.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
            await asyncio.sleep(0.01)
        assert [call.result().status_code for call in calls] == [400, 400]
        assert slowest < 0.3  # generous: the machine is shared


@pytest.mark.parametrize(
    ("given", "is_echoed"),
    [("abc-1.2:x", True), ("a" * 200, False), ("a b", False), ("é", False), ('"><script>', False)],
)
async def test_a_request_id_is_echoed_only_if_harmless(api: Served, given: str, is_echoed: bool) -> None:
    headers = {b"content-type": b"application/json", b"x-request-id": given.encode()}
    reply = await api.http.post(CHAT, content=b"{}", headers=headers)
    assert (reply.headers["x-request-id"] == given) == is_echoed


async def test_a_request_id_of_a_megabyte_is_refused_with_its_head(api: Served) -> None:
    reader, writer = await asyncio.open_connection(*api.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nx-request-id: " + b"a" * 1_000_000)
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_without_workers_it_says_503_and_when_to_come_back(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as api:
        reply = await api.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_workers")
        assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_beyond_the_queue_it_says_429_on_every_path(tokenizer: Tokenizer, stream: bool) -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with served(tokenizer, worker, config=RouterConfig(max_queued_requests=2)) as api:
        held = [asyncio.create_task(api.chat(max_tokens=1)) for _ in range(2)]
        while worker.num_running < 2:
            await asyncio.sleep(0.005)
        for call in (api.chat, api.complete):
            reply = await call(stream=stream)
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
            assert int(reply.headers["retry-after"]) >= 1
        assert len(worker.submits) == 2
        worker.allow(100)
        assert [reply.status_code for reply in await asyncio.gather(*held)] == [200, 200]
        assert (await api.chat(max_tokens=1)).status_code == 200


async def test_a_large_body_is_not_taken_for_headers(tokenizer: Tokenizer) -> None:
    """Whatever the reads: one for head and body, and the end of one body with the next head."""
    async with served(tokenizer, FakeWorker()) as api:
        body = raw('"max_tokens": 1, "user": "' + "x" * 150_000 + '"')
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection(*api.url.removeprefix("http://").split(":"))
        for _ in range(3):
            writer.write(head + body)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b'"baton"')
            await reader.read(100_000)
        writer.close()


async def test_many_large_uploads_at_once_are_refused_and_one_is_not(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(), config=RouterConfig(max_held_body_bytes=100_000)) as api:
        large = raw('"max_tokens": 1, "user": "' + "x" * 150_000 + '"')
        assert (await api.http.post(CHAT, content=large, headers=JSON)).status_code == 200
        _, writer = await asyncio.open_connection(*api.url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99000\r\n\r\n" + b" " * 90_000)
        small = raw('"max_tokens": 1, "user": "' + "x" * 20_000 + '"')
        while (reply := await api.http.post(CHAT, content=small, headers=JSON)).status_code == 200:
            await asyncio.sleep(0.005)  # until the first upload has come so far
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        writer.close()
        while (await api.http.post(CHAT, content=small, headers=JSON)).status_code == 429:
            await asyncio.sleep(0.005)
