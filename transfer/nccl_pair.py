"""One direction between two movers: a socket, a communicator of torch's for two, and the threads that use them.

A write is announced over the socket, sent as one tensor, put in its place by the reader, and acknowledged. A socket
that ends, as by a death, ends the communicator with it.
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateImportUsage=false
# torch's stubs leave out most of what a backend has; torch's own functions would put the group into its globals.

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections import deque
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
    TransferError,
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


encode = msgspec.msgpack.Encoder().encode
decode_address: Callable[[bytes], Address] = msgspec.msgpack.Decoder(Address).decode
decode_meeting: Callable[[bytes], Meeting] = msgspec.msgpack.Decoder(Meeting).decode
_decode_announced: Callable[[bytes], Announced] = msgspec.msgpack.Decoder(Announced).decode


@dataclass(frozen=True, slots=True)
class PairWrite:
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
            hang_up(sock)
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


class Outgoing(_Pair):
    """Sends one write after the other on one thread, and hears of their ends on another."""

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
        self._writes: queue.SimpleQueue[PairWrite | None] = queue.SimpleQueue()
        self._pending: deque[PairWrite] = deque()  # not ended, oldest first; guarded by the lock
        self._start(self._serve, "to")

    def write(self, write: PairWrite) -> None:
        with self.lock:
            if self.error is not None:
                raise TransferError(self.error)
            self._pending.append(write)
            self._writes.put(write)

    def end(self, error: str) -> None:
        super().end(error)
        self._writes.put(None)
        with self.lock:
            left, self._pending = self._pending, deque()
        for write in left:
            self._tell(Completion(write.id, self.peer, write.tag, 0, time.perf_counter() - write.posted_s, error))

    def _start(self, run: Callable[[], None], name: str) -> None:
        def root() -> None:
            try:
                set_device(self.device)
                run()
            except (OSError, EOFError, RuntimeError, TransferError) as error:  # torch's are RuntimeErrors
                self.end(f"{type(error).__name__}: {error}")

        threading.Thread(target=root, name=f"{name}-{self.peer}", daemon=True).start()

    def _serve(self) -> None:
        with socket.create_connection((self._address.host, self._address.port), MEET_S) as sock:
            sock.settimeout(None)
            self.sock = sock
            store = dist.TCPStore(sock.getsockname()[0], 0, 2, is_master=True, timeout=NEVER, wait_for_workers=False)
            _send(sock, encode(Meeting(self._name, store.port)))
            self._start(self._hear, "acknowledged")
            group = self.meet(sock, store, 0)
            while (write := self._writes.get()) is not None:
                _send(sock, encode(Announced(write.tag, write.target.tobytes(), write.rows.shape[1])))
                data = write.rows[torch.tensor(write.source, device=self.device)]
                _wait(group.send([data], 1, 0), self.device, sock)

    def _hear(self) -> None:
        """Take acknowledgements, which come in the order of the writes; their end is the reader's."""
        assert self.sock is not None
        while True:
            receive(self.sock)
            with self.lock:
                if self.error is not None:
                    return
                if not self._pending:
                    raise TransferError(f"{self.peer} acknowledges what was not written")
                write = self._pending.popleft()
            num_bytes = len(write.source) * write.rows.shape[1]
            seconds = time.perf_counter() - write.posted_s
            self._tell(Completion(write.id, self.peer, write.tag, num_bytes, seconds, None))


class Incoming(_Pair):
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
            announced = _decode_announced(receive(sock))
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


def set_device(device: torch.device) -> None:
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


def receive(sock: socket.socket) -> bytes:
    """Raises EOFError when the other side has ended."""
    return _receive_exactly(sock, int.from_bytes(_receive_exactly(sock, HEADER_BYTES), "big"))


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        if not (part := sock.recv(size - len(received))):
            raise EOFError("the peer has hung up")
        received += part
    return bytes(received)


def hang_up(sock: socket.socket) -> None:
    """Wake whoever waits on it."""
    with suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
