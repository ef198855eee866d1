"""The gateway's one stream to one life of a worker: requests go out, frames come in, outputs are told apart.

Reconnects for as long as it is open. Knows no routing and no retries: when the stream breaks, frames are missing or
the worker turns out to be another life, every open request gets `StreamLost` and the caller decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from baton.actors.messages import Cancel, Frame, Load, Output, Resync, Submit, ToWorker, WorkerInfo
from baton.actors.rpc import SERVE, decode_frame, open_channel, open_stream
from baton.router.fleet import RoutedWorker
from baton.router.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)


class StreamLost(Exception):
    """The worker cannot be heard any more: what it still produces for this request is lost."""


Mailbox = asyncio.Queue[Output | Exception]  # outputs of one request; an exception ends it


@dataclass(frozen=True, slots=True)
class Reconnect:
    first_s: float
    max_s: float


class WorkerStream(RoutedWorker):
    """`on_news` is called after every frame and when the stream is lost."""

    def __init__(
        self,
        info: WorkerInfo,
        index: PrefixIndex,
        reconnect: Reconnect,
        on_news: Callable[[WorkerStream], None] = lambda stream: None,
    ) -> None:
        super().__init__(info)
        self._on_news = on_news
        self.is_retired = False  # takes no new requests
        self.lost_at = time.monotonic()  # when its last connection ended; before the first, when it became known
        self._index = index
        self._reconnect = reconnect
        self._open: dict[str, Mailbox] = {}
        self._outbox: asyncio.Queue[ToWorker | None] | None = None  # None while there is no stream
        self._next_number = 0  # of the stream's next frame
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Connected, and at least one frame has shown that it is the life we mean."""
        return self._outbox is not None and self._next_number > 0

    @property
    def is_usable(self) -> bool:
        return self.is_connected and not self.is_retired

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"stream to {self.info.peer.worker_id}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose("the gateway has closed the stream")

    async def wait_idle(self) -> None:
        """Return when no request is open here."""
        while self._open:
            self._changed.clear()
            await self._changed.wait()

    async def wait_usable(self) -> None:
        while not self.is_usable:
            self._changed.clear()
            await self._changed.wait()

    def submit(self, submit: Submit) -> Mailbox:
        """Send a request; its outputs come to the returned mailbox. Raises StreamLost when there is no stream."""
        if self._outbox is None or not self.is_connected:
            raise StreamLost(f"no stream to worker {self.info.peer.worker_id}")
        mailbox = self._open[submit.request.id] = Mailbox()
        self._outbox.put_nowait(submit)
        return mailbox

    def end(self, request_id: str) -> None:
        """Stop listening to a request; cancel it on the worker unless it has ended there. Idempotent."""
        if self._open.pop(request_id, None) is None:
            return
        if self._outbox is not None:
            self._outbox.put_nowait(Cancel(request_id))
        self._changed.set()

    async def _run(self) -> None:
        task, delay_s = asyncio.current_task(), self._reconnect.first_s
        assert task is not None
        while True:
            try:
                await self._serve_one_stream()
            except Exception as error:  # the task's root: whatever broke this stream, the next one may work
                reason = _reason(error)
            else:
                reason = "the worker has closed the stream"
            if task.cancelling():  # gRPC swallows a cancellation that meets the failure of its call
                return
            if self.is_connected:
                delay_s = self._reconnect.first_s
                logger.warning("lost worker %s: %s", self.info.peer.worker_id, reason)
            self._lose(reason)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._reconnect.max_s)

    async def _serve_one_stream(self) -> None:
        async with open_channel(self.info.peer.address) as channel:
            outbox = self._outbox = asyncio.Queue()
            try:
                async for frame in open_stream(channel, SERVE, _drain(outbox), decode_frame):
                    self._accept(frame)
            finally:
                outbox.put_nowait(None)

    def _accept(self, frame: Frame) -> None:
        if frame.incarnation != self.incarnation:
            raise StreamLost(f"life {frame.incarnation} answers at {self.info.peer.address}, not {self.incarnation}")
        is_gap = frame.number != self._next_number
        if self._next_number == 0:
            self._index.add(self.incarnation, self.info.num_blocks)
        self._next_number = frame.number + 1
        if is_gap:
            self._resync(f"frame {frame.number} came too early")
        for output in sorted(frame.outputs, key=_is_later):
            mailbox = self._open.get(output.request_id)
            if mailbox is None:
                continue
            mailbox.put_nowait(output)
            if output.finish is not None:
                del self._open[output.request_id]
                self._changed.set()
        self.take_load(frame.load)
        if frame.number == 0:
            self._changed.set()
        if not self._index.apply(self.incarnation, frame.events):
            self._send(Resync())
        self._on_news(self)

    def _resync(self, reason: str) -> None:
        """Frames are missing: outputs of the open requests may be among them, and so may events."""
        logger.warning("resync with worker %s: %s", self.info.peer.worker_id, reason)
        for request_id in self._open:
            self._send(Cancel(request_id))
        self._fail_open(reason)
        self._index.add(self.incarnation, self.info.num_blocks)
        self._send(Resync())

    def _send(self, message: ToWorker) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    def _lose(self, reason: str) -> None:
        if self.is_connected:
            self.lost_at = time.monotonic()
        self._outbox = None
        self._next_number = 0
        self.take_load(Load())
        self._index.drop(self.incarnation)
        self._fail_open(reason)
        self._on_news(self)

    def _fail_open(self, reason: str) -> None:
        lost, self._open = self._open, {}
        for mailbox in lost.values():
            mailbox.put_nowait(StreamLost(f"worker {self.info.peer.worker_id}: {reason}"))
        self._changed.set()


async def _drain(outbox: asyncio.Queue[ToWorker | None]) -> AsyncIterator[ToWorker]:
    """Yield what is put into `outbox`, until None."""
    while (message := await outbox.get()) is not None:
        yield message


def _is_later(output: Output) -> bool:
    """Whether it follows others of its request: whoever waits for a first token is served first."""
    return output.cached_tokens is None


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
