"""Entry 27: nothing grows with the number of requests served, whatever became of them."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter, deque
from typing import Any

from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.messages import Role
from baton.actors.worker import Worker
from baton.router.config import RouterConfig
from baton.router.gateway import Gateway
from baton.router.generation_config import SamplingDefaults
from baton.router.tokenizer import Tokenizer
from baton.transfer.config import TransferConfig
from tests.actors.fake_engine import build_fake_engine
from tests.router.rig import until

CONTAINERS = (dict, list, set, deque)


def worker(role: Role) -> Worker:
    config = WorkerConfig(
        model="fake",
        served_name="fake",
        engine=EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_step_tokens=64),
        transfer=TransferConfig(mover="nixl", beat_s=0.2),
    )
    return Worker(worker_id=role, role=role, config=config, build=build_fake_engine)


async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
    """One call on a connection that stays; every tenth is refused."""
    prompt = [1 + (number * i) % 40 for i in range(12)]
    tokens = "-1" if number % 10 == 0 else "1"
    body = f'{{"model":"fake","prompt":{prompt},"max_tokens":{tokens},"ignore_eos":true}}'.encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in answer.decode().lower().split("\r\n") if line.startswith("content-length:"))
    await reader.readexactly(int(length.split(":")[1]))


async def leave(port: int) -> None:
    """Ask for much and hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model":"fake","prompt":[1,2,3],"max_tokens":200,"ignore_eos":true,"stream":true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"data: ")
    writer.close()


async def serve(gateway: Gateway, port: int, count: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in range(count):
        await (leave(port) if number % 10 == 5 else send(reader, writer, number))
    writer.close()
    await until(lambda: gateway.metrics.registry.get_sample_value("baton_gateway_running_requests") == 0)
    await asyncio.sleep(0.5)  # what peers have to tell each other is told


def num_items() -> Counter[str]:
    """Count what all containers hold, by their type, but for the event loop's timers: it keeps 100 cancelled ones."""
    gc.collect()
    objects: list[Any] = gc.get_objects()
    # `type`, not `isinstance`: that would ask lazy modules for their class, which imports them.
    timers = {id(thing) for thing in objects if type(thing) is list and thing and type(thing[0]) is asyncio.TimerHandle}
    return Counter({
        kind.__name__: sum(len(thing) for thing in objects if type(thing) is kind and id(thing) not in timers)
        for kind in CONTAINERS
    })  # fmt: skip


async def test_containers_do_not_grow_with_requests(tokenizer: Tokenizer) -> None:
    num_requests = 80
    workers = [worker("prefill"), worker("decode")]
    gateway = Gateway(RouterConfig(), "unused", "fake")
    port = int((await gateway.serve(tokenizer, SamplingDefaults())).rpartition(":")[2])
    try:
        await gateway.set_workers([await worker.start() for worker in workers])
        await until(lambda: gateway.membership.decoders() and gateway.membership.prefillers())
        await serve(gateway, port, num_requests)
        before, blocks = num_items(), sys.getallocatedblocks()
        await serve(gateway, port, num_requests)
        grown = num_items() - before
        assert sum(grown.values()) < num_requests / 2, grown
        assert sys.getallocatedblocks() - blocks < 20 * num_requests
        for worker_ in workers:
            counts = await worker_.counts()
            assert counts.held == 0
    finally:
        await asyncio.gather(gateway.stop(), *(worker_.stop() for worker_ in workers))
