"""The protocol of whatever moves KV blocks between two workers' memories.

Knows block numbers and bytes; knows no requests, no engine, no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

import msgspec
import numpy as np

Incarnation = NewType("Incarnation", str)  # one life of one worker process; peers are never identified by address


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know to write into (or read from) our KV: plain numbers and the mover's opaque handshake."""

    mover: str
    base_address: int
    block_bytes: int
    num_blocks: int
    device: int  # CUDA ordinal, or 0 for host memory
    memory: str  # "DRAM" or "VRAM"
    handshake: bytes  # NIXL agent metadata; empty for movers that need none


class TransferError(Exception):
    """A transfer failed or its peer is gone. Retryable on another peer; the destination must stay quarantined."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A transfer that we posted has ended. `error` is None when all bytes are in place."""

    transfer: int
    num_bytes: int
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A peer says that the write it tagged `tag` is complete in our memory."""

    peer: Incarnation
    tag: bytes


class KVMover(Protocol):
    """Called from one thread. Nothing blocks: posts return at once, `poll` reports what has happened since."""

    def describe(self) -> MemoryDescriptor: ...

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        """Prepare transfers to `peer`. Raises TransferError if its mover or block size differs, naming both values."""
        ...

    def disconnect(self, peer: Incarnation) -> None:
        """Forget the peer and drop its transfers; idempotent. Pending ones are reported as failed."""
        ...

    def write(self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes) -> int:
        """Post a write of our blocks `source` onto the peer's blocks `target` (int64 arrays of equal length).

        The peer gets an `Arrival` with `tag` once every byte is visible there. Returns the id that its `Completion`
        will carry. Raises TransferError when it cannot even be posted.
        """
        ...

    def poll(self) -> tuple[list[Completion], list[Arrival]]: ...

    def close(self) -> None: ...
