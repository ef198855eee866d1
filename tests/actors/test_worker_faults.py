"""Workers under faults that need no second process; tests/chaos has those that do."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import grpc.aio
import msgspec
import pytest

from baton.actors import rpc
from baton.actors.messages import Cancel, PeerAddress, Submit
from baton.actors.worker import Worker
from baton.transfer.wire import Failed, Message, Open, Place, Stopped, decode_message
from tests.actors.test_worker import Client, request, running, settled, text
from tests.fakes import fake_output


async def silent_peer(streams: list[object]) -> tuple[grpc.aio.Server, PeerAddress]:
    """A prefill worker that takes streams and never says Hello."""

    async def serve(messages: object, context: object):  # type: ignore[no-untyped-def]
        streams.append(messages)
        try:
            await asyncio.sleep(60)
            yield
        finally:
            streams.remove(messages)

    server = rpc.make_server({rpc.HANDOVER: (serve, decode_message)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, PeerAddress("p9", f"127.0.0.1:{port}", "silent")


async def test_requests_to_a_silent_prefill_worker_share_one_attempt_and_wait_for_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.actors.decode_role.HELLO_TIMEOUT_S", 0.5)
    streams: list[object] = []
    server, address = await silent_peer(streams)
    async with running("decode", "d0") as (d, info), Client(info.peer.address) as client:
        asked = [request(30, 4, seed=i) for i in range(6)]
        begun = time.monotonic()
        for one in asked:
            client.send(Submit(one, address))
        left = {one.id for one in asked}
        async with asyncio.timeout(5):
            async for output in client.outputs():
                left -= {output.request_id} if output.finish == "length" else set()
                if not left:
                    break
        assert time.monotonic() - begun < 1.5, "they waited one after another"
        await settled(d)
    await server.stop(0)


async def test_a_client_that_leaves_while_its_peer_is_dialled_ends_nothing_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.actors.decode_role.HELLO_TIMEOUT_S", 0.5)
    streams: list[object] = []
    server, address = await silent_peer(streams)
    async with running("decode", "d0") as (d, info), Client(info.peer.address) as client:
        leaves, stays = request(30, 4), request(30, 4, seed=2)
        client.send(Submit(leaves, address))
        await asyncio.sleep(0.2)
        client.send(Cancel(leaves.id))
        assert text(await client.finish(stays, address)) == fake_output(stays, 4)
        async with asyncio.timeout(3):
            while streams:
                await asyncio.sleep(0.02)  # the attempt's stream is closed as well
        await settled(d)
    await server.stop(0)


async def test_a_request_ends_at_its_deadline_wherever_it_stands() -> None:
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, d_info):
        block_engine(p)
        async with Client(d_info.peer.address) as client:
            waits = msgspec.structs.replace(request(30, 4), deadline_s=0.3)
            begun = time.monotonic()
            outputs = await client.finish(waits, p_info.peer)
            assert outputs[-1].finish == "error" and "deadline_s = 0.3" in (outputs[-1].error or "")
            assert time.monotonic() - begun < 2
            in_time = msgspec.structs.replace(request(9, 4), deadline_s=5.0)
            assert text(await client.finish(in_time)) == fake_output(in_time, 4)
        await settled(d)


def block_engine(worker: Worker) -> threading.Event:
    """Hang the engine's thread until the event is set, or the test's time is over."""
    go_on = threading.Event()
    worker._steps.post(lambda engine: go_on.wait(12))
    return go_on


async def test_a_worker_whose_engine_hangs_shows_no_sign_of_life_and_recovers_when_it_goes_on() -> None:
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, d_info):
        async with Client(d_info.peer.address) as client:
            warm_up = request(30, 4)
            assert text(await client.finish(warm_up, p_info.peer)) == fake_output(warm_up, 4)
            async with Client(p_info.peer.address) as of_p:
                go_on = block_engine(p)
                asked = request(30, 6, seed=2)
                begun = time.monotonic()
                outputs = await client.finish(asked, p_info.peer)  # P's loop lives and could beat
                assert text(outputs) == fake_output(asked, 6)
                assert outputs[-1].served is not None and outputs[-1].served.prefill_worker == "d0"
                assert time.monotonic() - begun < 6, "P's beats hid that its engine hangs"
                async with asyncio.timeout(2):
                    async for _ in of_p.outputs():
                        pass  # its gateways' streams end, so that they go on elsewhere
            with pytest.raises(grpc.aio.AioRpcError, match="hangs"):
                async with Client(p_info.peer.address):
                    pass
            go_on.set()
            await settled(p)
            again = request(33, 4, seed=3)
            assert (await client.finish(again, p_info.peer))[-1].served.prefill_worker == "p0"  # type: ignore[union-attr]
        await settled(d)


async def test_a_draining_prefill_worker_refuses_new_hand_overs_and_decode_goes_on_alone() -> None:
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, d_info):
        async with asyncio.timeout(2):
            await p.drain(60)
        async with Client(d_info.peer.address) as client:
            asked = request(30, 4)
            outputs = await client.finish(asked, p_info.peer)
        assert text(outputs) == fake_output(asked, 4)
        assert outputs[-1].served is not None and outputs[-1].served.prefill_worker == "d0"
        await settled(p)
        await settled(d)


async def test_a_failed_write_is_followed_by_silence_until_the_peer_has_connected_anew() -> None:
    """A `Failed` would let decode give out blocks into which half of the write may still come."""
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, _):
        channel = rpc.open_channel(p_info.peer.address)
        calls: asyncio.Queue[Message] = asyncio.Queue()

        async def outgoing():  # type: ignore[no-untyped-def]
            while True:
                yield await calls.get()

        call = rpc.open_stream(channel, rpc.HANDOVER, outgoing(), decode_message)
        blocks = await d._steps.call(lambda engine: tuple(b.id for b in engine._space.pool.allocate(8)))
        asked = request(30, 1)
        raw = msgspec.Raw(rpc.encode(asked))
        calls.put_nowait(d._hello)
        calls.put_nowait(Open(handover="h", epoch=1, skip_blocks=0, num_blocks=8, request=raw))
        failing = p._on_completion
        p._mover._on_completion = lambda done: failing(dataclasses.replace(done, error="injected"))
        calls.put_nowait(Place(handover="h", epoch=1, blocks=blocks))
        heard: list[Message] = []
        async with asyncio.timeout(5):
            while (message := await call.read()) is not grpc.aio.EOF:
                heard.append(message)
        assert not [message for message in heard if isinstance(message, Failed | Stopped)]
        p._mover._on_completion = failing
        await settled(p)
        await channel.close()


async def test_a_fall_back_after_a_first_token_that_stops_the_request_adds_nothing() -> None:
    """Prefill's token was delivered, then its KV was lost: what goes on from it must see that it was the last."""
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, d_info):
        asked = request(30, 9)
        first = fake_output(asked, 1)
        stops = msgspec.structs.replace(asked.sampling, stop_token_ids=tuple(first))
        asked = msgspec.structs.replace(asked, sampling=stops)
        d._on_arrival = lambda arrival: None  # type: ignore[method-assign]
        d._mover._on_arrival = d._on_arrival
        async with Client(d_info.peer.address) as client:
            outputs = await client.finish(asked, p_info.peer)
            assert text(outputs) == first and outputs[-1].finish == "stop"
            brought_along = msgspec.structs.replace(
                asked, id="again", tokens=(*asked.tokens, *first), num_output=1
            )  # by a gateway whose decode worker died just then
            outputs = await client.finish(brought_along, p_info.peer)
            assert text(outputs) == [] and outputs[-1].finish == "stop"
        await settled(p)
        await settled(d)


