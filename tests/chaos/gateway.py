"""The gateway's role in the chaos tests: streams to workers, and fail-over from the tokens that have come.

Runs in the test's own process, or by `main` in a process that can be killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
import msgspec

from baton.actors import rpc
from baton.actors.engine.request import Request
from baton.actors.messages import Cancel, Output, PeerAddress, Submit, ToWorker, WorkerInfo
from tests.chaos import control


class WorkerLost(Exception):
    """The stream to a worker ended."""


class WorkerStream:
    """One stream to one life of one worker."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.open_channel(address)
        self._calls: asyncio.Queue[ToWorker | None] = asyncio.Queue()
        self._inboxes: dict[str, asyncio.Queue[Output | None]] = {}
        self._next_frame = 0
        self.is_lost = False
        self._call = rpc.open_stream(self._channel, rpc.SERVE, self._outgoing(), rpc.decode_frame)
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Vanish, as a gateway that dies does."""
        self._lose()  # the reader may be cancelled before it has begun, and so never see its own end
        self._reader.cancel()
        self._calls.put_nowait(None)
        self._call.cancel()
        await self._channel.close()

    def cancel(self, request_id: str) -> None:
        self._calls.put_nowait(Cancel(request_id))

    async def outputs(self, submit: Submit, into: list[Output]) -> None:
        """Collect the request's outputs up to its last. Raises WorkerLost."""
        inbox = self._inboxes[submit.request.id] = asyncio.Queue()
        try:
            self._calls.put_nowait(submit)
            while not (into and into[-1].finish):
                output = None if self.is_lost and inbox.empty() else await inbox.get()
                if output is None:
                    raise WorkerLost
                into.append(output)
        finally:
            del self._inboxes[submit.request.id]

    async def _outgoing(self):  # type: ignore[no-untyped-def]
        while (call := await self._calls.get()) is not None:
            yield call

    async def _read(self) -> None:
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                assert frame.number == self._next_frame, "a frame is missing"
                self._next_frame += 1
                for output in frame.outputs:
                    if (inbox := self._inboxes.get(output.request_id)) is not None:
                        inbox.put_nowait(output)
        except grpc.aio.AioRpcError:
            pass
        finally:
            self._lose()

    def _lose(self) -> None:
        self.is_lost = True
        for inbox in self._inboxes.values():
            inbox.put_nowait(None)


@dataclass
class Gateway:
    """Generates on the first of the given workers that can, and goes on at the next when a stream is lost."""

    streams: dict[str, WorkerStream] = field(default_factory=dict[str, WorkerStream])  # by incarnation

    async def generate(
        self, request: Request, prefill: PeerAddress | None, decodes: Sequence[WorkerInfo]
    ) -> control.Answered:
        sent: list[int] = []
        outputs: list[Output] = []
        for num_streams, decode in enumerate(decodes, 1):
            outputs = []
            now = msgspec.structs.replace(request, tokens=(*request.tokens, *sent), num_output=len(sent))
            stream = self._stream(decode)
            try:
                await stream.outputs(Submit(now, prefill), outputs)
            except WorkerLost:
                sent += _tokens(outputs)
                if self.streams.get(decode.peer.incarnation) is stream:
                    await self.forget(decode)
                continue
            sent += _tokens(outputs)
            if outputs[-1].finish != "cancelled":  # else the worker drains: another one goes on
                return _answered(request.id, sent, outputs[-1], num_streams)
        return _answered(request.id, sent, Output(request_id=request.id, finish="error", error="no worker left"), 0)

    def cancel(self, request_id: str) -> None:
        for stream in self.streams.values():
            stream.cancel(request_id)

    async def close(self) -> None:
        for stream in self.streams.values():
            await stream.close()
        self.streams.clear()

    def _stream(self, worker: WorkerInfo) -> WorkerStream:
        stream = self.streams.get(worker.peer.incarnation)
        if stream is None:
            stream = self.streams[worker.peer.incarnation] = WorkerStream(worker.peer.address)
        return stream

    async def forget(self, worker: WorkerInfo) -> None:
        if (stream := self.streams.pop(worker.peer.incarnation, None)) is not None:
            await stream.close()


def _tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def _answered(request_id: str, tokens: list[int], last: Output, num_streams: int) -> control.Answered:
    assert last.finish is not None
    served = last.served
    return control.Answered(
        request_id=request_id,
        tokens=tuple(tokens),
        finish=last.finish,
        error=last.error,
        prefill_worker=served and served.prefill_worker,
        decode_worker=served and served.decode_worker,
        num_streams=num_streams,
    )


def main(sock: socket.socket) -> None:
    asyncio.run(_run(sock))
    os._exit(0)


async def _run(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    gateway = Gateway()
    tasks: list[asyncio.Task[None]] = []

    async def answer(command: control.Generate) -> None:
        answered = await gateway.generate(command.request, command.prefill, command.decodes)
        writer.write(control.encode(answered) + b"\n")

    writer.write(control.encode(control.Started(None)) + b"\n")
    while line := await reader.readline():
        command = control.decode_command(line)
        assert isinstance(command, control.Generate)
        tasks.append(asyncio.create_task(answer(command)))
