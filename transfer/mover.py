"""The protocol of whatever moves KV blocks between two workers' memories.

Knows block numbers and bytes; knows no requests, no engine, no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, Protocol, Self

import msgspec
import numpy as np
import torch

Incarnation = NewType("Incarnation", str)  # one life of one worker process; peers are never identified by address


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know to write into one rank's KV: plain numbers and the mover's opaque handshake."""

    mover: str
    base_address: int
    block_bytes: int
    num_blocks: int
    device: int  # CUDA ordinal, or 0 for host memory
    memory: Literal["DRAM", "VRAM"]
    handshake: bytes  # NIXL agent metadata; empty for movers that need none
    compressed: int = 0  # of the SLICES of a block, how many a compressed one fills, which is to come; 0: as it is
    followers: tuple[
        MemoryDescriptor, ...
    ] = ()  # of the ranks after the first: alike, each with its share of the heads

    @property
    def ranks(self) -> tuple[MemoryDescriptor, ...]:
        return (msgspec.structs.replace(self, followers=()), *self.followers)

    @property
    def total_block_bytes(self) -> int:
        """Of one block on all ranks together."""
        return self.block_bytes * (1 + len(self.followers))

    def divided(self, parts: int) -> MemoryDescriptor:
        """Count each block as `parts` equal ones."""
        return msgspec.structs.replace(self, block_bytes=self.block_bytes // parts, num_blocks=self.num_blocks * parts)

    @classmethod
    def of(cls, kv: torch.Tensor, *, mover: str, handshake: bytes) -> Self:
        """Describe a contiguous tensor whose first dimension counts the blocks."""
        return cls(
            mover=mover,
            base_address=kv.data_ptr(),
            block_bytes=block_bytes_of(kv),
            num_blocks=kv.shape[0],
            device=kv.device.index or 0,
            memory="VRAM" if kv.is_cuda else "DRAM",
            handshake=handshake,
        )

    def check_mover(self, peer: Incarnation, theirs: MemoryDescriptor) -> None:
        """Raise TransferError unless the peer's memory is reached by our kind of mover."""
        if self.mover != theirs.mover:
            raise TransferError(f"mover is {self.mover!r} here but {theirs.mover!r} at peer {peer}; start both alike")


class TransferError(Exception):
    """A transfer failed or its peer is gone. Retryable on another peer; the destination must stay quarantined."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A transfer that we posted has ended: it touches neither memory any more.

    `error` is None when all bytes are in place, visible to the side that they were moved to.
    """

    transfer: int
    peer: Incarnation
    tag: bytes
    num_bytes: int
    seconds: float
    error: str | None


def check_block_bytes(peer: Incarnation, ours: int, theirs: int) -> None:
    """Raise TransferError unless a block of ours fills one of the peer's."""
    if ours != theirs:
        raise TransferError(f"block_bytes is {ours} here but {theirs} at peer {peer}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A peer says that the write into our memory that it tagged `tag` is complete."""

    peer: Incarnation
    tag: bytes
    error: str | None = None  # what came is not what was sent: it must not be used


def block_bytes_of(kv: torch.Tensor) -> int:
    """Bytes of one block of a contiguous KV tensor whose first dimension counts the blocks."""
    if not kv.is_contiguous():
        raise ValueError(f"a KV tensor must be contiguous, got shape {tuple(kv.shape)} with strides {kv.stride()}")
    return kv.nbytes // kv.shape[0]


def kv_rows(kv: torch.Tensor) -> torch.Tensor:
    """View as uint8 [num_blocks, block_bytes]."""
    block_bytes = block_bytes_of(kv)
    return kv.view(kv.shape[0], -1).view(torch.uint8).view(-1, block_bytes)


class News(NamedTuple):
    """What happened since the last poll."""

    completions: list[Completion]
    arrivals: list[Arrival]


def rank_name(worker: Incarnation, rank: int) -> Incarnation:
    """Name one rank of a worker's life among movers; the first rank speaks for all and bears the worker's name."""
    return worker if rank == 0 else Incarnation(f"{worker}.{rank}")  # an incarnation holds no dot


def worker_of(rank: Incarnation) -> Incarnation:
    return Incarnation(rank.partition(".")[0])


class KVMover(Protocol):
    """Moves a worker's blocks, on all its ranks. Called from one thread at a time.

    Nothing waits for a peer; `poll` makes progress and reports what has happened. A post may copy before it returns
    (host memory does), so a mover belongs off the event loop: see `MoverLoop`.
    """

    def describe(self) -> MemoryDescriptor: ...

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        """Prepare transfers to `peer`. Raises TransferError if its mover differs, naming both."""
        ...

    def disconnect(self, peer: Incarnation) -> None:
        """Forget the peer and drop its transfers; idempotent. Pending ones are reported as failed.

        Nothing can recall bytes that already fly, so this is for a peer whose process is known dead, or one to which
        nothing is pending. To leave a living peer, wait for the Completions first.
        """
        ...

    def write(self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes) -> int:
        """Post a write of our blocks onto the peer's blocks `target` (int64). Source: see `reblock.source_blocks`.

        The peer gets an `Arrival` with `tag` once every byte is visible there. Returns the id that its `Completion`
        will carry. Raises TransferError when it cannot even be posted.
        """
        ...

    def restore(self, blocks: np.ndarray, parts: int) -> None:
        """Make blocks what they are to be, once a peer with `parts` times our ranks has wholly written them.

        Needed where `parts` > 1 or they came compressed. Returns when that is done on every rank.
        """
        ...

    def poll(self) -> News: ...

    def close(self) -> None: ...


class PlainMover(Protocol):
    """What carries one rank's bytes to one rank of a peer: a library behind one face. Otherwise like `KVMover`."""

    def describe(self) -> MemoryDescriptor: ...

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None: ...

    def disconnect(self, peer: Incarnation) -> None: ...

    def stage(self, memory: torch.Tensor) -> int:
        """Register more memory of ours to write from; it stays until `close`. Returns its handle."""
        ...

    def write(
        self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes, staging: int | None = None
    ) -> int:
        """`source` counts blocks of our KV, or of the memory that `staging` names, of the length of the peer's."""
        ...

    def poll(self) -> News: ...

    def close(self) -> None: ...
