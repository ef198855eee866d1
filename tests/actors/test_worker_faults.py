"""Workers under faults that need no second process; tests/chaos has those that do."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc.aio
import msgspec
import pytest

from baton.actors import rpc
from baton.actors.messages import Cancel, PeerAddress, Submit
from baton.actors.worker import Worker
from baton.transfer.wire import Message, decode_message
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
