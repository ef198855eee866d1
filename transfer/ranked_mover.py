"""The mover of a tensor-parallel worker: every rank moves its own share of the heads, rank 0 commands and counts.

A line (a socket pair) joins rank 0's mover with that of each other rank. It carries msgpack, and its end is an end of
the worker: see `actors/ranks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from baton.transfer.mover import Arrival, Completion, Incarnation, KVMover, MemoryDescriptor, News, TransferError

EAGER_POLL_S = 200e-6  # while anything may be under way
IDLE_POLL_S = 50e-3  # while no peer is connected
ANSWER_S = 30.0  # for a rank to do what waits for no peer; one that takes longer hangs, and the worker cannot go on


class Line(Protocol):
    """One end of it, as `multiprocessing.connection.Connection` has it."""

    def send_bytes(self, message: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def poll(self, within_s: float = 0.0, /) -> bool: ...


# Rank 0 to a rank.


class Join(msgspec.Struct, frozen=True, tag=True):
    worker: Incarnation
    host: str  # where this node's movers listen, if they do


class Connect(msgspec.Struct, frozen=True, tag=True):
    peer: Incarnation
    memory: MemoryDescriptor


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    peer: Incarnation


class Write(msgspec.Struct, frozen=True, tag=True):
    peer: Incarnation
    number: int
    source: bytes  # int64
    num_columns: int  # of source; 0: it has one dimension
    target: bytes
    tag: bytes


class Restore(msgspec.Struct, frozen=True, tag=True):
    blocks: bytes
    parts: int


Command = Join | Connect | Disconnect | Write | Restore

# A rank to rank 0.


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answers every command but Write."""

    error: str | None
    memory: MemoryDescriptor | None = None  # of Join


class Ended(msgspec.Struct, frozen=True, tag=True):
    number: int  # of the Write
    num_bytes: int
    seconds: float
    error: str | None


class Arrived(msgspec.Struct, frozen=True, tag=True):
    peer: Incarnation
    tag: bytes
    error: str | None


Report = Done | Ended | Arrived

_encode = msgspec.msgpack.Encoder().encode
_decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
_decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


@dataclass(slots=True, eq=False)
class _Posted:
    """One write of the worker, under way until every rank has ended its share."""

    number: int
    peer: Incarnation
    tag: bytes
    num_left: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None

    def take(self, num_bytes: int, seconds: float, error: str | None) -> None:
        self.num_left -= 1
        self.num_bytes += num_bytes
        self.seconds = max(self.seconds, seconds)
        self.error = self.error or error


