"""A `PlainMover` for sites without NIXL, over torch's process groups of two: NCCL between GPUs, gloo between CPUs.

A writer dials the reader the first time that it writes, and hosts the store where the two meet: one communicator for
each pair and direction. A write is announced over that socket, sent as one tensor, put in its place by the reader, and
acknowledged. A socket that ends, as by a death, ends the communicator; the next connection builds a new one. All that
waits for a peer does so on a thread of that peer's own.
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateImportUsage=false
# torch's stubs leave out most of what a backend has; torch's own functions would put the group into its globals.

from __future__ import annotations

import itertools
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

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

MEET_S = 10.0  # for the two sides of a pair to build a communicator
# NCCL's watchdog would end the process of one whose peer is slow: silence is the hand-over's business.
NEVER = timedelta(days=7)
POLL_S = 50e-6  # of a transfer between GPUs
HEADER_BYTES = 4
Group: TypeAlias = "c10d.ProcessGroupGloo | c10d.ProcessGroupNCCL"  # a CPU build of torch lacks the latter


class Address(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int


class Meeting(msgspec.Struct, frozen=True, array_like=True):
    """The first thing that a writer says."""

    writer: Incarnation
    store_port: int


class Announced(msgspec.Struct, frozen=True, array_like=True):
    tag: bytes
    target: bytes  # int64
    block_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode_address: Callable[[bytes], Address] = msgspec.msgpack.Decoder(Address).decode
_decode_meeting: Callable[[bytes], Meeting] = msgspec.msgpack.Decoder(Meeting).decode
_decode_announced: Callable[[bytes], Announced] = msgspec.msgpack.Decoder(Announced).decode


@dataclass(frozen=True, slots=True)
class _Write:
    id: int
    rows: torch.Tensor
    source: np.ndarray
    target: np.ndarray
    tag: bytes
    posted_s: float


@dataclass(eq=False)
class _Pair:
    """One direction to or from one peer: its socket, its communicator, and whether it has ended."""

    peer: Incarnation
    device: torch.device
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while memory is written
    sock: socket.socket | None = None
    group: Group | None = None
    error: str | None = None  # why it has ended

    def end(self, error: str) -> None:
        """End whatever waits here; from any thread. No memory of ours is written after this returns."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
            sock, group = self.sock, self.group
        if sock is not None:
            _hang_up(sock)
        if group is not None:
            group.abort()

    def meet(self, sock: socket.socket, store: dist.TCPStore, rank: int) -> Group:
        group = _make_group(store, rank, sock.getsockname()[0], self.device)
        with self.lock:
            self.group = group
            if self.error is None:
                return group
        group.abort()
        raise TransferError(self.error)


class _Outgoing(_Pair):
    """Sends one write after the other, on a thread of its own."""

    def __init__(
        self,
        peer: Incarnation,
        device: torch.device,
        name: Incarnation,
        address: Address,
        news: Callable[[Completion], None],
    ) -> None:
        super().__init__(peer, device)
        self._name = name
        self._address = address
        self._tell = news
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._current: _Write | None = None
        threading.Thread(target=self._run, name=f"to-{peer}", daemon=True).start()

    def write(self, write: _Write) -> None:
        with self.lock:
            if self.error is not None:
                raise TransferError(self.error)
            self._writes.put(write)

    def end(self, error: str) -> None:
        super().end(error)
        self._writes.put(None)

    def _run(self) -> None:
        try:
            _set_device(self.device)
            self._serve()
        except (OSError, EOFError, RuntimeError, TransferError) as error:  # torch's are RuntimeErrors
            self.end(f"{type(error).__name__}: {error}")
        self._fail_all()

    def _serve(self) -> None:
        with socket.create_connection((self._address.host, self._address.port), MEET_S) as sock:
            sock.settimeout(None)
            self.sock = sock
            store = dist.TCPStore(sock.getsockname()[0], 0, 2, is_master=True, timeout=NEVER, wait_for_workers=False)
            _send(sock, _encode(Meeting(self._name, store.port)))
            group = self.meet(sock, store, 0)
            while (write := self._writes.get()) is not None:
                self._current = write
                self._send(sock, group, write)
                self._current = None

    def _send(self, sock: socket.socket, group: Group, write: _Write) -> None:
        _send(sock, _encode(Announced(write.tag, write.target.tobytes(), write.rows.shape[1])))
        data = write.rows[torch.tensor(write.source, device=self.device)]
        _wait(group.send([data], 1, 0), self.device, sock)
        _receive(sock)  # an acknowledgement; a reader that cannot put it in its place hangs up
        seconds = time.perf_counter() - write.posted_s
        self._tell(Completion(write.id, self.peer, write.tag, data.nbytes, seconds, None))

    def _fail_all(self) -> None:
        """Nobody puts any more: `error` is set."""
        left = [] if self._current is None else [self._current]
        while not self._writes.empty():
            if (write := self._writes.get()) is not None:
                left.append(write)
        for write in left:
            seconds = time.perf_counter() - write.posted_s
            self._tell(Completion(write.id, self.peer, write.tag, 0, seconds, self.error))


