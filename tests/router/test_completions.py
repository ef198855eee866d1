"""Echo and the log-probabilities of prompts, as evaluation harnesses ask for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_workers import FakeWorker
from test_gateway import telling

from baton.actors.engine.request import PromptParams
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served


@pytest.mark.parametrize("prompt", ["Once upon é👋", [504, 3575, 282]])
async def test_echo_with_logprobs_tells_every_token_and_where_it_stands(tokenizer: Tokenizer, prompt: Any) -> None:
    worker = FakeWorker(telling(tokenizer, " there was"))
    async with served(tokenizer, worker) as api:
        reply = (await api.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=1)).json()
        (choice,) = reply["choices"]
        ids = tokenizer.encode_prompt_now(prompt) if isinstance(prompt, str) else tuple(prompt)
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
        output = tokenizer.encode_prompt_now(" there was")[:1]
        logprobs = choice["logprobs"]
        assert choice["text"] == text + " there" and choice["finish_reason"] == "length"
        assert logprobs["token_logprobs"] == [None, *(-id / 1000 for id in (*ids, *output)[1:])]
        assert logprobs["top_logprobs"][0] is None
        assert all(max(top.values()) == chosen for top, chosen in
                   list(zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True))[1:])  # fmt: skip
        assert logprobs["text_offset"][-1] == len(text)
        spelled = b"".join(
            bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
            if token.startswith("bytes:")
            else token.encode()
            for token in logprobs["tokens"]
        )
        assert spelled.decode() == text + " there"
        assert reply["usage"]["prompt_tokens"] == len(ids) and reply["usage"]["completion_tokens"] == 1
        assert worker.submits[0].request.prompt == PromptParams(logprobs=2)


async def test_a_prompt_alone_may_be_scored(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, " there"))) as api:
        reply = (await api.complete(prompt=["Once", "a b c"], echo=True, logprobs=0, max_tokens=0)).json()
        assert [choice["text"] for choice in reply["choices"]] == ["Once", "a b c"]
        assert [len(choice["logprobs"]["tokens"]) for choice in reply["choices"]] == [1, 3]
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        assert reply["usage"]["completion_tokens"] == 0 and api.is_idle()


async def test_streamed_echo_is_the_same_text_and_scores(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, " there was"))) as api:
        fields: dict[str, Any] = {"prompt": "Once", "echo": True, "logprobs": 1, "max_tokens": 4, "n": 2}
        whole = (await api.complete(**fields)).json()["choices"]
        chunks = [json.loads(event)["choices"][0] for event in (await api.events("/v1/completions", **fields))[:-1]]
        for index in (0, 1):
            own = [chunk for chunk in chunks if chunk["index"] == index]
            assert "".join(chunk["text"] for chunk in own) == whole[index]["text"]
            tokens = [token for chunk in own if chunk["logprobs"] for token in chunk["logprobs"]["tokens"]]
            assert tokens == whole[index]["logprobs"]["tokens"]


async def test_control_tokens_in_an_echoed_prompt_have_a_place_in_its_text(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(telling(tokenizer, "x"))) as api:
        prompt = "<|im_start|>user\nhi"
        logprobs = (await api.complete(prompt=prompt, echo=True, logprobs=0)).json()["choices"][0]["logprobs"]
        for token, offset in zip(logprobs["tokens"][:-2], logprobs["text_offset"], strict=False):
            assert prompt[offset : offset + len(token)] == token


async def test_a_prompt_that_is_asked_about_is_computed_where_it_is_decoded(tokenizer: Tokenizer) -> None:
    decode, prefill = FakeWorker(worker_id="d", role="decode"), FakeWorker(worker_id="p", role="prefill")
    async with served(tokenizer, decode, prefill) as api:
        await api.complete(prompt="Once", max_tokens=1)
        await api.complete(prompt="Once", echo=True, logprobs=0, max_tokens=1)
        assert [submit.prefill is None for submit in decode.submits] == [False, True]


async def test_echo_alone_asks_the_worker_nothing_about_the_prompt(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(telling(tokenizer, " there"))
    async with served(tokenizer, worker) as api:
        assert (await api.complete(prompt="Once", echo=True)).json()["choices"][0]["text"] == "Once there"
        assert worker.submits[0].request.prompt is None


async def test_embeddings_are_of_unit_length_in_the_inputs_order(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    async with served(tokenizer, worker) as api:
        inputs: Any = [[3, 4, 0], [0, 0, 7]]
        floats = await api.client.embeddings.create(model=MODEL, input=inputs, encoding_format="float")
        packed = await api.client.embeddings.create(model=MODEL, input=inputs)  # base64, by the client's own choice
        for reply in (floats, packed):
            assert [entry.embedding for entry in reply.data] == [pytest.approx([0.6, 0.8, 0]), [0, 0, 1]]
            assert [entry.index for entry in reply.data] == [0, 1]
            assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (6, 6)
        assert worker.submits[0].request.prompt == PromptParams(pooling="last")
        body = {"model": MODEL, "input": "hi there you", "pooling": "mean"}
        assert (await api.http.post("/v1/embeddings", json=body)).status_code == 200
        assert worker.submits[-1].request.prompt == PromptParams(pooling="mean")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 8}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"input": ""}, "input"),
        ({"input": [99999]}, "input"),
        ({"pooling": "max"}, "pooling"),
        ({"priority": 2**40}, "priority"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_a_bad_embedding_request_is_refused_by_name(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        reply = await api.http.post("/v1/embeddings", json={"model": MODEL, "input": "a", **fields})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_text_and_tokens_map_both_ways(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker(max_context=100)) as api:

        async def post(path: str, **fields: Any) -> dict[str, Any]:
            return (await api.http.post(path, json=fields)).json()

        plain = await post("/tokenize", prompt="Hé <|im_end|>")
        assert plain == {"tokens": list(tokenizer.encode_prompt_now("Hé <|im_end|>")), "count": 4, "max_model_len": 100}
        assert (await post("/detokenize", tokens=plain["tokens"])) == {"prompt": "Hé <|im_end|>"}
        messages = [{"role": "user", "content": "hi"}]
        assert (await post("/tokenize", messages=messages))["tokens"] == list(tokenizer.encode_chat_now(messages))
        for path, fields, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
            ("/detokenize", {"tokens": [49152]}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ):
            assert (await post(path, **fields))["error"]["param"] == param
