"""Pushes to a peer whose blocks hold other tokens or heads than ours: packs ours anew into staging, and sends that.

The rest of a hand-over counts the peer's blocks throughout; only the source of a write names, for each of them, what
of ours fills it (`route.source_blocks`). A peer with blocks just like ours is written straight from the cache.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from baton.kernels.kv_pack import join_heads, pack_into
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

NUM_BUFFERS = 2  # of staging: one is packed while the other is sent


@dataclass(frozen=True, slots=True)
class _Area:
    """Staging for peers with blocks of one form, registered with the mover."""

    memory: torch.Tensor  # [NUM_BUFFERS * parts * buffer, num_layers, 2, block_size, num_kv_heads / parts, head_dim]
    handle: int
    free: list[int]  # the first block of each buffer that nobody uses


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
    """A write whose blocks lie in the buffer that starts at block `buffer`, or will once `packed` has happened."""

    write: _Write
    area: _Area
    buffer: int
    firsts: tuple[int, ...]  # for each part, the staging block of the write's first target
    packed: torch.cuda.Event | None


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
        self, mover: PlainMover, kv: torch.Tensor, max_write_blocks: int, *, rank: int = 0, world: int = 1
    ) -> None:
        self._mover = mover
        self._kv = kv
        self._max_write_blocks = max_write_blocks
        self._rank, self._world = rank, world
        self._routes: dict[Incarnation, Route] = {}
        self._areas: dict[tuple[int, int], _Area] = {}  # by block size and parts
        self._waiting: deque[_Write] = deque()
        self._packing: deque[_Staged] = deque()
        self._sending: dict[int, _Sending] = {}  # by the inner mover's ids
        self._failed: list[Completion] = []  # for the next poll
        self._arrived: Counter[Arrival] = Counter()  # where several ranks' writes make one
        self._num_writes = 0
        self._stream: torch.cuda.Stream | None = None

    def describe(self) -> MemoryDescriptor:
        return self._mover.describe()

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        self.disconnect(peer)
        block_bytes = self.describe().block_bytes * self._world
        route = Route.find(
            peer, memory, rank=self._rank, world=self._world, block_size=self._kv.shape[3], block_bytes=block_bytes
        )
        self._routes[peer] = route
        for rank in route.ranks:
            self._mover.connect(rank_name(peer, rank), memory.ranks[rank].divided(route.stretches))

    def disconnect(self, peer: Incarnation) -> None:
        for write in [write for write in self._waiting if write.peer == peer]:
            self._waiting.remove(write)
            self._failed.append(write.failed(f"disconnected from {peer}"))
        for staged in [staged for staged in self._packing if staged.write.peer == peer]:
            self._packing.remove(staged)
            staged.area.free.append(staged.buffer)  # the next to be packed there is packed on the same stream
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
        if source.ndim == 1 and route.parts == 1:
            name = rank_name(peer, route.ranks[0])
            return self._mover.write(name, source, target * route.stretches + route.stretch, tag)
        if len(target) > self._max_write_blocks:
            raise TransferError(f"a write of {len(target)} blocks exceeds max_write_blocks = {self._max_write_blocks}")
        self._num_writes += 1
        self._waiting.append(_Write(-self._num_writes, peer, source.reshape(len(target), -1), target, tag))
        self._advance()
        return -self._num_writes

    def join_heads(self, blocks: np.ndarray, parts: int) -> None:
        for start in range(0, len(blocks), self._max_write_blocks):  # which bounds the memory that it takes
            some = torch.tensor(blocks[start : start + self._max_write_blocks], device=self._kv.device)
            join_heads(self._kv, some, parts)
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
        staged, write = sending.staged, sending.staged.write
        staged.area.free.append(staged.buffer)
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
                area = self._area(self._routes[write.peer])
            except TransferError as error:
                self._failed.append(self._waiting.popleft().failed(str(error)))
                continue
            if not area.free:
                break
            self._packing.append(self._pack(self._waiting.popleft(), area))
        while self._packing and ((packed := self._packing[0].packed) is None or packed.query()):
            self._post(self._packing.popleft())

    def _post(self, staged: _Staged) -> None:
        """Write each part to its rank. One that cannot be posted fails the write when the others have ended."""
        write = staged.write
        route = self._routes[write.peer]
        sending = _Sending(staged)
        target = write.target * route.stretches + route.stretch
        for rank, first in zip(route.ranks, staged.firsts, strict=True):
            source = np.arange(first, first + len(target))
            try:
                id = self._mover.write(rank_name(write.peer, rank), source, target, write.tag, staged.area.handle)
            except TransferError as error:
                sending.error = str(error)
            else:
                sending.pending.add(id)
                self._sending[id] = sending
        if not sending.pending:
            self._failed.append(self._finish(sending))

    def _area(self, route: Route) -> _Area:
        key = (route.block_size, route.parts)
        if (area := self._areas.get(key)) is None:
            parts, recut = route.parts, self._kv.shape[3] // route.block_size
            buffer = parts * (self._max_write_blocks + max(0, recut - 1))  # a write may begin inside one of our blocks
            heads = self._kv.shape[4] // parts
            shape = (NUM_BUFFERS * buffer, *self._kv.shape[1:3], route.block_size, heads, self._kv.shape[5])
            try:
                memory = torch.zeros(shape, dtype=self._kv.dtype, device=self._kv.device)
            except torch.OutOfMemoryError as error:
                raise TransferError(f"no memory to stage {shape[0]} blocks of {route.block_size} tokens") from error
            area = _Area(memory, self._mover.stage(memory), list(range(0, shape[0], buffer)))
            self._areas[key] = area
        return area

    def _pack(self, write: _Write, area: _Area) -> _Staged:
        ours, theirs = self._kv.shape[3], area.memory.shape[3]
        parts = self._kv.shape[4] // area.memory.shape[4]
        buffer, skip = area.free.pop(), 0
        if theirs > ours:
            blocks = write.source[write.source >= 0]
        else:
            named = write.source[:, 0]
            skip = int(named[0]) % (ours // theirs)
            owners = named // (ours // theirs)
            blocks = owners[np.diff(owners, prepend=-1) != 0]
        length = skip + len(write.target)
        staging = area.memory[buffer : buffer + parts * length].view(parts, length, *area.memory.shape[1:])
        firsts = tuple(buffer + part * length + skip for part in range(parts))
        if not self._kv.is_cuda:
            pack_into(self._kv, torch.as_tensor(blocks), staging)
            return _Staged(write, area, buffer, firsts, None)
        self._stream = self._stream or torch.cuda.Stream(self._kv.device, priority=-1)  # ahead of prefill's kernels
        with torch.cuda.stream(self._stream):
            pack_into(self._kv, torch.as_tensor(blocks, device=self._kv.device), staging)
            packed = torch.cuda.Event()
            packed.record()
        return _Staged(write, area, buffer, firsts, packed)