class _Incoming(_Pair):
    """Puts what one writer sends in its place; runs on the thread that accepted it."""

    def __init__(
        self, peer: Incarnation, device: torch.device, rows: torch.Tensor, news: Callable[[Arrival], None]
    ) -> None:
        super().__init__(peer, device)
        self._rows = rows
        self._tell = news

    def serve(self, sock: socket.socket, meeting: Meeting) -> None:
        self.sock = sock
        store = dist.TCPStore(
            sock.getpeername()[0], meeting.store_port, 2, is_master=False, timeout=timedelta(seconds=MEET_S)
        )
        group = self.meet(sock, store, 1)
        while True:
            announced = _decode_announced(_receive(sock))
            self._receive(sock, group, announced)
            _send(sock, b"")

    def _receive(self, sock: socket.socket, group: Group, announced: Announced) -> None:
        rows = self._rows.view(-1, announced.block_bytes)
        target = np.frombuffer(announced.target, np.int64)
        if len(target) and not 0 <= target.min() <= target.max() < len(rows):
            raise TransferError(f"{self.peer} writes blocks that are not among our {len(rows)}")
        data = torch.empty((len(target), rows.shape[1]), dtype=torch.uint8, device=self.device)
        _wait(group.recv([data], 0, 0), self.device, sock)
        with self.lock, torch.inference_mode():  # the cache is a tensor of that mode
            if self.error is not None:
                raise TransferError(self.error)
            rows[torch.tensor(target, device=self.device)] = data
            _synchronise(self.device)
        self._tell(Arrival(self.peer, announced.tag))


class NcclMover:
    """`kv` is contiguous, its first dimension counts the blocks. Two GPUs are needed for a pair: NCCL has no other."""

    def __init__(self, kv: torch.Tensor, name: Incarnation, host: str) -> None:
        self._name = name
        self._rows = kv_rows(kv)
        self._device = kv.device
        self._listener = socket.create_server((host, 0))
        address = Address(host, self._listener.getsockname()[1])
        self._memory = MemoryDescriptor.of(kv, mover=mover_name(kv.device), handshake=_encode(address))
        self._staging: list[torch.Tensor] = []
        self._peers: dict[Incarnation, MemoryDescriptor] = {}
        self._outgoing: dict[Incarnation, _Outgoing] = {}
        self._incoming: dict[Incarnation, _Incoming] = {}  # guarded by the lock, as is `_peers`
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
            _decode_address(memory.handshake)
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
            address = _decode_address(memory.handshake)
            pair = self._outgoing[peer] = _Outgoing(peer, self._device, self._name, address, self._news.put)
        id = next(self._ids)
        pair.write(_Write(id, rows, source, target, tag, time.perf_counter()))
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
        _hang_up(self._listener)
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
        pair: _Incoming | None = None
        try:
            with sock:
                meeting = _decode_meeting(_receive(sock))
                pair = _Incoming(meeting.writer, self._device, self._rows, self._news.put)
                with self._lock:
                    if meeting.writer not in self._peers:
                        return
                    before, self._incoming[meeting.writer] = self._incoming.get(meeting.writer), pair
                if before is not None:
                    before.end("the writer has dialled anew")
                _set_device(self._device)
                pair.serve(sock, meeting)
        except (OSError, EOFError, RuntimeError, TransferError, msgspec.DecodeError) as error:
            if pair is not None:
                pair.end(f"{type(error).__name__}: {error}")


def mover_name(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _make_group(store: dist.TCPStore, rank: int, host: str, device: torch.device) -> Group:
    """Meet the other of the two. gloo does so here, NCCL when the first tensor is sent."""
    if device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = NEVER
        return c10d.ProcessGroupNCCL(store, rank, 2, options)
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=MEET_S)
    return c10d.ProcessGroupGloo(store, rank, 2, options)


def _set_device(device: torch.device) -> None:
    """The current device and stream are a thread's own; this one must not wait for prefill's kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))


def _wait(work: c10d.Work, device: torch.device, sock: socket.socket) -> None:
    """Wait for a transfer's end. NCCL would wait for ever for a peer that is gone, which its socket tells."""
    work.wait()
    if device.type == "cuda":
        ended = torch.cuda.Event()
        ended.record()
        while not ended.query():
            if _has_hung_up(sock):
                raise EOFError("the peer has hung up")
            time.sleep(POLL_S)


def _has_hung_up(sock: socket.socket) -> bool:
    readable, _, _ = select.select([sock], [], [], 0)
    return bool(readable) and not sock.recv(1, socket.MSG_PEEK)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(len(message).to_bytes(HEADER_BYTES, "big") + message)


def _receive(sock: socket.socket) -> bytes:
    """Raises EOFError when the other side has ended."""
    return _receive_exactly(sock, int.from_bytes(_receive_exactly(sock, HEADER_BYTES), "big"))


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        if not (part := sock.recv(size - len(received))):
            raise EOFError("the peer has hung up")
        received += part
    return bytes(received)


def _hang_up(sock: socket.socket) -> None:
    """Wake whoever waits on it."""
    with suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
