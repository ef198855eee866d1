"""Workers whose KV blocks hold different numbers of tokens hand over all the same, and refuse what cannot be cut."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_engine import build_fake_engine
from worker_client import Client, settled

from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Submit
from baton.actors.worker import Worker
from baton.transfer.config import TransferConfig
from tests.fakes import fake_output

IDS = itertools.count()
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000)
SIZES = [(16, 32), (32, 16), (8, 64), (64, 8)]


@asynccontextmanager
async def pair(prefill_size: int, decode_size: int, num_tokens: int = 4096) -> AsyncIterator[tuple[Worker, Worker]]:
    """Chunks of 24 tokens end inside the blocks of either side; writes of 4 blocks keep staging busy."""
    workers: list[Worker] = []
    for name, size in (("p", prefill_size), ("d", decode_size)):
        engine = EngineConfig(
            block_size=size,
            num_blocks=num_tokens // size,
            max_context=1100,
            max_num_seqs=8,
            max_step_tokens=64,
            max_prefill_chunk=24,
            export_chunk=24,
            export_last_chunk=10,
        )
        transfer = TransferConfig(mover="nixl", max_write_blocks=4)
        config = WorkerConfig(model="fake", served_name="fake", engine=engine, transfer=transfer)
        workers.append(Worker(worker_id=name, role="both", config=config, build=build_fake_engine))
        await workers[-1].start()
    try:
        yield workers[0], workers[1]
    finally:
        for worker in reversed(workers):
            await worker.stop()


def request(num_prompt: int, seed: int) -> Request:
    return Request(
        id=f"r{next(IDS)}",
        tokens=tuple(1 + (seed * 7 + i * i) % 40 for i in range(num_prompt)),
        sampling=SamplingParams(max_tokens=6, seed=seed, ignore_eos=True),
    )


@pytest.mark.parametrize(("prefill_size", "decode_size"), SIZES)
async def test_every_length_gives_the_same_tokens(prefill_size: int, decode_size: int) -> None:
    async with pair(prefill_size, decode_size) as (p, d), Client(d.info().peer.address) as client:
        for seed, num_prompt in enumerate(LENGTHS):
            asked = request(num_prompt, seed)
            outputs = await client.finish(asked, p.info().peer)
            assert [token for output in outputs for token in output.tokens] == fake_output(asked, 6), num_prompt
            served = outputs[-1].served
            assert served is not None
            num_blocks = -(-num_prompt // decode_size)
            assert served.blocks_moved == (num_blocks if num_blocks > 1 else 0)
            assert served.bytes_moved == served.blocks_moved * decode_size * 8
        await settled(p)
        await settled(d)


@pytest.mark.parametrize(("prefill_size", "decode_size"), SIZES)
async def test_a_hand_over_may_begin_inside_a_block_of_the_peer(prefill_size: int, decode_size: int) -> None:
    """What decode has in its cache ends where its own blocks end."""
    async with pair(prefill_size, decode_size) as (p, d), Client(d.info().peer.address) as client:
        first = request(3 * decode_size + 1, 1)
        await client.finish(first, p.info().peer)
        second = Request(id=f"r{next(IDS)}", tokens=(*first.tokens, *range(1, 300)), sampling=first.sampling)
        outputs = await client.finish(second, p.info().peer)
    assert [token for output in outputs for token in output.tokens] == fake_output(second, 6)
    served = outputs[-1].served
    assert served is not None and served.prefill_worker == "p"
    assert served.blocks_moved == -(-len(second.tokens) // decode_size) - 3


@pytest.mark.parametrize(("prefill_size", "decode_size"), SIZES)
async def test_many_at_once_share_the_staging(prefill_size: int, decode_size: int) -> None:
    async with pair(prefill_size, decode_size) as (p, d), Client(d.info().peer.address) as client:
        asked = {(one := request(70 + 31 * seed, seed)).id: one for seed in range(10)}
        got: dict[str, list[int]] = {id: [] for id in asked}
        for one in asked.values():
            client.send(Submit(one, p.info().peer))
        left = set(asked)
        async for output in client.outputs():
            got[output.request_id] += output.tokens
            if output.finish is not None:
                left.discard(output.request_id)
                assert output.served is not None and output.served.prefill_worker == "p"
            if not left:
                break
        for id, one in asked.items():
            assert got[id] == fake_output(one, 6)
        await settled(p)
        await settled(d)


async def test_sizes_of_which_neither_divides_the_other_are_refused_with_both(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(16, 24) as (p, d), Client(d.info().peer.address) as client:
        asked = request(100, 1)
        outputs = await client.finish(asked, p.info().peer)
        assert [token for output in outputs for token in output.tokens] == fake_output(asked, 6)
        assert outputs[-1].served is not None and outputs[-1].served.prefill_worker == "d"
    assert "block_size: ours is" in caplog.text and "24" in caplog.text and "16" in caplog.text
