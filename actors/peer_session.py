"""One end of a hand-over stream between a decode and a prefill worker: an outgoing queue and the incoming messages.

The same class serves both ends; what the messages mean is `baton.transfer`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from baton.actors import rpc
from baton.actors.messages import PeerAddress
from baton.transfer.wire import Hello, Message, decode_message

log = logging.getLogger(__name__)


class PeerRefused(Exception):
    """The peer cannot be used: unreachable, another life than was asked for, or another layout."""


class PeerSession:
    """Messages to one peer, in order. `send` never blocks. The state machines' Beats bound every silence."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()

    def send(self, message: Message) -> None:
        self._queue.put_nowait(message)

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message


class PeerLink:
    """The decode worker's side of a stream to one life of one prefill worker."""

    def __init__(self, peer: PeerAddress, hello: Hello) -> None:
        self.peer = peer
        self._session = PeerSession()
        self._session.send(hello)
        self._channel = rpc.open_channel(peer.address)
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._incoming: AsyncIterator[Message] | None = None

    async def open(self, timeout_s: float) -> Hello:
        """Connect and exchange Hellos. Raises PeerRefused; `close` is the caller's in every case."""
        self._call = rpc.open_stream(self._channel, rpc.HANDOVER, self._session.outgoing(), decode_message)
        self._incoming = aiter(self._call)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await anext(self._incoming, None)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            raise PeerRefused(f"{self.peer.worker_id} at {self.peer.address}: {_reason(error)}") from error
        if not isinstance(answer, Hello):
            raise PeerRefused(f"{self.peer.worker_id} at {self.peer.address} closed the stream before its Hello")
        return answer

    def send(self, message: Message) -> None:
        self._session.send(message)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the peer sends until the stream ends, however it ends."""
        assert self._incoming is not None, "open() comes first"
        try:
            async for message in self._incoming:
                yield message
        except grpc.aio.AioRpcError as error:
            log.warning("stream to %s lost: %s", self.peer.worker_id, _reason(error))

    async def close(self) -> None:
        self._session.close()
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return type(error).__name__
