"""The process that tries grammars out: what it refuses, what it survives, and that it comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.vocabulary import load_vocabulary
from baton.actors.grammar_process import CompileLimits, CompilerSeat
from baton.actors.grammars import CompilerLost, GrammarRefused, NoGrammars, WorkerGrammars
from tests.actors.engine.model_cases import smollm2_path

EOS, VOCAB = (2,), 49152


def tag(**format: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


def make(limits: CompileLimits) -> WorkerGrammars:
    store = GrammarStore(lambda: load_vocabulary(smollm2_path(), EOS), VOCAB)
    return WorkerGrammars(store, lambda: CompilerSeat(smollm2_path(), EOS, VOCAB, limits))


@pytest.mark.slow
async def test_a_broken_or_boundless_grammar_costs_nobody_else_anything() -> None:
    grammars = make(CompileLimits(seconds=2, num_bytes=32 << 20))
    good = tag(type="regex", pattern="[0-9]+")
    words = [f'"{i}" [a-z]{{1,900}}' for i in range(20_000)]
    boundless = f"root ::= {' | '.join(words)}"
    slow = asyncio.create_task(grammars.compiled(tag(type="grammar", grammar=boundless)))
    first, second = await asyncio.gather(grammars.compiled(good), grammars.compiled(good))
    assert first is second is not None
    for bad, reason in (
        ("{", "JSON"),
        (tag(type="regex", pattern="[a-"), "Unclosed"),
        (tag(type="grammar", grammar="root ::= nothing"), "nothing"),
        (tag(type="json_schema", json_schema={"type": "string", "pattern": "a", "minLength": 2}), "minLength"),
    ):
        with pytest.raises(GrammarRefused, match=reason):
            await grammars.compiled(bad)
    with pytest.raises(GrammarRefused, match="needs more than 2 s or 32 MiB"):
        await slow
    assert await grammars.compiled(good) is first
    await grammars.close()


@pytest.mark.slow
async def test_a_lost_process_fails_what_it_had_and_is_started_anew() -> None:
    grammars = make(CompileLimits(seconds=5, num_bytes=256 << 20))
    asked = asyncio.create_task(grammars.compiled(tag(type="regex", pattern="a")))
    await asyncio.sleep(0)
    while grammars._process is None:
        await asyncio.sleep(0.01)
    pid = grammars._process._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CompilerLost):
        await asked
    assert await grammars.compiled(tag(type="regex", pattern="b")) is not None
    await grammars.close()


async def test_a_worker_without_a_vocabulary_says_so() -> None:
    with pytest.raises(GrammarRefused):
        await NoGrammars().compiled("{}")
