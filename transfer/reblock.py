"""Pushes to a peer whose blocks hold other tokens or heads than ours: packs ours anew into staging, and sends that.

The rest of a hand-over counts the peer's blocks throughout; only the source of a write names, for each of them, what
of ours fills it (`route.source_blocks`). A peer with blocks just like ours is written straight from the cache.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch

from baton.transfer.mover import (
    Arrival,
    Completion,
    Incarnation,
    MemoryDescriptor,
    News,
    PlainMover,
    TransferError,
    rank_name,
    worker_of,
)
from baton.transfer.route import Route
from baton.transfer.staging import Packed, Staging, compressed_slices, restore


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    id: int
    peer: Incarnation
    source: np.ndarray  # [n, k]: a row of `source_blocks` for each target
    target: np.ndarray
    tag: bytes

    def failed(self, error: str) -> Completion:
        return Completion(self.id, self.peer, self.tag, 0, 0.0, error)


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A write whose blocks lie in staging, or will soon."""

    write: _Write
    staging: Staging
    packed: Packed

    def free(self) -> None:
        self.staging.free.append(self.packed.buffer)


@dataclass(slots=True, eq=False)
class _Sending:
    """The inner mover's writes that make one of ours."""

    staged: _Staged
    pending: set[int] = field(default_factory=set[int])
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class ReblockingMover:
    """A `KVMover` of one rank around a plain one. Writes that need staging wait for a buffer; `poll` posts them.

    `kv` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], whatever the peers' blocks are.
    """

    def __init__(
        self,
        mover: PlainMover,
        kv: torch.Tensor,
        max_write_blocks: int,
        *,
        rank: int = 0,
        world: int = 1,
        compress: bool = False,
    ) -> None:
        """`compress`: peers are to write our blocks compressed."""
        self._mover = mover
        self._kv = kv
        self._max_write_blocks = max_write_blocks
        self._rank, self._world = rank, world
        self._routes: dict[Incarnation, Route] = {}
        self._stagings: dict[tuple[int, int, int], Staging] = {}  # by `Route.form`
        self._waiting: deque[_Write] = deque()
        self._packing: deque[_Staged] = deque()
        self._sending: dict[int, _Sending] = {}  # by the inner mover's ids
        self._failed: list[Completion] = []  # for the next poll
        self._arrived: Counter[Arrival] = Counter()  # where several ranks' writes make one
        self._num_writes = 0
        self._compressed = compressed_slices(kv) if compress else 0

    def describe(self) -> MemoryDescriptor:
        return msgspec.structs.replace(self._mover.describe(), compressed=self._compressed)

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        self.disconnect(peer)
        block_bytes = self.describe().block_bytes * self._world
        route = Route.find(
            peer, memory, rank=self._rank, world=self._world, block_size=self._kv.shape[3], block_bytes=block_bytes
        )
        self._routes[peer] = route
        for rank in route.ranks:
            self._mover.connect(rank_name(peer, rank), memory.ranks[rank].divided(route.pieces))

    def disconnect(self, peer: Incarnation) -> None:
        for write in [write for write in self._waiting if write.peer == peer]:
            self._waiting.remove(write)
            self._failed.append(write.failed(f"disconnected from {peer}"))
        for staged in [staged for staged in self._packing if staged.write.peer == peer]:
            self._packing.remove(staged)
            staged.free()  # the next to be packed there is packed on the same stream
            self._failed.append(staged.write.failed(f"disconnected from {peer}"))
        for arrival in [arrival for arrival in self._arrived if arrival.peer == peer]:
            del self._arrived[arrival]
        if (route := self._routes.pop(peer, None)) is not None:
            for rank in route.ranks:
                self._mover.disconnect(rank_name(peer, rank))

    def write(self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes) -> int:
        """The id of a write that goes through staging is negative, beside the inner mover's."""
        route = self._routes.get(peer)
        if route is None:
            raise TransferError(f"not connected to peer {peer}")
        if source.ndim == 1 and route.parts == 1 and not route.compressed:
            return self._mover.write(rank_name(peer, route.ranks[0]), source, route.places(target), tag)
        if len(target) > self._max_write_blocks:
            raise TransferError(f"a write of {len(target)} blocks exceeds max_write_blocks = {self._max_write_blocks}")
        self._num_writes += 1
        self._waiting.append(_Write(-self._num_writes, peer, source.reshape(len(target), -1), target, tag))
        self._advance()
        return -self._num_writes

    def restore(self, blocks: np.ndarray, parts: int) -> None:
        for start in range(0, len(blocks), self._max_write_blocks):  # which bounds the memory that it takes
            some = torch.tensor(blocks[start : start + self._max_write_blocks], device=self._kv.device)
            restore(self._kv, some, parts, compressed=bool(self._compressed))
        if self._kv.is_cuda:
            torch.cuda.current_stream(self._kv.device).synchronize()

    def poll(self) -> News:
        news = self._mover.poll()
        completions = [own for one in news.completions if (own := self._translate(one)) is not None]
        self._advance()
        failed, self._failed = self._failed, []
        return News(completions + failed, [own for one in news.arrivals if (own := self._whole(one)) is not None])

    def close(self) -> None:
        for peer in list(self._routes):
            self.disconnect(peer)
        self._mover.close()

    def _translate(self, completion: Completion) -> Completion | None:
        """Name a transfer's end as ours; None while others of the same write are under way."""
        sending = self._sending.pop(completion.transfer, None)
        if sending is None:
            return replace(completion, peer=worker_of(completion.peer))
        sending.pending.discard(completion.transfer)
        sending.num_bytes += completion.num_bytes
        sending.seconds = max(sending.seconds, completion.seconds)
        sending.error = sending.error or completion.error
        return None if sending.pending else self._finish(sending)

    def _finish(self, sending: _Sending) -> Completion:
        write = sending.staged.write
        sending.staged.free()
        return Completion(write.id, write.peer, write.tag, sending.num_bytes, sending.seconds, sending.error)

    def _whole(self, arrival: Arrival) -> Arrival | None:
        """Name an arrival as the peer's; None while others of the same write are missing."""
        own = Arrival(worker_of(arrival.peer), arrival.tag)
        if (route := self._routes.get(own.peer)) is None:
            return None  # we have left this peer, and wait for nothing of it
        if arrival.error is not None:
            return replace(own, error=arrival.error)  # at once: the whole is spoilt
        self._arrived[own] += 1
        if self._arrived[own] < len(route.ranks):
            return None
        del self._arrived[own]
        return own

    def _advance(self) -> None:
        """Post what is packed, and pack what waits, as far as buffers go."""
        while self._waiting:
            write = self._waiting[0]
            try:
                staging = self._staging(self._routes[write.peer])
            except TransferError as error:
                self._failed.append(self._waiting.popleft().failed(str(error)))
                continue
            if not staging.free:
                break
            self._packing.append(_Staged(self._waiting.popleft(), staging, staging.pack(write.source)))
        while self._packing and ((done := self._packing[0].packed.done) is None or done.query()):
            self._post(self._packing.popleft())

    def _staging(self, route: Route) -> Staging:
        if (staging := self._stagings.get(route.form)) is None:
            staging = self._stagings[route.form] = Staging(self._mover, self._kv, route, self._max_write_blocks)
        return staging

    def _post(self, staged: _Staged) -> None:
        """Write each part to its rank. One that cannot be posted fails the write when the others have ended."""
        write = staged.write
        route = self._routes[write.peer]
        sending = _Sending(staged)
        target = route.places(write.target)
        for rank, source in zip(route.ranks, staged.packed.sources, strict=True):
            try:
                id = self._mover.write(rank_name(write.peer, rank), source, target, write.tag, staged.staging.handle)
            except TransferError as error:
                sending.error = str(error)
            else:
                sending.pending.add(id)
                self._sending[id] = sending
        if not sending.pending:
            self._failed.append(self._finish(sending))
