"""HTTP/1.1 as uvicorn speaks it through httptools: what comes before a body is bounded, writes are few."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request line and headers that go on over reads of more than MAX_HEAD_BYTES together."""

    _num_heads = 0
    _num_head_bytes = 0  # of the reads that brought nothing but a part of a head
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(cast(asyncio.Transport, GatheringTransport(transport)))

    def data_received(self, data: bytes) -> None:
        was_in_head, num_heads = self._is_in_head, self._num_heads
        super().data_received(data)
        if not (was_in_head and self._is_in_head) or self._num_heads != num_heads:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers are larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._num_heads += 1
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()


class GatheringTransport:
    """A transport whose first write of a round of the loop goes with the second one, or when the round is over.

    Each write is a system call that may wake a client. An answer's head and its first token are two writes that go at
    once, together; tokens of a frame go after the gateway has dealt with all of it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
            self._transport.write(data)
        else:
            self._held = data
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)
