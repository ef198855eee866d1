"""What OpenAI's own clients see: the real app on uvicorn, fake workers over real gRPC."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_workers import FakeWorker, Script, saying

from baton.router.config import RouterConfig
from baton.router.gateway import Gateway
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served, until

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def telling(tokenizer: Tokenizer, text: str) -> Script:
    """A script that says `text`, one token a step."""
    return saying(*[[token] for token in tokenizer.encode_prompt_now(text)])


async def test_a_chat_completion(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, "Hello, world"))
    async with served(tokenizer, worker) as api:
        reply = await api.client.chat.completions.create(model=MODEL, messages=MESSAGES)
        choice = reply.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            "Hello, world",
            "stop",
        )
        assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-") and reply.model == MODEL
        prompt = tokenizer.encode_chat_now(MESSAGES)
        assert worker.submits[0].request.tokens == prompt
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        num_output = len(tokenizer.encode_prompt_now("Hello, world")) + 1  # EOS counts
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), num_output)
        assert reply.usage.total_tokens == len(prompt) + num_output
        assert api.is_idle()


async def test_a_stream_has_openais_shape(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "Hello, world"))) as api:
        events = await api.events(stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2]]
        assert all(contents) and "".join(contents) == "Hello, world"
        assert chunks[-2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        whole = (await api.chat()).json()
        assert whole["usage"] == chunks[-1]["usage"] | {
            "prompt_tokens_details": whole["usage"]["prompt_tokens_details"]
        }


async def test_without_being_asked_a_stream_has_no_usage(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "a b"))) as api:
        assert not any("usage" in event for event in await api.events())


async def test_sync_and_async_clients_stream_the_same_text(tokenizer: Tokenizer) -> None:
    text = "ď 👋🏽 👨‍👩‍👧 漢 done"
    async with served(tokenizer, FakeWorker(telling(tokenizer, text))) as api:

        def read() -> str:
            with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none") as client:
                stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        pieces: list[str] = []
        async for chunk in await api.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
            pieces.append(chunk.choices[0].delta.content or "")
        assert "".join(pieces) == text == await asyncio.to_thread(read)
        assert not any("\ufffd" in piece for piece in pieces)


async def test_a_character_cut_by_the_length_is_the_same_in_both_modes(tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode_prompt_now("a 👋"))
    async with served(tokenizer, FakeWorker(telling(tokenizer, "a 👋"))) as api:
        whole = (await api.chat(max_tokens=num_tokens - 1)).json()["choices"][0]
        chunks = [json.loads(event) for event in (await api.events(max_tokens=num_tokens - 1))[:-1]]
        streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert streamed == whole["message"]["content"] == "a \ufffd"
        assert whole["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_text_tokens_and_worker(tokenizer: Tokenizer, stream: bool) -> None:
    worker = FakeWorker(telling(tokenizer, "one two STOP three four five"), step_s=0.002)
    async with served(tokenizer, worker) as api:
        fields: dict[str, Any] = {"stop": ["STOP"], "logprobs": True}
        if stream:
            events = await api.events(**fields, stream_options={"include_usage": True})
            chunks = [json.loads(event) for event in events[:-1]]
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            finish, usage = choices[-1]["finish_reason"], chunks[-1]["usage"]
        else:
            reply = (await api.chat(**fields)).json()
            choice, usage = reply["choices"][0], reply["usage"]
            text, finish, logprobs = (
                choice["message"]["content"],
                choice["finish_reason"],
                choice["logprobs"]["content"],
            )
        assert (text, finish) == ("one two ", "stop")
        spelled = "".join(entry["token"] for entry in logprobs)
        assert spelled.startswith("one two STOP") and "three" not in spelled
        assert usage["completion_tokens"] == len(logprobs)
        await until(lambda: worker.num_running == 0)
        assert len(worker.cancels) == 1


async def test_a_stop_token_gives_no_text_and_counts(tokenizer: Tokenizer) -> None:
    (newline,) = tokenizer.encode_prompt_now("\n")
    async with served(tokenizer, FakeWorker(telling(tokenizer, "one\ntwo"))) as api:
        reply = (await api.chat(stop_token_ids=[newline])).json()
        assert reply["choices"][0]["message"]["content"] == "one"
        assert reply["usage"]["completion_tokens"] == 2


async def test_no_stop_before_min_tokens(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "a\nb\nc\nd\n"))) as api:
        reply = (await api.chat(stop=["\n"], min_tokens=5)).json()
        assert reply["choices"][0]["message"]["content"] == "a\nb\nc"


async def test_several_choices_have_their_own_seeds(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(lambda request: [(100 + request.sampling.seed % 1000,), (101,)])
    async with served(tokenizer, worker) as api:
        first = (await api.chat(n=4, seed=7)).json()
        again = (await api.chat(n=4, seed=7)).json()
        texts = [choice["message"]["content"] for choice in first["choices"]]
        assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
        assert len(set(texts)) == 4
        assert texts == [choice["message"]["content"] for choice in again["choices"]]
        assert len({submit.request.id for submit in worker.submits}) == 8
        assert len({submit.request.tokens for submit in worker.submits}) == 1
        assert first["usage"]["prompt_tokens"] == len(worker.submits[0].request.tokens)
        assert first["usage"]["completion_tokens"] == 12
        await api.chat(n=2)
        await api.chat(n=2)
        assert len({submit.request.sampling.seed for submit in worker.submits[8:]}) == 4


async def test_several_choices_stream_with_their_indices(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "Hello you"))) as api:
        chunks = [json.loads(event) for event in (await api.events(n=3, temperature=0))[:-1]]
        texts = {0: "", 1: "", 2: ""}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == dict.fromkeys(range(3), "Hello you")
        assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 3


async def test_logprobs_carry_true_bytes(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "é👋"))) as api:
        reply = (await api.chat(logprobs=True, top_logprobs=2)).json()
        entries = reply["choices"][0]["logprobs"]["content"][:-1]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é👋"
        token = tokenizer.encode_prompt_now("é👋")[0]
        assert entries[0]["logprob"] == -token / 1000
        assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-token / 1000, -token / 1000 - 1]
        assert (await api.chat()).json()["choices"][0]["logprobs"] is None


async def test_every_sampling_field_reaches_the_worker(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    fields: dict[str, Any] = {
        "max_completion_tokens": 5, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {"5": -3}, "min_tokens": 2, "seed": 11,
        "stop_token_ids": [9], "ignore_eos": True, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    async with served(tokenizer, worker) as api:
        assert (await api.chat(**fields, cache_salt="s", priority=4)).status_code == 200
        request = worker.submits[0].request
        expected = {**fields, "max_tokens": 5, "logprobs": 3, "logit_bias": {5: -3.0}, "stop_token_ids": (9,)}
        del expected["max_completion_tokens"], expected["top_logprobs"]
        assert {name: getattr(request.sampling, name) for name in expected} == expected
        assert (request.cache_salt, request.priority, request.num_output) == ("s", 4, 0)


async def test_internal_fields_cannot_be_set(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    async with served(tokenizer, worker) as api:
        reply = await api.chat(
            id="mine",
            num_output=3,
            tokens=[1],
            deadline_s=1e9,
            request_id="mine",
            prefill={"address": "evil:1"},
            max_tokens=1,
        )
        assert reply.status_code == 200
        submit = worker.submits[0]
        assert submit.prefill is None and submit.request.num_output == 0 and submit.request.id != "mine"
        timeout_s = RouterConfig().request_timeout_s
        assert submit.request.deadline_s is not None and timeout_s - 5 < submit.request.deadline_s <= timeout_s


async def test_plain_completions(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, " there was"))
    async with served(tokenizer, worker) as api:
        reply = await api.client.completions.create(model=MODEL, prompt="Once", echo=True, logprobs=None, n=2)
        assert [choice.text for choice in reply.choices] == ["Once there was"] * 2
        assert reply.object == "text_completion"
        by_ids = await api.client.completions.create(model=MODEL, prompt=[[5, 6], [7]], logprobs=1)
        assert [choice.index for choice in by_ids.choices] == [0, 1]
        assert by_ids.usage is not None and by_ids.usage.prompt_tokens == 3
        logprobs = by_ids.choices[0].logprobs
        assert logprobs is not None and logprobs.text_offset == [0, 6, 10]
        assert worker.submits[-1].request.sampling.max_tokens == 16
        pieces: list[str] = []
        async for chunk in await api.client.completions.create(model=MODEL, prompt="Once", echo=True, stream=True):
            pieces.append(chunk.choices[0].text)
        assert "".join(pieces) == "Once there was"


async def test_the_trace_says_who_served_and_where_time_went(tokenizer: Tokenizer) -> None:
    decode, prefill = FakeWorker(worker_id="d", role="decode"), FakeWorker(worker_id="p", role="prefill")
    async with served(tokenizer, decode, prefill) as api:
        baton = (await api.chat(max_tokens=2)).json()["baton"]
        assert (baton["served"][0]["decode_worker"], baton["served"][0]["prefill_worker"]) == ("d", "p")
        assert baton["served"][0]["times"]["handover_s"] == 0.003
        assert 0 < baton["ttft_s"] <= baton["e2e_s"]
        events = await api.events(max_tokens=2, headers={"x-baton-trace": "1"})
        last = json.loads(events[-2])
        assert last["choices"] == [] and last["baton"]["served"][0]["decode_worker"] == "d"
        assert not any("baton" in event for event in await api.events(max_tokens=2))


async def test_cached_tokens_are_reported(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        long_prompt = [{"role": "user", "content": "word " * 100}]
        first = (await api.chat(messages=long_prompt, max_tokens=1)).json()
        again = (await api.chat(messages=long_prompt, max_tokens=1)).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96


async def test_probes_models_and_version(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(max_context=2048)
    async with served(tokenizer, worker) as api:
        assert (await api.http.get("/health")).status_code == 200
        assert (await api.client.models.list()).data[0].id == MODEL
        assert (await api.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 2048
        assert (await api.http.get("/version")).json()["version"]
        await worker.kill()
        await until(lambda: not api.gateway.membership.decoders())
        health = await api.http.get("/health")  # it may be back in a moment, and requests wait for it
        assert (health.status_code, health.json()["status"]) == (200, "waiting")
        assert health.json()["reason"] == "none of the 1 known decode workers is connected"
        await api.gateway.set_workers([])
        health = await api.http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "no decode worker has registered")
        assert (await api.http.get("/live")).status_code == 200


async def test_metrics_count_what_happened(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "Hello"))) as api:
        await api.chat()
        await api.events(n=2)
        await api.chat(temperature=-1)
        text = (await api.http.get("/metrics")).text
        for line in (
            'baton_gateway_requests_total{endpoint="chat",status="200"} 2.0',
            'baton_gateway_requests_total{endpoint="chat",status="400"} 1.0',
            'baton_gateway_choices_total{finish="stop"} 3.0',
            'baton_gateway_refusals_total{reason="invalid_value"} 1.0',
            "baton_gateway_ttft_seconds_count 2.0",
            'baton_gateway_phase_seconds_count{phase="prefill"} 3.0',
            'baton_gateway_workers{role="decode"} 1.0',
            "baton_gateway_running_requests 0.0",
        ):
            assert line in text


async def test_a_gateway_starts_from_a_model_file_and_stops(smollm_path: Path) -> None:
    gateway = Gateway(RouterConfig(host="0.0.0.0", advertise_host="localhost"), smollm_path, MODEL)
    url = await gateway.start()
    async with httpx.AsyncClient() as http:
        assert url.startswith("http://localhost:")
        assert (await http.get(f"{url}/live")).status_code == 200
        await gateway.stop()
        await gateway.stop()
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/live")
