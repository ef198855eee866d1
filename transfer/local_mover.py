"""Movers of one process, joined by an explicit fabric: memcpy between registered tensors.

Tests hold transfers back and then deliver, fail or reorder them one by one; a single-process demo lets them through.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import torch

from baton.transfer.mover import (
    Arrival,
    Completion,
    Incarnation,
    MemoryDescriptor,
    News,
    TransferError,
    check_block_bytes,
    kv_rows,
)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTransfer:
    """A posted write of `owner`; `target` counts the memory of `peer` in blocks of the length of `rows`."""

    id: int
    owner: Incarnation
    peer: Incarnation
    source: np.ndarray
    target: np.ndarray
    tag: bytes
    posted_s: float
    rows: torch.Tensor  # that `source` counts


class LocalFabric:
    """With `hold`, posted transfers wait in `pending` until a test calls `deliver` or `fail`. Thread-safe."""

    def __init__(self, *, hold: bool = False) -> None:
        self.hold = hold
        self.pending: list[LocalTransfer] = []
        self._movers: dict[Incarnation, LocalMover] = {}
        self._lock = threading.RLock()
        self._num_posted = 0

    def join(self, mover: LocalMover) -> None:
        with self._lock:
            self._movers[mover.incarnation] = mover

    def is_alive(self, life: Incarnation) -> bool:
        return life in self._movers

    def kill(self, life: Incarnation) -> None:
        """Let a mover die as its process would: its own transfers vanish, those of others to it fail."""
        with self._lock:
            self._movers.pop(life, None)
            for transfer in list(self.pending):
                if transfer.owner == life:
                    self.pending.remove(transfer)
                elif transfer.peer == life:
                    self.fail(transfer, f"peer {life} died")

    def post(self, transfer: LocalTransfer) -> None:
        with self._lock:
            self.pending.append(transfer)
            if not self.hold:
                self.deliver(transfer)

    def next_id(self) -> int:
        with self._lock:
            self._num_posted += 1
            return self._num_posted

    @torch.inference_mode()
    def deliver(self, transfer: LocalTransfer) -> None:
        """Copy the bytes, now, and tell both sides."""
        with self._lock:
            width = transfer.rows.shape[1]
            target = self._movers[transfer.peer].rows.view(-1, width)
            sent = transfer.rows[torch.tensor(transfer.source)]
            target[torch.tensor(transfer.target)] = sent.to(target.device)
            self._movers[transfer.peer].news.arrivals.append(Arrival(transfer.owner, transfer.tag))
            self._complete(transfer, None)

    def fail(self, transfer: LocalTransfer, error: str) -> None:
        with self._lock:
            self._complete(transfer, error)

    def take_news(self, mover: LocalMover) -> News:
        with self._lock:
            news, mover.news = mover.news, News([], [])
            return news

    def _complete(self, transfer: LocalTransfer, error: str | None) -> None:
        self.pending.remove(transfer)
        owner = self._movers[transfer.owner]
        num_bytes = len(transfer.source) * transfer.rows.shape[1]
        seconds = time.perf_counter() - transfer.posted_s
        owner.news.completions.append(Completion(transfer.id, transfer.peer, transfer.tag, num_bytes, seconds, error))


class LocalMover:
    """A `KVMover` over `kv`, a contiguous tensor whose first dimension counts the blocks."""

    def __init__(self, fabric: LocalFabric, kv: torch.Tensor, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.rows = kv_rows(kv)
        self._staging: list[torch.Tensor] = []
        self.news = News([], [])
        self._kv = kv
        self._fabric = fabric
        self._peers: dict[Incarnation, int] = {}  # their block_bytes
        fabric.join(self)

    def describe(self) -> MemoryDescriptor:
        return MemoryDescriptor.of(self._kv, mover="local", handshake=b"")

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        self.describe().check_mover(peer, memory)
        if not self._fabric.is_alive(peer):
            raise TransferError(f"peer {peer} is not on this fabric; local movers reach only their own process")
        self._peers[peer] = memory.block_bytes

    def disconnect(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)
        for transfer in list(self._fabric.pending):
            if transfer.owner == self.incarnation and transfer.peer == peer:
                self._fabric.fail(transfer, f"disconnected from {peer}")

    def stage(self, memory: torch.Tensor) -> int:
        self._staging.append(kv_rows(memory))
        return len(self._staging) - 1

    def write(
        self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes, staging: int | None = None
    ) -> int:
        if peer not in self._peers or not self._fabric.is_alive(peer):
            raise TransferError(f"not connected to peer {peer}")
        rows = self.rows if staging is None else self._staging[staging]
        check_block_bytes(peer, rows.shape[1], self._peers[peer])
        id = self._fabric.next_id()
        self._fabric.post(LocalTransfer(id, self.incarnation, peer, source, target, tag, time.perf_counter(), rows))
        return id

    def poll(self) -> News:
        return self._fabric.take_news(self)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._fabric.kill(self.incarnation)
