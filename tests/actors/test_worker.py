"""Workers over real gRPC with a fake device: what clients get, and that every end frees everything."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from fake_engine import build_fake_engine
from worker_client import Client, settled

from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Cancel, Output, PeerAddress, Role, Submit, WorkerInfo
from baton.actors.worker import Worker
from baton.transfer.config import MoverKind, TransferConfig
from baton.transfer.local_mover import LocalFabric
from baton.transfer.mover import Arrival
from baton.transfer.verified_mover import _decode as decode_proof
from tests.fakes import fake_output

IDS = itertools.count()


def worker_config(mover: MoverKind = "nixl", *, verify: bool = False, **engine: object) -> WorkerConfig:
    settings = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_step_tokens": 16, "max_prefill_chunk": 8}
    return WorkerConfig(
        model="fake",
        served_name="fake",
        engine=EngineConfig.model_validate({**settings, **engine}),
        transfer=TransferConfig(mover=mover, verify=verify, beat_s=0.2, lease_s=2.0, stall_s=2.0, hold_s=2.0),
    )


@asynccontextmanager
async def running(
    role: Role, worker_id: str, mover: MoverKind = "nixl", *, verify: bool = False, **engine: object
) -> AsyncIterator[tuple[Worker, WorkerInfo]]:
    config = worker_config(mover, verify=verify, **engine)
    worker = Worker(worker_id=worker_id, role=role, config=config, build=build_fake_engine)
    info = await worker.start()
    try:
        yield worker, info
    finally:
        await worker.stop()


def request(num_prompt: int, max_tokens: int, seed: int = 1) -> Request:
    return Request(
        id=f"r{next(IDS)}",
        tokens=tuple(1 + (seed * 7 + i * i) % 40 for i in range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True),
    )


def text(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


async def test_a_worker_alone_generates_and_frees_everything() -> None:
    async with running("both", "w0") as (worker, info), Client(info.peer.address) as client:
        asked = request(21, 9)
        outputs = await client.finish(asked)
        assert text(outputs) == fake_output(asked, 9)
        assert outputs[-1].finish == "length"
        assert outputs[-1].served is not None and outputs[-1].served.prefill_worker == "w0"
        await settled(worker)


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9, 33, 100])
async def test_a_prompt_prefilled_by_a_peer_gives_the_same_tokens(num_prompt: int) -> None:
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, d_info):
        async with Client(d_info.peer.address) as client:
            asked = request(num_prompt, 12)
            outputs = await client.finish(asked, p_info.peer)
        assert text(outputs) == fake_output(asked, 12)
        served = outputs[-1].served
        assert served is not None
        expected = -(-num_prompt // 4) if num_prompt > 4 else 0
        assert served.blocks_moved == expected
        assert served.bytes_moved == expected * 4 * 8
        assert served.prefill_worker == ("p0" if expected else "d0")
        await settled(p)
        await settled(d)


async def test_the_second_turn_moves_only_what_decode_lacks() -> None:
    async with (
        running("prefill", "p0") as (_, p_info),
        running("decode", "d0") as (_, d_info),
        Client(d_info.peer.address) as client,
    ):
        first = request(32, 8)
        answer = text(await client.finish(first, p_info.peer))
        tokens = (*first.tokens, *answer, *range(1, 30))
        second = Request(id=f"r{next(IDS)}", tokens=tokens, sampling=first.sampling)
        outputs = await client.finish(second, p_info.peer)
    assert text(outputs) == fake_output(second, 8)
    served = outputs[-1].served
    assert served is not None
    num_blocks = -(-len(second.tokens) // 4)
    assert served.blocks_moved == num_blocks - 39 // 4  # the last token's KV was never computed


@pytest.mark.parametrize("mover", ["nixl", "nccl"])
async def test_many_requests_at_once_through_a_small_pool_all_come_out_right(mover: MoverKind) -> None:
    async with (
        running("prefill", "p0", mover, num_blocks=40) as (p, p_info),
        running("decode", "d0", mover, num_blocks=40) as (d, d_info),
        Client(d_info.peer.address) as client,
    ):
        asked = [request(10 + 7 * i, 15, seed=i) for i in range(12)]
        for one in asked:
            client.send(Submit(one, p_info.peer))
        got: dict[str, list[Output]] = {one.id: [] for one in asked}
        async for output in client.outputs():
            got[output.request_id].append(output)
            if all(outputs and outputs[-1].finish for outputs in got.values()):
                break
        for one in asked:
            assert text(got[one.id]) == fake_output(one, 15)
        await settled(p)
        await settled(d)


@pytest.mark.parametrize("mover", ["nixl", "nccl"])
async def test_cancelling_at_any_moment_frees_both_workers(mover: MoverKind) -> None:
    async with (
        running("prefill", "p0", mover, num_blocks=48) as (p, p_info),
        running("decode", "d0", mover, num_blocks=48) as (d, d_info),
        Client(d_info.peer.address) as client,
    ):
        for i in range(40):
            asked = request(60, 40, seed=i)
            client.send(Submit(asked, p_info.peer))
            await asyncio.sleep(0.0007 * i)
            client.send(Cancel(asked.id))
        asked = request(60, 5, seed=99)
        assert text(await client.finish(asked, p_info.peer)) == fake_output(asked, 5)
        await settled(p)
        await settled(d)


async def test_a_gateway_that_vanishes_leaves_nothing_behind() -> None:
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, d_info):
        async with Client(d_info.peer.address) as client:
            for i in range(6):
                client.send(Submit(request(50, 500, seed=i), p_info.peer))
            async for output in client.outputs():
                if output.tokens:
                    break
        await settled(d)
        await settled(p)


async def test_an_unreachable_prefill_worker_makes_decode_prefill_itself() -> None:
    gone = PeerAddress("p9", "127.0.0.1:1", "never-lived")
    async with running("decode", "d0") as (d, info), Client(info.peer.address) as client:
        asked = request(30, 6)
        outputs = await client.finish(asked, gone)
        assert text(outputs) == fake_output(asked, 6)
        assert outputs[-1].served is not None and outputs[-1].served.prefill_worker == "d0"
        await settled(d)


async def test_peers_with_different_block_sizes_refuse_each_other_and_decode_goes_on_alone() -> None:
    async with running("prefill", "p0", block_size=8) as (_, p_info), running("decode", "d0") as (d, d_info):
        async with Client(d_info.peer.address) as client:
            asked = request(30, 6)
            assert text(await client.finish(asked, p_info.peer)) == fake_output(asked, 6)
        await settled(d)


async def test_a_draining_worker_refuses_new_work_and_ends_the_old() -> None:
    async with running("both", "w0") as (worker, info), Client(info.peer.address) as client:
        old = request(8, 30)
        client.send(Submit(old))
        async for output in client.outputs():
            if output.tokens:
                break
        draining = asyncio.create_task(worker.drain(60))
        await asyncio.sleep(0)
        refused = await client.finish(request(8, 3))
        assert refused[-1].finish == "cancelled"
        async with asyncio.timeout(5):
            await draining


async def test_local_movers_carry_hand_overs_inside_one_process() -> None:
    fabric = LocalFabric()
    config = worker_config()
    config = config.model_copy(update={"transfer": TransferConfig(mover="local", beat_s=0.2, lease_s=2, stall_s=2)})
    p = Worker(worker_id="p0", role="prefill", config=config, build=build_fake_engine, fabric=fabric)
    d = Worker(worker_id="d0", role="decode", config=config, build=build_fake_engine, fabric=fabric)
    p_info, d_info = await p.start(), await d.start()
    try:
        async with Client(d_info.peer.address) as client:
            asked = request(50, 6)
            outputs = await client.finish(asked, p_info.peer)
        assert text(outputs) == fake_output(asked, 6)
        assert outputs[-1].served is not None and outputs[-1].served.mover == "local"
    finally:
        await d.stop()
        await p.stop()


async def test_kv_that_arrives_spoilt_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    """Each block changes between its fingerprint and its arrival; the request is prefilled where it decodes."""
    async with (
        running("prefill", "p0", verify=True) as (p, p_info),
        running("decode", "d0", verify=True) as (d, d_info),
        Client(d_info.peer.address) as client,
    ):
        sound = request(33, 8)
        outputs = await client.finish(sound, p_info.peer)
        assert text(outputs) == fake_output(sound, 8)
        assert outputs[-1].served is not None and outputs[-1].served.prefill_worker == "p0"
        assert outputs[-1].served.mover == "nixl+verify"
        spoil(d)
        spoilt = request(41, 8, seed=2)
        outputs = await client.finish(spoilt, p_info.peer)
        assert text(outputs) == fake_output(spoilt, 8)
        assert outputs[-1].served is not None and outputs[-1].served.prefill_worker == "d0"
        await settled(p)
        await settled(d)
    assert "do not hold what" in caplog.text


def spoil(worker: Worker) -> None:
    """Let what arrives at this worker from now on have one bit that was not sent."""
    mover = worker._mover._mover._mover  # type: ignore[attr-defined]
    check = mover._checked

    def spoilt(arrival: Arrival) -> Arrival:
        target = np.frombuffer(decode_proof(arrival.tag).target, np.int64)
        mover._rows[target[0], 3] ^= 1
        return check(arrival)

    mover._checked = spoilt


async def test_workers_of_which_only_one_verifies_refuse_each_other(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running("prefill", "p0", verify=True) as (_, p_info),
        running("decode", "d0") as (_, d_info),
        Client(d_info.peer.address) as client,
    ):
        asked = request(33, 8)
        assert text(await client.finish(asked, p_info.peer)) == fake_output(asked, 8)
    assert "mover is 'nixl+verify' here but 'nixl' at peer" in caplog.text


async def test_any_worker_that_has_a_prefix_can_push_it_to_one_that_lacks_it() -> None:
    """Prefix reuse between peers needs no mode of its own: the one that has it prefills the rest."""
    async with (
        running("decode", "d0") as (_, had),
        running("decode", "d1") as (d1, lacks),
        Client(had.peer.address) as one,
        Client(lacks.peer.address) as other,
    ):
        first = request(80, 8)
        answer = text(await one.finish(first))
        second = Request(id=f"r{next(IDS)}", tokens=(*first.tokens, *answer, 5, 6), sampling=first.sampling)
        outputs = await other.finish(second, had.peer)
        await settled(d1)
    assert text(outputs) == fake_output(second, 8)
    served = outputs[-1].served
    assert served is not None and served.prefill_worker == "d0"
    assert outputs[0].cached_tokens == 84 and served.blocks_moved == -(-len(second.tokens) // 4)
