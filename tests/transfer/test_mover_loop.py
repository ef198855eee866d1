"""The mover's thread and its bridge to asyncio."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest
import torch

from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Arrival, Completion, Incarnation, News, TransferError
from baton.transfer.mover_loop import MoverLoop

A, B = Incarnation("a"), Incarnation("b")


@dataclass
class Side:
    """One worker: its mover's loop, and queues of what it was told."""

    mover: LocalMover
    completions: asyncio.Queue[Completion] = field(default_factory=asyncio.Queue[Completion])
    arrivals: asyncio.Queue[Arrival] = field(default_factory=asyncio.Queue[Arrival])
    threads: set[int] = field(default_factory=set[int])

    def start(self) -> MoverLoop:
        return MoverLoop(self.mover, self.completed, self.arrivals.put_nowait, asyncio.get_running_loop())

    def completed(self, completion: Completion) -> None:
        self.threads.add(threading.get_ident())
        self.completions.put_nowait(completion)


def two_sides(*, hold: bool = False) -> tuple[LocalFabric, Side, Side]:
    fabric = LocalFabric(hold=hold)
    a = LocalMover(fabric, torch.arange(8, dtype=torch.int64).reshape(8, 1) + 1, A)
    b = LocalMover(fabric, torch.zeros(8, 1, dtype=torch.int64), B)
    return fabric, Side(a), Side(b)


async def test_a_write_is_told_on_the_event_loop_of_each_side() -> None:
    _, a, b = two_sides()
    ours, theirs = a.start(), b.start()
    async with asyncio.timeout(10):
        await ours.connect(B, b.mover.describe())
        ours.write(B, (0, 1), (5, 6), b"t")
        completion = await a.completions.get()
        arrival = await b.arrivals.get()
        await ours.close()
        await theirs.close()
    assert (completion.error, completion.tag, arrival) == (None, b"t", Arrival(A, b"t"))
    assert a.threads == {threading.get_ident()}
    assert torch.equal(b.mover.rows.view(torch.int64).flatten(), torch.tensor([0, 0, 0, 0, 0, 1, 2, 0]))


async def test_a_write_that_cannot_be_posted_ends_in_a_failed_completion() -> None:
    _, a, _ = two_sides()
    ours = a.start()
    async with asyncio.timeout(10):
        ours.write(B, (0,), (0,), b"t")
        completion = await a.completions.get()
        await ours.close()
    assert (completion.peer, completion.tag, completion.error) == (B, b"t", "not connected to peer b")


async def test_a_refused_connection_raises_where_it_is_awaited() -> None:
    _, a, _ = two_sides()
    stranger = LocalMover(LocalFabric(), torch.zeros(8, 1, dtype=torch.int64), Incarnation("c"))
    ours = a.start()
    async with asyncio.timeout(10):
        with pytest.raises(TransferError, match="not on this fabric"):
            await ours.connect(Incarnation("c"), stranger.describe())
        await ours.close()


async def test_disconnecting_ends_pending_writes_as_failed() -> None:
    fabric, a, b = two_sides(hold=True)
    ours = a.start()
    async with asyncio.timeout(10):
        await ours.connect(B, b.mover.describe())
        ours.write(B, (0,), (0,), b"t")
        await ours.disconnect(B)
        assert (await a.completions.get()).error == "disconnected from b"
        assert fabric.pending == []
        await ours.close()


async def test_closing_ends_what_is_pending_and_refuses_what_comes_after() -> None:
    _, a, b = two_sides(hold=True)
    ours = a.start()
    async with asyncio.timeout(10):
        await ours.connect(B, b.mover.describe())
        ours.write(B, (0,), (0,), b"pending")
        await ours.connect(B, b.mover.describe())  # behind the write in the queue: it has been posted
        await ours.close()
        await ours.close()
        await ours.wait_ended()
        ours.write(B, (0,), (0,), b"late")
        with pytest.raises(TransferError, match="closed"):
            await ours.connect(B, b.mover.describe())
        errors = {c.tag: c.error for c in (await a.completions.get(), await a.completions.get())}
    assert errors == {b"pending": "disconnected from b", b"late": "the mover is closed"}


class BrokenMover(LocalMover):
    def poll(self) -> News:
        raise RuntimeError("the driver is gone")


async def test_what_kills_the_thread_reaches_whoever_watches_it() -> None:
    loop = Side(BrokenMover(LocalFabric(), torch.zeros(8, 1, dtype=torch.int64), A)).start()
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="the driver is gone"):
            await loop.wait_ended()
        await loop.close()