async def test_imports_that_hold_what_the_others_wait_for_do_not_wait_for_ever() -> None:
    """Each of two holds a prefix found in decode's cache; together they leave too few blocks for either."""
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0", num_blocks=16) as (d, d_info):
        async with Client(d_info.peer.address) as client:
            starts = [request(25, 1, seed=seed) for seed in (1, 2)]
            for start in starts:
                await client.finish(start)
            block = block_engine(d)  # so that both are opened before either asks for room
            more = [
                msgspec.structs.replace(request(25, 3, seed=seed), tokens=(*start.tokens, *range(1, 25)))
                for seed, start in enumerate(starts, 1)
            ]
            got = {one.id: [] for one in more}
            for one in more:
                client.send(Submit(one, p_info.peer))
            await asyncio.sleep(0.2)
            block.set()
            async with asyncio.timeout(10):
                async for output in client.outputs():
                    got[output.request_id] += output.tokens
                    if all(len(tokens) == 3 for tokens in got.values()):
                        break
            for one in more:
                assert got[one.id] == fake_output(one, 3)
        await settled(p)
        await settled(d)


@pytest.mark.parametrize(
    ("words", "finish"),
    [("CUDA error: uncorrectable ECC error encountered", "cancelled"), ("index out of bounds", "error")],
)
async def test_what_a_devices_fault_cuts_short_is_handed_back_and_other_failures_are_told(
    words: str, finish: str
) -> None:
    async with running("both", "w0") as (worker, info), Client(info.peer.address) as client:

        def fail(engine: object) -> None:
            raise RuntimeError(words)

        go_on = block_engine(worker)
        asked = asyncio.create_task(client.finish(request(30, 4)))
        while not worker._live:
            await asyncio.sleep(0.01)
        worker._steps.post(fail)
        go_on.set()
        outputs = await asked
        assert outputs[-1].finish == finish
        assert words in str(worker.failed.exception())
        assert (await client.finish(request(9, 4, seed=2)))[-1].finish == "cancelled"  # nothing starts here any more
