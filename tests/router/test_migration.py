"""A decode worker dies in the middle of an answer: the text is that of an undisturbed run, on real engines.

The router and the workers are the real ones; the device is a fake whose tokens depend on all tokens before them and
on the seed, and in one test SmolLM2.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from baton.actors.build import BuiltEngine, join_engine, weights_version
from baton.actors.config import WorkerConfig
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.vocabulary import load_vocabulary
from baton.actors.engine.weights import Placement
from baton.actors.messages import Output, Role
from baton.actors.worker import Worker
from baton.router.errors import WorkerLost
from tests.actors.engine.model_cases import smollm2_path
from tests.actors.fake_engine import build_fake_engine
from tests.router.rig import Rig, rig, tokens_of, until

NUM_TOKENS, NUM_BEFORE = 64, 20
IDS = itertools.count()
SCHEMA = {"type": "array", "items": {"enum": [101_011, 20_202, 3_030_303]}, "minItems": 4, "maxItems": 4}
NUMBERS = json.dumps(
    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 1}}
)

Build = Callable[[WorkerConfig], BuiltEngine]
build_slowly = partial(build_fake_engine, step_s=0.003)  # slow enough to be killed in the middle


class Crashing(Worker):
    async def crash(self) -> None:
        """Cut every connection, as the death of the process does."""
        await self._server.stop(grace=None)


@asynccontextmanager
async def served_by(
    *roles: Role, build: Build = build_slowly, model: str = "m"
) -> AsyncGenerator[tuple[Rig, list[Crashing]], None]:
    engine = {"num_blocks": 128, "block_size": 16, "max_num_seqs": 8, "max_step_tokens": 64, "max_prefill_chunk": 64}
    config = WorkerConfig.model_validate(
        {"model": model, "served_name": "m", "engine": engine, "transfer": {"stall_s": 60}}
    )
    workers = [Crashing(worker_id=f"w{i}", role=role, config=config, build=build) for i, role in enumerate(roles)]
    infos = [await worker.start() for worker in workers]
    try:
        async with rig(timeout_s=100) as router:
            await router.membership.set_workers(infos)
            await until(lambda: len(router.streams()) == len(workers))
            yield router, workers
    finally:
        for worker in workers:
            await worker.stop()


def choices(**sampling: Any) -> list[Request]:
    """Return two sequences of one prompt, as n = 2 asks for."""
    number = next(IDS)
    return [
        Request(
            id=f"{number}-{i}",
            tokens=tuple(1 + (7 * j) % 40 for j in range(37)),
            sampling=SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": 5 + i, "ignore_eos": True, **sampling}),
        )
        for i in range(2)
    ]


async def disturbed(router: Rig, workers: list[Crashing], requests: list[Request]) -> list[list[Output]]:
    """Run all at once; whoever decodes the first crashes when that has `NUM_BEFORE` tokens."""
    given: list[list[Output]] = [[] for _ in requests]

    async def follow(request: Request, outputs: list[Output]) -> None:
        async for output in router.generate(request):
            outputs.append(output)

    tasks = [asyncio.create_task(follow(*pair)) for pair in zip(requests, given, strict=True)]
    await until(lambda: len(tokens_of(given[0])) >= NUM_BEFORE)
    assert len(tokens_of(given[0])) < NUM_TOKENS
    victims = [stream for stream in router.membership.decoders() if stream.num_own_requests]
    for victim in victims:
        await next(worker for worker in workers if worker.incarnation == victim.incarnation).crash()
        break
    await asyncio.gather(*tasks)
    return given


def check(outputs: list[Output], undisturbed: list[Output]) -> None:
    assert tokens_of(outputs) == tokens_of(undisturbed)
    assert [output.finish for output in outputs if output.finish] == ["length"]
    assert sum(output.cached_tokens is not None for output in outputs) == 1  # told once: usage counts it once


@pytest.mark.parametrize("roles", [("both", "both"), ("prefill", "decode", "decode")])
@pytest.mark.parametrize("seed", [5, 99])
async def test_an_answer_goes_on_elsewhere_as_if_nothing_had_happened(roles: tuple[Role, ...], seed: int) -> None:
    async with served_by(*roles) as (router, workers):
        expected = [await router.run(request) for request in choices(seed=seed)]
        for outputs, undisturbed in zip(await disturbed(router, workers, choices(seed=seed)), expected, strict=True):
            check(outputs, undisturbed)
            assert len(tokens_of(outputs)) == NUM_TOKENS
        assert 'migrations_total{reason="lost"}' in router.metrics.render().decode()
        await until(router.is_idle)


async def test_with_no_spare_worker_the_answer_ends_in_one_error() -> None:
    async with served_by("both") as (router, workers):
        with pytest.raises(WorkerLost):
            await disturbed(router, workers, choices()[:1])
        await until(router.is_idle)


@pytest.mark.slow
async def test_a_real_models_answers_go_on_as_if_nothing_had_happened() -> None:
    """Greedy and by seed with everything that depends on the tokens before, free and bound to a JSON schema."""
    model = build_model(open_checkpoint(smollm2_path()), Placement(), block_size=16, max_context=512)

    def build(config: WorkerConfig) -> BuiltEngine:
        return join_engine(config, model, Placement(), weights_version(smollm2_path()))

    def asked() -> list[Request]:
        penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        seeded = {"temperature": 0.9, "top_p": 0.95, **penalties}
        requests = [
            choices(**fields, max_tokens=44, ignore_eos=False)[i]
            for fields in ({"temperature": 0.0}, seeded)
            for i in (0, 1)
        ]
        return [
            msgspec.structs.replace(request, grammar=NUMBERS if i % 2 else "") for i, request in enumerate(requests)
        ]

    async with served_by("both", "both", build=build, model=str(smollm2_path())) as (router, workers):
        expected = await asyncio.gather(*map(router.run, asked()))
        given = await disturbed(router, workers, asked())
        assert f'migrations_total{{reason="lost"}} {len(given):.1f}' in router.metrics.render().decode()
        for outputs, undisturbed in zip(given, expected, strict=True):
            assert tokens_of(outputs) == tokens_of(undisturbed)
            assert outputs[-1].finish == undisturbed[-1].finish
        vocabulary = load_vocabulary(smollm2_path(), (2,)).token_bytes
        for outputs in given[1::2]:
            text = b"".join(vocabulary[token] for token in tokens_of(outputs) if token != 2)
            assert len(json.loads(text)) == 4
