"""Real workers with SmolLM2 and grammars: outputs match, wherever they are computed and however they are moved."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest
from worker_client import Client, settled

from baton.actors.build import join_engine, weights_version
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.vocabulary import load_vocabulary
from baton.actors.engine.weights import Placement
from baton.actors.messages import Output, PeerAddress, Submit
from baton.actors.worker import Worker
from tests.actors.engine.model_cases import smollm2, smollm2_path

IDS = itertools.count()
vocabulary = cache(lambda: load_vocabulary(smollm2_path(), (2,)))
PROMPT = tuple(range(100, 140))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["开心", "难过", 'a"b']}, "minItems": 1, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


def tag(**format: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


JSON = tag(type="json_schema", json_schema=SCHEMA, max_whitespace_cnt=1)


def ask(grammar: str, *, seed: int = 0, max_tokens: int = 100, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=1.0)
    return Request(**{"id": str(next(IDS)), "tokens": PROMPT, "sampling": sampling, "grammar": grammar} | fields)


@asynccontextmanager
async def workers(*names: str, num_blocks: int = 200) -> AsyncIterator[list[Worker]]:
    engine = EngineConfig(num_blocks=num_blocks, max_num_seqs=8, max_context=1024)
    config = WorkerConfig(model=str(smollm2_path()), served_name="smollm2", engine=engine)
    version = weights_version(smollm2_path())
    made = [
        Worker(
            worker_id=name,
            role="both",
            config=config,
            build=lambda config: join_engine(config, smollm2(), Placement(), version),
        )
        for name in names
    ]
    for worker in made:
        await worker.start()
    try:
        yield made
    finally:
        for worker in made:
            await worker.stop()


def text_of(outputs: list[Output]) -> str:
    pieces = vocabulary().token_bytes
    return b"".join(pieces[token] for output in outputs for token in output.tokens).decode()


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "tags", "age"] and len(value["name"]) <= 12
    assert set(value["tags"]) <= {"开心", "难过", 'a"b'} and 1 <= len(value["tags"]) <= 3
    assert 0 <= value["age"] <= 150


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_outputs_match_their_grammars_alone_together_and_handed_over() -> None:
    async with workers("p", "d") as (p, d), Client(d.info().peer.address) as client:
        alone = await client.finish(ask(JSON, seed=1), None)
        check(text_of(alone))
        handed_over = await client.finish(ask(JSON, seed=1, cache_salt="moved"), p.info().peer)
        assert handed_over[-1].served is not None and handed_over[-1].served.blocks_moved
        assert text_of(handed_over) == text_of(alone)
        number = await client.finish(ask(tag(type="regex", pattern="[0-9]{4}-[0-9]{2}")), None)
        assert re.fullmatch("[0-9]{4}-[0-9]{2}", text_of(number)) and number[-1].finish == "stop"
        free = await client.finish(ask("", max_tokens=20), None)
        together = await finish_all(
            client, p.info().peer, [*(ask(JSON, seed=i) for i in range(6)), ask("", max_tokens=20)]
        )
        for outputs in together[:6]:
            check(text_of(outputs))
        assert text_of(together[1]) == text_of(alone)
        assert text_of(together[6]) == text_of(free)  # an unconstrained neighbour is not touched
        await settled(p)
        await settled(d)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_grammar_outlives_preemption_and_migration() -> None:
    async with workers("w", num_blocks=20) as (w,), Client(w.info().peer.address) as client:
        alone = await client.finish(ask(JSON, seed=1), None)
        squeezed = await finish_all(client, None, [ask(JSON, seed=i) for i in range(6)])
        assert text_of(squeezed[1]) == text_of(alone)
        tokens = tuple(token for output in alone for token in output.tokens)
        for cut in (1, 5, len(tokens) - 1):
            rest = await client.finish(ask(JSON, seed=1, tokens=PROMPT + tokens[:cut], num_output=cut), None)
            assert tuple(token for output in rest for token in output.tokens) == tokens[cut:]
        await settled(w)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_cannot_be_compiled_is_refused_and_the_worker_goes_on() -> None:
    async with workers("w") as (w,), Client(w.info().peer.address) as client:
        for bad in ("{", tag(type="regex", pattern="[a-"), tag(type="json_schema", json_schema={"enum": []})):
            (refusal,) = await client.finish(ask(bad), None)
            assert refusal.finish == "error" and refusal.is_refusal and refusal.error
        endless = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}
        outputs = await client.finish(ask(tag(type="json_schema", json_schema=endless), max_tokens=2), None)
        assert outputs[-1].finish in ("error", "length")
        assert (await client.finish(ask("", max_tokens=2), None))[-1].finish == "length"
        await settled(w)


async def finish_all(client: Client, peer: PeerAddress | None, requests: list[Request]) -> list[list[Output]]:
    got: dict[str, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        client.send(Submit(request, peer))
    left = set(got)
    async for output in client.outputs():
        got[output.request_id].append(output)
        if output.finish is not None:
            left.discard(output.request_id)
        if not left:
            break
    return list(got.values())
