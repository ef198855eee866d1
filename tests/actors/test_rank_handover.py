"""Workers of different tensor-parallel degrees and block sizes hand over; the answers are those of one whole worker."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from worker_client import Client, settled

from baton.actors.build import build_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Output, Role, Submit
from baton.actors.worker import Worker
from baton.transfer.config import TransferConfig

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 1000)
NUM_TOKENS = 4096
IDS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights so large that every position of the context matters for the next token."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def worker_config(model: Path, role: Role, tensor_parallel: int, block_size: int, device: str = "cpu") -> WorkerConfig:
    """Chunks of 24 tokens end inside the blocks of either side; writes of 4 blocks keep staging busy."""
    return WorkerConfig(
        model=str(model),
        served_name="tiny",
        device=device,
        dtype="float32",
        num_threads=1,
        tensor_parallel=tensor_parallel,
        engine=EngineConfig(
            block_size=block_size,
            num_blocks=NUM_TOKENS // block_size,
            max_context=1100,
            max_num_seqs=8,
            max_step_tokens=256,
            max_prefill_chunk=24 if role == "prefill" else 256,
        ),
        transfer=TransferConfig(mover="nixl", max_write_blocks=4, stall_s=60, lease_s=60),
    )


@asynccontextmanager
async def running(model: Path, role: Role, tensor_parallel: int, block_size: int, device: str) -> AsyncIterator[Worker]:
    config = worker_config(model, role, tensor_parallel, block_size, device)
    worker = Worker(worker_id=role, role=role, config=config)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


def request(num_prompt: int, temperature: float) -> Request:
    return Request(
        id=f"r{next(IDS)}",
        tokens=tuple((num_prompt + 7 * i * i) % 97 for i in range(num_prompt)),
        sampling=SamplingParams(max_tokens=12, seed=num_prompt, temperature=temperature, ignore_eos=True, logprobs=1),
    )


def text(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.tokens)


@pytest.fixture(scope="module")
def monolithic(model: Path) -> dict[int, tuple[int, ...]]:
    engine = build_engine(worker_config(model, "both", 1, 16)).engine
    answers: dict[int, tuple[int, ...]] = {}
    for length in LENGTHS:
        engine.submit(request(length, 0.0))
        answers[length] = ()
        while engine.has_work:
            for update in engine.step():
                answers[length] += update.tokens
    return answers


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((1, 16), (2, 32)), ((2, 32), (1, 16))],
    ids=["TP 1 to 2, blocks of 16 to 32", "TP 2 to 1, blocks of 32 to 16"],
)
async def test_the_same_tokens_as_from_one_worker(
    model: Path, monolithic: dict[int, tuple[int, ...]], prefill: tuple[int, int], decode: tuple[int, int], device: str
) -> None:
    async with (
        running(model, "prefill", *prefill, device) as p,
        running(model, "decode", *decode, device) as d,
        Client(d.info().peer.address) as client,
    ):
        for length in LENGTHS:
            outputs = await client.finish(request(length, 0.0), p.info().peer)
            assert text(outputs) == monolithic[length], length
            served = outputs[-1].served
            assert served is not None
            num_blocks = -(-length // decode[1])
            moved = num_blocks if num_blocks > 1 else 0
            assert served.blocks_moved == moved, "the last block alone is not worth a hand-over"
            assert served.bytes_moved == moved * decode[1] * 3 * 2 * 4 * 16 * 4
        assert len(set(itertools.chain(*monolithic.values()))) > 20, "the model says always the same"
        await cancels_leave_nothing(client, p, d)


async def cancels_leave_nothing(client: Client, p: Worker, d: Worker) -> None:
    for number in range(6):
        asked = request(300 + number, 1.0)
        client.send(Submit(asked, p.info().peer))
        outputs = client.outputs()
        if number % 2:
            await anext(output async for output in outputs if output.request_id == asked.id)
        d.cancel(asked.id)
    await settled(p)
    await settled(d)
