"""HTTP/1.1 as uvicorn speaks it through httptools, with a bound on what comes before a body."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request line and headers that go on over reads of more than MAX_HEAD_BYTES together."""

    _num_heads = 0
    _num_head_bytes = 0  # of the reads that brought nothing but a part of a head
    _is_in_head = True

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
