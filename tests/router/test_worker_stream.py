from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest
from fake_workers import FakeWorker

from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Load, Output, PeerAddress, Submit, WorkerInfo
from baton.router.prefix_index import PrefixIndex
from baton.router.routing import Charge, Leg, Route
from baton.router.worker_stream import Mailbox, Reconnect, StreamLost, WorkerStream
from tests.router.rig import until

FAST = Reconnect(first_s=0.01, max_s=0.05)


def request(id: str, max_tokens: int = 3) -> Submit:
    return Submit(Request(id=id, tokens=tuple(range(40)), sampling=SamplingParams(max_tokens=max_tokens, seed=1)))


@asynccontextmanager
async def connected(worker: FakeWorker) -> AsyncGenerator[tuple[WorkerStream, PrefixIndex], None]:
    index = PrefixIndex()
    stream = WorkerStream(await worker.start(), index, FAST)
    stream.start()
    try:
        async with asyncio.timeout(10):
            await stream.wait_usable()
            yield stream, index
    finally:
        await stream.close()
        await worker.kill()


async def collect(mailbox: Mailbox) -> list[Output]:
    outputs: list[Output] = []
    while not outputs or outputs[-1].finish is None:
        item = await mailbox.get()
        if isinstance(item, Exception):
            raise item
        outputs.append(item)
    return outputs


async def test_each_request_gets_its_own_outputs() -> None:
    async with connected(FakeWorker(lambda r: [(int(r.id),)] * 3)) as (stream, _):
        mailboxes = {i: stream.submit(request(str(i))) for i in range(100, 120)}
        for i, mailbox in mailboxes.items():
            assert [output.tokens for output in await collect(mailbox)] == [(i,)] * 3
        await stream.wait_idle()


async def test_a_first_token_is_handed_out_before_what_others_wait_for() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with connected(worker) as (stream, _), asyncio.TaskGroup() as tasks:
        order: list[str] = []

        async def listen(id: str) -> None:
            mailbox = stream.submit(request(id))
            finish = None
            while finish is None:
                output = await mailbox.get()
                assert isinstance(output, Output)
                order.append(id)
                finish = output.finish

        tasks.create_task(listen("old"))
        await until(lambda: worker.num_running == 1)
        worker.allow(1)
        await until(lambda: order == ["old"])
        tasks.create_task(listen("new"))
        await until(lambda: worker.num_running == 2)
        worker.allow(1)
        await until(lambda: len(order) == 3)
        assert order == ["old", "new", "old"]
        worker.num_steps_allowed = None
        worker.wake()


async def test_closing_ends_whatever_an_attempt_to_connect_is_doing() -> None:
    """gRPC swallows a cancellation that meets the refusal of a connection: closings all around that moment."""
    worker = FakeWorker()
    info = await worker.start()
    await worker.kill()
    now = asyncio.get_running_loop().time
    delay_s = 0.003
    async with asyncio.timeout(30):
        for _ in range(300):
            has_failed = asyncio.Event()
            stream = WorkerStream(info, PrefixIndex(), FAST, lambda _, event=has_failed: event.set())
            stream.start()
            close_at = now() + delay_s
            while now() < close_at and not has_failed.is_set():
                await asyncio.sleep(0)
            delay_s *= 0.98 if has_failed.is_set() else 1.01
            await stream.close()


async def test_ending_a_request_early_cancels_it_on_the_worker_once() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 1
    async with connected(worker) as (stream, _):
        mailbox = stream.submit(request("a"))
        await mailbox.get()
        stream.end("a")
        stream.end("a")
        await until_idle(worker)
        done = stream.submit(request("b", max_tokens=1))
        worker.allow(1)
        await collect(done)
        stream.end("b")  # it has finished: nothing to cancel
        await until_idle(worker)
        assert worker.cancels == ["a"]


async def until_idle(worker: FakeWorker) -> None:
    while worker.num_running:
        await asyncio.sleep(0.005)


async def test_a_dead_worker_fails_its_requests_and_loses_its_blocks() -> None:
    worker = FakeWorker()
    async with connected(worker) as (stream, index):
        await collect(stream.submit(request("warm")))
        chain = list(worker._blocks(request("warm").request))  # pyright: ignore[reportPrivateUsage]
        while index.match(chain, stream.incarnation) == 0:
            await asyncio.sleep(0.005)
        worker.num_steps_allowed = 0
        mailbox = stream.submit(request("a"))
        await worker.kill()
        with pytest.raises(StreamLost, match="w0"):
            await collect(mailbox)
        assert not stream.is_usable
        assert index.match(chain, stream.incarnation) == 0
        with pytest.raises(StreamLost):
            stream.submit(request("b"))


async def test_it_reconnects_to_the_same_life() -> None:
    worker = FakeWorker()
    async with connected(worker) as (stream, _):
        port = int(stream.info.peer.address.split(":")[1])
        await worker.kill()
        while stream.is_usable:
            await asyncio.sleep(0.005)
        await worker.start(port)
        await stream.wait_usable()
        assert len(await collect(stream.submit(request("a")))) == 3


async def test_another_life_at_the_same_address_is_never_used() -> None:
    worker = FakeWorker()
    info = await worker.start()
    peer = PeerAddress(info.peer.worker_id, info.peer.address, "an earlier life")
    stream = WorkerStream(msgspec.structs.replace(info, peer=peer), PrefixIndex(), FAST)
    stream.start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await stream.wait_usable()
    await stream.close()
    await worker.kill()


async def test_a_lost_frame_fails_the_open_requests_and_asks_for_a_snapshot() -> None:
    worker = FakeWorker()
    async with connected(worker) as (stream, index):
        worker.num_steps_allowed = 1
        lost = stream.submit(request("a"))
        await lost.get()
        worker.skips_frame = True
        worker.allow(2)
        with pytest.raises(StreamLost, match="came too early"):
            await collect(lost)
        worker.num_steps_allowed = None
        assert stream.is_usable
        assert len(await collect(stream.submit(request("b")))) == 3
        chain = list(worker._blocks(request("b").request))  # pyright: ignore[reportPrivateUsage]
        while index.match(chain, stream.incarnation) == 0:
            await asyncio.sleep(0.005)
        assert worker.num_resyncs == 1
        assert worker.cancels == ["a"]


async def test_own_load_counts_at_once_and_others_by_report() -> None:
    worker = FakeWorker()
    worker.load = Load(num_running=5, num_waiting=2, waiting_tokens=300)
    async with connected(worker) as (stream, _):
        assert (stream.num_requests, stream.num_tokens) == (7, 300)
        charge = Charge(Route(Leg(stream, (), 50), None))
        assert (stream.num_requests, stream.num_tokens) == (8, 350)
        await collect(stream.submit(request("a")))  # its frames report 7 again: one of them is ours
        assert (stream.num_requests, stream.num_tokens) == (7, 300)
        charge.on_first_token()
        charge.release()
        charge.release()
        assert (stream.num_own_requests, stream.num_own_tokens, stream.num_dispatched) == (0, 0, 1)


def test_a_charge_needs_no_connection_and_never_goes_negative() -> None:
    peer = PeerAddress("w", "127.0.0.1:1", "x")
    info = WorkerInfo(
        peer=peer,
        role="both",
        model="m",
        block_size=16,
        num_blocks=1,
        max_context=1,
        mover="",
        metrics_address="",
        pid=0,
    )
    stream = WorkerStream(info, PrefixIndex(), FAST)
    charge = Charge(Route(Leg(stream, (), 10), None))
    charge.release()
    charge.on_first_token()
    assert (stream.num_requests, stream.num_tokens) == (0, 0)
