"""Pushes to a peer whose blocks hold more or fewer tokens: packs ours into staging blocks of its size, and sends those.

The rest of a hand-over counts the peer's blocks throughout; only the source of a write names, for each of them, what
of ours fills it (`source_blocks`). A peer with blocks of our size is written straight from the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.kernels.kv_pack import pack_into
from baton.transfer.actions import SourceBlock
from baton.transfer.mover import Completion, Incarnation, KVMover, MemoryDescriptor, News, TransferError

NUM_BUFFERS = 2  # of staging: one is packed while the other is sent


def source_blocks(blocks: Sequence[int], ours: int, theirs: int) -> Sequence[SourceBlock]:
    """Name what of our `blocks` (in token order, `ours` tokens each) fills each block of `theirs` tokens, in order.

    Theirs are larger: several of our blocks; where the last lacks some, -1. Smaller: one number, block * (ours //
    theirs) + which part of it. Equal: the blocks themselves.
    """
    if theirs == ours:
        return blocks
    if theirs > ours:
        per_block = theirs // ours
        padded = (*blocks, *[-1] * (-len(blocks) % per_block))
        return tuple(padded[start : start + per_block] for start in range(0, len(padded), per_block))
    num_parts = ours // theirs
    return tuple((block * num_parts + part,) for block in blocks for part in range(num_parts))


@dataclass(frozen=True, slots=True)
class _Area:
    """Staging for peers with one block size, registered with the mover."""

    memory: torch.Tensor  # [NUM_BUFFERS * buffer, num_layers, 2, block_size, num_kv_heads, head_dim]
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
    first: int  # the staging block of the write's first target
    packed: torch.cuda.Event | None


class ReblockingMover:
    """A `KVMover` around another. Writes that need staging wait in order for a buffer, and are posted by `poll`.

    `kv` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], whatever the peers' block sizes.
    """

    def __init__(self, mover: KVMover, kv: torch.Tensor, max_write_blocks: int) -> None:
        self._mover = mover
        self._kv = kv
        self._max_write_blocks = max_write_blocks
        self._peer_block_bytes: dict[Incarnation, int] = {}
        self._areas: dict[int, _Area] = {}  # by block size
        self._waiting: deque[_Write] = deque()
        self._packing: deque[_Staged] = deque()
        self._sending: dict[int, _Staged] = {}  # by the inner mover's id
        self._failed: list[Completion] = []  # for the next poll
        self._num_writes = 0
        self._stream: torch.cuda.Stream | None = None

    def describe(self) -> MemoryDescriptor:
        return self._mover.describe()

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        ours, theirs = self.describe().block_bytes, memory.block_bytes
        if max(ours, theirs) % min(ours, theirs):
            raise TransferError(f"block_bytes is {ours} here but {theirs} at peer {peer}: neither divides the other")
        self.disconnect(peer)
        self._mover.connect(peer, memory)
        self._peer_block_bytes[peer] = theirs

    def disconnect(self, peer: Incarnation) -> None:
        for write in [write for write in self._waiting if write.peer == peer]:
            self._waiting.remove(write)
            self._failed.append(write.failed(f"disconnected from {peer}"))
        for staged in [staged for staged in self._packing if staged.write.peer == peer]:
            self._packing.remove(staged)
            staged.area.free.append(staged.buffer)  # the next to be packed there is packed on the same stream
            self._failed.append(staged.write.failed(f"disconnected from {peer}"))
        self._peer_block_bytes.pop(peer, None)
        self._mover.disconnect(peer)

    def stage(self, memory: torch.Tensor) -> int:
        return self._mover.stage(memory)

    def write(
        self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes, staging: int | None = None
    ) -> int:
        """With rows of `source_blocks` as `source`, pack them first; the id is then negative, beside the inner ones."""
        if source.ndim == 1:
            return self._mover.write(peer, source, target, tag, staging)
        if peer not in self._peer_block_bytes:
            raise TransferError(f"not connected to peer {peer}")
        if len(target) > self._max_write_blocks:
            raise TransferError(f"a write of {len(target)} blocks exceeds max_write_blocks = {self._max_write_blocks}")
        self._num_writes += 1
        self._waiting.append(_Write(-self._num_writes, peer, source, target, tag))
        self._advance()
        return -self._num_writes

    def read(self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes) -> int:
        return self._mover.read(peer, source, target, tag)

    def poll(self) -> News:
        news = self._mover.poll()
        completions = [self._translate(completion) for completion in news.completions]
        self._advance()
        failed, self._failed = self._failed, []
        return News(completions + failed, news.arrivals)

    def close(self) -> None:
        for peer in list(self._peer_block_bytes):
            self.disconnect(peer)
        self._mover.close()

    def _translate(self, completion: Completion) -> Completion:
        staged = self._sending.pop(completion.transfer, None)
        if staged is None:
            return completion
        staged.area.free.append(staged.buffer)
        return replace(completion, transfer=staged.write.id)

    def _advance(self) -> None:
        """Post what is packed, and pack what waits, as far as buffers go."""
        while self._waiting:
            write = self._waiting[0]
            try:
                area = self._area(write.peer)
            except TransferError as error:
                self._failed.append(self._waiting.popleft().failed(str(error)))
                continue
            if not area.free:
                break
            self._packing.append(self._pack(self._waiting.popleft(), area))
        while self._packing and ((packed := self._packing[0].packed) is None or packed.query()):
            self._post(self._packing.popleft())

    def _post(self, staged: _Staged) -> None:
        write = staged.write
        source = np.arange(staged.first, staged.first + len(write.target))
        try:
            id = self._mover.write(write.peer, source, write.target, write.tag, staged.area.handle)
        except TransferError as error:
            staged.area.free.append(staged.buffer)
            self._failed.append(write.failed(str(error)))
        else:
            self._sending[id] = staged

    def _area(self, peer: Incarnation) -> _Area:
        ours, theirs = self.describe().block_bytes, self._peer_block_bytes[peer]
        block_size = self._kv.shape[3] * theirs // ours
        if (area := self._areas.get(block_size)) is None:
            buffer = self._max_write_blocks + max(0, ours // theirs - 1)  # a write may begin inside one of our blocks
            shape = (NUM_BUFFERS * buffer, *self._kv.shape[1:3], block_size, *self._kv.shape[4:])
            try:
                memory = torch.empty(shape, dtype=self._kv.dtype, device=self._kv.device)
            except torch.OutOfMemoryError as error:
                raise TransferError(f"no memory to stage {shape[0]} blocks of {theirs} bytes for a peer") from error
            area = _Area(memory, self._mover.stage(memory), list(range(0, shape[0], buffer)))
            self._areas[block_size] = area
        return area

    def _pack(self, write: _Write, area: _Area) -> _Staged:
        ours, theirs = self._kv.shape[3], area.memory.shape[3]
        buffer, skip = area.free.pop(), 0
        if theirs > ours:
            blocks = write.source[write.source >= 0]
        else:
            parts = write.source[:, 0]
            skip = int(parts[0]) % (ours // theirs)
            owners = parts // (ours // theirs)
            blocks = owners[np.diff(owners, prepend=-1) != 0]
        staging = area.memory[buffer : buffer + skip + len(write.target)].unsqueeze(0)
        if not self._kv.is_cuda:
            pack_into(self._kv, torch.as_tensor(blocks), staging)
            return _Staged(write, area, buffer, buffer + skip, None)
        self._stream = self._stream or torch.cuda.Stream(self._kv.device, priority=-1)  # ahead of prefill's kernels
        with torch.cuda.stream(self._stream):
            pack_into(self._kv, torch.as_tensor(blocks, device=self._kv.device), staging)
            packed = torch.cuda.Event()
            packed.record()
        return _Staged(write, area, buffer, buffer + skip, packed)
