"""The one thread that owns a mover, and its bridge to asyncio: posts go in through a queue, news come out as callbacks.

Copies in host memory happen inside a post, so they must not happen on the event loop. The thread sleeps between polls:
least while somebody waits for a transfer's end, longer while one is expected, longest when idle.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.transfer.actions import SourceBlock
from baton.transfer.mover import Arrival, Completion, Incarnation, KVMover, MemoryDescriptor, TransferError

URGENT_POLL_S = 20e-6  # of GPU memory, where nothing is copied inside a post; a poll takes 4 us, and timers add 60
ACTIVE_POLL_S = 150e-6
IDLE_POLL_S = 2e-3
UNCONNECTED_POLL_S = 50e-3
LINGER_S = 5e-3  # stay active this long after the last news: chunks and arrivals come in trains


@dataclass(frozen=True, slots=True)
class _Post:
    peer: Incarnation
    source: np.ndarray
    target: np.ndarray
    tag: bytes


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do in the thread, once; `done` belongs to the event loop."""

    run: Callable[[], None]
    done: asyncio.Future[None]


class MoverLoop:
    """Call its methods from `loop`'s thread; both callbacks run there.

    Every post ends in exactly one Completion, unless the thread dies: then `wait_ended` raises, and so must the worker.
    """

    def __init__(
        self,
        mover: KVMover,
        on_completion: Callable[[Completion], None],
        on_arrival: Callable[[Arrival], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._mover = mover
        self._on_completion = on_completion
        self._on_arrival = on_arrival
        self._loop = loop
        self._jobs: queue.SimpleQueue[_Post | _Call] = queue.SimpleQueue()
        self._peers: set[Incarnation] = set()
        self._num_pending = 0
        self._expecting = self._urgent = False
        self._urgent_poll_s = URGENT_POLL_S if mover.describe().memory == "VRAM" else ACTIVE_POLL_S
        self._last_news_s = 0.0
        self._closing = False
        self._ended: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._run, name="kv-mover", daemon=True).start()

    def write(self, peer: Incarnation, source: Sequence[SourceBlock], target: Sequence[int], tag: bytes) -> None:
        """Post a write; one that cannot be posted ends in a failed Completion as well."""
        self._submit(_Post(peer, np.asarray(source, np.int64), np.asarray(target, np.int64), tag))

    async def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        """Raises TransferError, as `KVMover.connect` does."""

        def run() -> None:
            self._mover.connect(peer, memory)
            self._peers.add(peer)

        await self._call(run)

    async def disconnect(self, peer: Incarnation) -> None:
        """Return when the peer's registration is torn down here; its pending transfers end as failed."""

        def run() -> None:
            self._mover.disconnect(peer)
            self._peers.discard(peer)

        await self._call(run)

    async def restore(self, blocks: Sequence[int], parts: int) -> None:
        """See `KVMover.restore`."""
        await self._call(lambda: self._mover.restore(np.asarray(blocks, np.int64), parts))

    def expect_arrivals(self, expecting: bool, *, urgent: bool) -> None:
        """Poll eagerly while the target says `is_receiving`, and most so while it says `is_landing`."""
        self._expecting, self._urgent = expecting, urgent

    async def close(self) -> None:
        """Close the mover and end the thread; what is still queued or pending ends as failed."""
        if not self._ended.done():
            self._closing = True
            self._jobs.put(_Call(lambda: None, self._loop.create_future()))
        await asyncio.wait([self._ended])

    async def wait_ended(self) -> None:
        """Return when the thread has ended after `close`; raise what killed it otherwise. A worker must watch this."""
        await asyncio.shield(self._ended)

    def _submit(self, job: _Post | _Call) -> None:
        if self._ended.done():
            self._refuse(job)
        else:
            self._jobs.put(job)

    async def _call(self, run: Callable[[], None]) -> None:
        call = _Call(run, self._loop.create_future())
        self._submit(call)
        await call.done

    def _refuse(self, job: _Post | _Call) -> None:
        """In the event loop: end a job that the thread will not take any more."""
        if isinstance(job, _Call):
            _settle(job.done, TransferError("the mover is closed"))
        else:
            self._on_completion(Completion(0, job.peer, job.tag, 0, 0.0, "the mover is closed"))

    # In the thread.

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._serve()
            self._mover.close()
            self._poll()
        except Exception as caught:  # the thread's root: whatever it is must reach the worker, not vanish with us
            error = caught
        self._loop.call_soon_threadsafe(self._end, error)

    def _serve(self) -> None:
        memory = self._mover.describe()
        if memory.memory == "VRAM":
            torch.cuda.set_device(memory.device)  # the current device is a thread's own
        while not self._closing:
            try:
                job = self._jobs.get(timeout=self._pause_s())
            except queue.Empty:
                pass
            else:
                self._do(job)
            self._poll()

    def _pause_s(self) -> float:
        if self._num_pending or self._urgent:
            return self._urgent_poll_s
        if self._expecting or time.monotonic() - self._last_news_s < LINGER_S:
            return ACTIVE_POLL_S
        return IDLE_POLL_S if self._peers else UNCONNECTED_POLL_S

    def _do(self, job: _Post | _Call) -> None:
        if isinstance(job, _Post):
            self._post(job)
            return
        error: TransferError | None = None
        try:
            job.run()
        except TransferError as caught:
            error = caught
        self._loop.call_soon_threadsafe(_settle, job.done, error)

    def _post(self, job: _Post) -> None:
        try:
            self._mover.write(job.peer, job.source, job.target, job.tag)
        except TransferError as error:
            failed = Completion(0, job.peer, job.tag, 0, 0.0, str(error))
            self._loop.call_soon_threadsafe(self._on_completion, failed)
        else:
            self._num_pending += 1

    def _poll(self) -> None:
        news = self._mover.poll()
        if not news.completions and not news.arrivals:
            return
        self._last_news_s = time.monotonic()
        self._num_pending -= len(news.completions)
        for completion in news.completions:
            self._loop.call_soon_threadsafe(self._on_completion, completion)
        for arrival in news.arrivals:
            self._loop.call_soon_threadsafe(self._on_arrival, arrival)

    def _end(self, error: Exception | None) -> None:
        """In the event loop again: no job can come after this, so refuse what the thread left."""
        _settle(self._ended, error)
        while not self._jobs.empty():
            self._refuse(self._jobs.get())


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # its caller was cancelled meanwhile
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
