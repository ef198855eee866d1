"""A `PlainMover` for sites without NIXL, over torch's process groups of two: NCCL between GPUs, gloo between CPUs.

A writer dials the reader the first time that it writes, and hosts the store where the two meet: one communicator for
each pair and direction, built anew with the next connection. All that waits for a peer does so on a thread of that
peer's own.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time

import msgspec
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
from baton.transfer.nccl_pair import (
    Address,
    Incoming,
    Outgoing,
    PairWrite,
    decode_address,
    decode_meeting,
    encode,
    hang_up,
    mover_name,
    receive,
    set_device,
)


class NcclMover:
    """`kv` is contiguous, its first dimension counts the blocks. Two GPUs are needed for a pair: NCCL has no other."""

    def __init__(self, kv: torch.Tensor, name: Incarnation, host: str) -> None:
        self._name = name
        self._rows = kv_rows(kv)
        self._device = kv.device
        self._listener = socket.create_server((host, 0))
        address = Address(host, self._listener.getsockname()[1])
        self._memory = MemoryDescriptor.of(kv, mover=mover_name(kv.device), handshake=encode(address))
        self._staging: list[torch.Tensor] = []
        self._peers: dict[Incarnation, MemoryDescriptor] = {}
        self._outgoing: dict[Incarnation, Outgoing] = {}
        self._incoming: dict[Incarnation, Incoming] = {}  # guarded by the lock, as is `_peers`
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._news: queue.SimpleQueue[Completion | Arrival] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    def describe(self) -> MemoryDescriptor:
        return self._memory

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        self._memory.check_mover(peer, memory)
        self.disconnect(peer)
        try:
            decode_address(memory.handshake)
        except msgspec.DecodeError as error:
            raise TransferError(f"cannot connect to peer {peer}: its handshake is no address ({error})") from error
        with self._lock:
            self._peers[peer] = memory

    def disconnect(self, peer: Incarnation) -> None:
        with self._lock:
            self._peers.pop(peer, None)
            pairs = (self._outgoing.pop(peer, None), self._incoming.pop(peer, None))
        for pair in pairs:
            if pair is not None:
                pair.end(f"disconnected from {peer}")

    def stage(self, memory: torch.Tensor) -> int:
        self._staging.append(kv_rows(memory))
        return len(self._staging) - 1

    def write(
        self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes, staging: int | None = None
    ) -> int:
        memory = self._peers.get(peer)
        if memory is None:
            raise TransferError(f"not connected to peer {peer}")
        rows = self._rows if staging is None else self._staging[staging]
        check_block_bytes(peer, rows.shape[1], memory.block_bytes)
        if len(target) and not 0 <= target.min() <= target.max() < memory.num_blocks:
            raise TransferError(f"peer {peer} has {memory.num_blocks} blocks, none numbered {target.max()}")
        if (pair := self._outgoing.get(peer)) is None:
            address = decode_address(memory.handshake)
            pair = self._outgoing[peer] = Outgoing(peer, self._device, self._name, address, self._news.put)
        id = next(self._ids)
        pair.write(PairWrite(id, rows, source, target, tag, time.perf_counter()))
        return id

    def poll(self) -> News:
        news = News([], [])
        while not self._news.empty():
            match self._news.get():
                case Completion() as completion:
                    news.completions.append(completion)
                case arrival:
                    news.arrivals.append(arrival)
        return news

    def close(self) -> None:
        hang_up(self._listener)
        for peer in list(self._peers):
            self.disconnect(peer)

    # On threads of their own.

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._receive, args=(sock,), name="kv-from", daemon=True).start()

    def _receive(self, sock: socket.socket) -> None:
        pair: Incoming | None = None
        try:
            with sock:
                meeting = decode_meeting(receive(sock))
                pair = Incoming(meeting.writer, self._device, self._rows, self._news.put)
                with self._lock:
                    if meeting.writer not in self._peers:
                        return
                    before, self._incoming[meeting.writer] = self._incoming.get(meeting.writer), pair
                if before is not None:
                    before.end("the writer has dialled anew")
                set_device(self._device)
                pair.serve(sock, meeting)
        except (OSError, EOFError, RuntimeError, TransferError, msgspec.DecodeError) as error:
            if pair is not None:
                pair.end(f"{type(error).__name__}: {error}")
