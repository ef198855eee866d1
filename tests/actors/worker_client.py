"""A gateway's end of a worker's stream, reduced to what tests of workers need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from baton.actors import rpc
from baton.actors.engine.request import Request
from baton.actors.messages import Output, PeerAddress, Submit, ToWorker
from baton.actors.worker import Worker


@dataclass
class Client:
    """A gateway's stream, reduced to what tests need."""

    address: str
    calls: asyncio.Queue[ToWorker | None] = field(default_factory=asyncio.Queue[ToWorker | None])

    async def __aenter__(self) -> Client:
        self._channel = rpc.open_channel(self.address)
        self._frames = rpc.open_stream(self._channel, rpc.SERVE, self._outgoing(), rpc.decode_frame)
        self._first = await self._frames.read()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._frames.cancel()
        await self._channel.close()

    async def _outgoing(self) -> AsyncIterator[ToWorker]:
        while (call := await self.calls.get()) is not None:
            yield call

    def send(self, call: ToWorker) -> None:
        self.calls.put_nowait(call)

    async def outputs(self) -> AsyncIterator[Output]:
        while (frame := await self._frames.read()) is not grpc.aio.EOF:
            for output in frame.outputs:
                yield output

    async def finish(self, request: Request, prefill: PeerAddress | None = None) -> list[Output]:
        self.send(Submit(request, prefill))
        outputs: list[Output] = []
        async for output in self.outputs():
            if output.request_id == request.id:
                outputs.append(output)
                if output.finish is not None:
                    break
        return outputs


async def settled(worker: Worker) -> None:
    """Wait until nothing is held, as must come within the bounds of leases and acknowledgements."""
    async with asyncio.timeout(5):
        while (counts := await worker.counts()).held:
            await asyncio.sleep(0.02)
    assert counts.free + counts.cached == counts.total