class RankedMover:
    """A `KVMover` over rank 0's own and the lines to the other ranks. Waits for the ranks, which wait for no peer."""

    def __init__(self, mover: KVMover, lines: Sequence[Line], worker: Incarnation, host: str) -> None:
        self._mover = mover
        self._lines = lines
        self._posted: dict[int, _Posted] = {}
        self._own: dict[int, int] = {}  # rank 0's transfer -> number
        self._num_writes = 0
        self._arrived: Counter[Arrival] = Counter()
        self._news = News([], [])
        answers = self._ask(Join(worker, host))
        followers = tuple(answer.memory for answer in answers if answer.memory is not None)
        self._memory = msgspec.structs.replace(mover.describe(), followers=followers)

    def describe(self) -> MemoryDescriptor:
        return self._memory

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        self._forget_arrivals(peer)
        self._mover.connect(peer, memory)
        for answer in self._ask(Connect(peer, memory)):
            if answer.error is not None:
                raise TransferError(answer.error)

    def disconnect(self, peer: Incarnation) -> None:
        self._mover.disconnect(peer)
        self._ask(Disconnect(peer))
        self._forget_arrivals(peer)

    def write(self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes) -> int:
        transfer = self._mover.write(peer, source, target, tag)
        self._num_writes += 1
        number = self._own[transfer] = self._num_writes
        self._posted[number] = _Posted(number, peer, tag, 1 + len(self._lines))
        num_columns = source.shape[1] if source.ndim == 2 else 0
        self._tell(Write(peer, number, source.tobytes(), num_columns, target.tobytes(), tag))
        return number

    def restore(self, blocks: np.ndarray, parts: int) -> None:
        self._tell(Restore(blocks.tobytes(), parts))
        self._mover.restore(blocks, parts)
        self._answers()

    def poll(self) -> News:
        own = self._mover.poll()
        for done in own.completions:
            self._on_ended(Ended(self._own.pop(done.transfer), done.num_bytes, done.seconds, done.error))
        for arrival in own.arrivals:
            self._on_arrival(arrival)
        try:
            for line in self._lines:
                while line.poll():
                    self._on_report(_decode_report(line.recv_bytes()))
        except (EOFError, OSError):
            pass  # a rank has ended, and with it the worker: whoever watches the ranks says so
        news, self._news = self._news, News([], [])
        return news

    def close(self) -> None:
        self._mover.close()  # a rank closes its own when the line ends

    def _tell(self, command: Command) -> None:
        message = _encode(command)
        try:
            for line in self._lines:
                line.send_bytes(message)
        except OSError as error:
            raise TransferError(f"a rank of this worker has ended ({error})") from error

    def _ask(self, command: Command) -> list[Done]:
        self._tell(command)
        return self._answers()

    def _answers(self) -> list[Done]:
        """Wait for each rank's answer, and take in the news that come before it. RuntimeError: a rank hangs."""
        answers: list[Done] = []
        for line in self._lines:
            try:
                while not isinstance(report := self._next_report(line), Done):
                    self._on_report(report)
            except (EOFError, OSError) as error:
                raise TransferError(f"a rank of this worker has ended ({error})") from error
            answers.append(report)
        return answers

    def _next_report(self, line: Line) -> Report:
        if not line.poll(ANSWER_S):
            raise RuntimeError(f"the mover of a rank of this worker has not answered for {ANSWER_S} s")
        return _decode_report(line.recv_bytes())

    def _on_report(self, report: Report) -> None:
        match report:
            case Ended():
                self._on_ended(report)
            case Arrived(peer, tag, error):
                self._on_arrival(Arrival(peer, tag, error))
            case Done():
                raise AssertionError("a rank answers what nobody asked")

    def _on_ended(self, ended: Ended) -> None:
        posted = self._posted[ended.number]
        posted.take(ended.num_bytes, ended.seconds, ended.error)
        if posted.num_left == 0:
            del self._posted[ended.number]
            self._news.completions.append(
                Completion(posted.number, posted.peer, posted.tag, posted.num_bytes, posted.seconds, posted.error)
            )

    def _on_arrival(self, arrival: Arrival) -> None:
        self._arrived[arrival] += 1
        if arrival.error is not None or self._arrived[arrival] == 1 + len(self._lines):
            del self._arrived[arrival]
            self._news.arrivals.append(arrival)

    def _forget_arrivals(self, peer: Incarnation) -> None:
        for arrival in [arrival for arrival in self._arrived if arrival.peer == peer]:
            del self._arrived[arrival]


@dataclass(slots=True)
class RankServer:
    """A rank other than 0: obeys the line until it ends, on a thread of its own."""

    line: Line
    make: Callable[[Join], KVMover]
    _mover: KVMover = field(init=False)
    _numbers: dict[int, int] = field(default_factory=dict[int, int])  # of Writes, by transfer
    _peers: set[Incarnation] = field(default_factory=set[Incarnation])

    def run(self) -> None:
        """Raises EOFError or OSError when the line has ended."""
        join = _decode_command(self.line.recv_bytes())
        assert isinstance(join, Join)
        self._mover = self.make(join)
        self._say(Done(None, self._mover.describe()))
        while True:
            if self.line.poll(EAGER_POLL_S if self._peers else IDLE_POLL_S):
                self._obey(_decode_command(self.line.recv_bytes()))
            self._report()

    def _say(self, report: Report) -> None:
        self.line.send_bytes(_encode(report))

    def _report(self) -> None:
        news = self._mover.poll()
        for done in news.completions:
            self._say(Ended(self._numbers.pop(done.transfer), done.num_bytes, done.seconds, done.error))
        for arrival in news.arrivals:
            self._say(Arrived(arrival.peer, arrival.tag, arrival.error))

    def _obey(self, command: Command) -> None:
        if isinstance(command, Write):
            self._write(command)
            return
        error: str | None = None
        try:
            self._do(command)
        except TransferError as caught:
            error = str(caught)
        self._report()  # what a disconnect has ended comes before its answer
        self._say(Done(error))

    def _do(self, command: Join | Connect | Disconnect | Restore) -> None:
        match command:
            case Connect(peer, memory):
                self._mover.connect(peer, memory)
                self._peers.add(peer)
            case Disconnect(peer):
                self._mover.disconnect(peer)
                self._peers.discard(peer)
            case Restore(blocks, parts):
                self._mover.restore(np.frombuffer(blocks, np.int64), parts)
            case Join():
                raise AssertionError("a rank joins once")

    def _write(self, command: Write) -> None:
        source = np.frombuffer(command.source, np.int64)
        if command.num_columns:
            source = source.reshape(-1, command.num_columns)
        try:
            transfer = self._mover.write(command.peer, source, np.frombuffer(command.target, np.int64), command.tag)
        except TransferError as error:
            self._say(Ended(command.number, 0, 0.0, str(error)))
        else:
            self._numbers[transfer] = command.number
