"""20 prompts with transformers' greedy tokens, and two real workers to ask them of: SmolLM2, NIXL between the two."""

from __future__ import annotations

import heapq
import inspect
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoTokenizer
from worker_client import Client, settled

from baton.actors.build import BuiltEngine, join_engine, weights_version
from baton.actors.config import WorkerConfig
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.models.model import Model
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.weights import Placement
from baton.actors.messages import PeerAddress, Submit
from baton.actors.worker import Worker
from baton.transfer.config import TransferConfig
from tests.actors.engine.model_cases import smollm2_path, smollm2_reference

MAX_CONTEXT = 3200
IDS = itertools.count()
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
CODE = inspect.getsource(heapq)
CHATS = [
    ["What is the capital of France?"],
    ["Hello! Who are you?", "I am a small assistant.", "Can you count from one to ten?"],
    ["Write a haiku about the sea.", "Waves fold into foam", "Another one, about a mountain.", "Stone", "And rain?"],
    ["Café déjà vu — 123 😊: translate to English."],
]
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 256, 257, 3000)


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    output: tuple[int, ...]  # transformers'


@cache
def cases() -> tuple[Case, ...]:
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [_chat(tokenizer, turns) for turns in CHATS]
    prompts.append(tuple(tokenizer.encode(CODE)[:120]))
    words = tokenizer.encode(TEXT + TEXT)
    prompts += [tuple(words[length : 2 * length]) for length in LENGTHS[:-1]]
    prompts.append(tuple(words[: LENGTHS[-1]]))
    return tuple(Case(prompt, _reference(prompt, 8 if len(prompt) < 130 else 4)) for prompt in prompts)


def _chat(tokenizer: AutoTokenizer, turns: list[str]) -> tuple[int, ...]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _reference(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    with torch.inference_mode():
        tokens = smollm2_reference().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
    return tuple(tokens[0, len(prompt) :].tolist())


@cache
def model(block_size: int) -> Model:
    return build_model(open_checkpoint(smollm2_path()), Placement(), block_size=block_size, max_context=MAX_CONTEXT)


def build(config: WorkerConfig) -> BuiltEngine:
    return join_engine(config, model(config.engine.block_size), Placement(), weights_version(smollm2_path()))


@asynccontextmanager
async def pair(
    chunk: int, num_tokens: int, block_sizes: tuple[int, int] = (16, 16)
) -> AsyncIterator[tuple[Worker, Worker]]:
    configs = [_config(chunk, num_tokens, block_size) for block_size in block_sizes]
    workers = [
        Worker(worker_id=name, role="both", config=config, build=build)
        for name, config in zip(("p", "d"), configs, strict=True)
    ]
    for worker in workers:
        await worker.start()
    try:
        yield workers[0], workers[1]
    finally:
        for worker in reversed(workers):
            await worker.stop()


def _config(chunk: int, num_tokens: int, block_size: int) -> WorkerConfig:
    engine = EngineConfig(
        block_size=block_size,
        num_blocks=num_tokens // block_size,
        max_num_seqs=8,
        max_step_tokens=max(chunk, 8) + 8,
        max_prefill_chunk=chunk,
        max_context=MAX_CONTEXT,
    )
    return WorkerConfig(
        model="shared",
        served_name="smollm2",
        engine=engine,
        transfer=TransferConfig(mover="nixl", stall_s=60, lease_s=60),
    )


def request(case: Case, salt: str) -> Request:
    sampling = SamplingParams(max_tokens=len(case.output), seed=0, temperature=0.0)
    return Request(id=str(next(IDS)), tokens=case.prompt, sampling=sampling, cache_salt=salt)


async def check_alone(client: Client, peer: PeerAddress | None, salt: str) -> int:
    """Ask one by one; return how many prompt tokens came from a cache."""
    cached = 0
    for case in cases():
        outputs = await client.finish(request(case, salt), peer)
        cached += outputs[0].cached_tokens or 0
        assert tuple(token for output in outputs for token in output.tokens) == case.output, len(case.prompt)
    return cached


async def check_together(client: Client, peer: PeerAddress | None, salt: str, which: tuple[Case, ...]) -> None:
    """Ask all at once; eight run at a time."""
    asked = {(one := request(case, salt)).id: (one, case) for case in which}
    got: dict[str, list[int]] = {id: [] for id in asked}
    for one, _ in asked.values():
        client.send(Submit(one, peer))
    left = set(asked)
    async for output in client.outputs():
        got[output.request_id] += output.tokens
        if output.finish is not None:
            left.discard(output.request_id)
        if not left:
            break
    for id, (_, case) in asked.items():
        assert tuple(got[id]) == case.output, len(case.prompt)


async def check_cold_and_warm(chunk: int, *, handed_over: bool) -> None:
    """Compare all prompts with a cold and a warm cache, alone and among 7 neighbours; both workers end up empty."""
    async with pair(chunk, num_tokens=12_800) as (p, d):
        peer = p.info().peer if handed_over else None
        async with Client(d.info().peer.address) as client:
            cold = await check_alone(client, peer, "alone")
            warm = await check_alone(client, peer, "alone")
            assert warm > cold
            await check_together(client, peer, "together", cases())
            await check_together(client, peer, "together", cases())
        await settled(p)
        await settled(d)


async def check_preempted(*, handed_over: bool) -> None:
    """Compare the short prompts where eight sequences of up to 6 blocks have 20."""
    short = tuple(case for case in cases() if len(case.prompt) < 60)
    async with pair(16, num_tokens=MAX_CONTEXT // 10) as (p, d):
        peer = p.info().peer if handed_over else None
        async with Client(d.info().peer.address) as client:
            await check_together(client, peer, "", short)
        await settled(p)
        await settled(d)
