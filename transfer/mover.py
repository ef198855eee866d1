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
    """What a peer must know to write into (or read from) our KV: plain numbers and the mover's opaque handshake."""

    mover: str
    base_address: int
    block_bytes: int
    num_blocks: int
    device: int  # CUDA ordinal, or 0 for host memory
    memory: Literal["DRAM", "VRAM"]
    handshake: bytes  # NIXL agent metadata; empty for movers that need none

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
    """A peer says that the transfer it tagged `tag` is complete: its write into our memory, or its read from it."""

    peer: Incarnation
    tag: bytes


def block_bytes_of(kv: torch.Tensor) -> int:
    """Bytes of one block of a contiguous KV tensor whose first dimension counts the blocks."""
    if not kv.is_contiguous():
        raise ValueError(f"a KV tensor must be contiguous, got shape {tuple(kv.shape)} with strides {kv.stride()}")
    return kv.nbytes // kv.shape[0]


class News(NamedTuple):
    """What happened since the last poll."""

    completions: list[Completion]
    arrivals: list[Arrival]


class KVMover(Protocol):
    """Called from one thread at a time. Nothing waits for a peer; `poll` makes progress and reports what has happened.

    A post may copy before it returns (host memory does), so a mover belongs off the event loop: see `MoverLoop`.
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

    def stage(self, memory: torch.Tensor) -> int:
        """Register more memory of ours to write from; it stays until `close`. Returns its handle."""
        ...

    def write(
        self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes, staging: int | None = None
    ) -> int:
        """Post a write of our blocks `source` onto the peer's blocks `target` (int64 arrays of equal length).

        `source` counts blocks of our KV, or of the memory that `staging` names. The peer gets an `Arrival` with `tag`
        once every byte is visible there. Returns the id that its `Completion` will carry. Raises TransferError when
        it cannot even be posted, e.g. because a block has not as many bytes here as there.
        """
        ...

    def read(self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes) -> int:
        """Post a read of the peer's blocks `source` into our blocks `target`; the pull mode of a `KVTicket`.

        The peer gets an `Arrival` with `tag` once it may let go of `source`. Otherwise like `write`.
        """
        ...

    def poll(self) -> News: ...

    def close(self) -> None: ...
