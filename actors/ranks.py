"""The processes of a tensor-parallel worker: rank 0 is the worker itself and starts the others, on its own node.

A line (a socket pair) joins rank 0 with each of them: bytes, never pickles, and its end tells either side of the
other's. A rank that ends takes all others with it; a worker that ends, however, takes its ranks with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from baton.actors.config import WorkerConfig
from baton.actors.engine.batch import Runner
from baton.actors.engine.errors import RankLost
from baton.actors.engine.runner_ranks import NOTICE_S, RankRunner
from baton.kernels.collective import Collective, NoCollective, TorchCollective, join_ranks

MEET_S = 300.0  # for the others to come, and for one collective: compiling kernels may hold a rank up
STOP_S = 10.0  # for a rank to end by itself when its line has ended
ABORT_S = 1.0  # for the collective's end; CUDA graphs that use it may outlive it
_PR_SET_PDEATHSIG = 1


class Ranks(Protocol):
    """The other ranks of a worker, as rank 0 sees them."""

    @property
    def collective(self) -> Collective: ...

    @property
    def mover_lines(self) -> Sequence[Connection]:
        """Return a line to the mover of each rank: see `baton.transfer.ranked_mover`."""
        ...

    def agree(self, num_blocks: int) -> int:
        """Return how many KV blocks every rank has room for. Each rank asks once, before it makes its cache."""
        ...

    def lead(self, runner: Runner) -> Runner:
        """Make rank 0's runner one that has the others run the same."""
        ...

    async def wait_lost(self) -> None:
        """Raise RankLost when a rank ends before `close`; never return."""
        ...

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        ...


class NoRanks:
    """A worker whose model is whole."""

    collective: Collective = NoCollective()
    mover_lines: Sequence[Connection] = ()

    def agree(self, num_blocks: int) -> int:
        return num_blocks

    def lead(self, runner: Runner) -> Runner:
        return runner

    async def wait_lost(self) -> None:
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank other than 0 is given at its start."""

    rank: int
    world: int
    rendezvous: Path
    line: Connection
    mover_line: Connection

    def take(self, device: torch.device) -> TorchCollective:
        """Tie this process's life to rank 0's, then meet the other ranks."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; rank 0 decides
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is None or os.getppid() != parent.pid:
            os._exit(1)  # it ended before its end could reach us
        self.line.send_bytes(b"")
        return join_ranks(self.rendezvous, self.rank, self.world, device, MEET_S)

    def agree(self, num_blocks: int) -> int:
        """See `Ranks.agree`."""
        self.line.send_bytes(_encode(num_blocks))
        return _decode(self.line.recv_bytes())


FollowerMain = Callable[[WorkerConfig, Seat], None]

_encode: Callable[[int], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], int] = msgspec.msgpack.Decoder(int).decode


class RankProcesses:
    """Starts `main` once for each rank but 0. Raises RankLost if one ends before all have met."""

    def __init__(self, config: WorkerConfig, device: torch.device, main: FollowerMain) -> None:
        world = config.tensor_parallel
        self._folder = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        rendezvous = self._folder / "rendezvous"
        context = multiprocessing.get_context("spawn")
        pairs = [(context.Pipe(), context.Pipe()) for _ in range(1, world)]
        seats = [Seat(rank, world, rendezvous, a[1], b[1]) for rank, (a, b) in enumerate(pairs, 1)]
        self._lines = [ours for (ours, _), _ in pairs]
        self.mover_lines = [ours for _, (ours, _) in pairs]
        self._processes = [
            context.Process(target=main, args=(config, seat), name=f"rank-{seat.rank}", daemon=True) for seat in seats
        ]
        self._collective: TorchCollective | None = None  # until all have met
        self._is_closing = threading.Event()
        self._lost: Future[None] = Future()
        self._started: Future[None] = Future()
        # This thread starts the processes, for a parent's death signal comes when the thread that forked ends.
        self._watcher = threading.Thread(target=self._watch, args=(seats,), name="baton-ranks", daemon=True)
        self._watcher.start()
        try:
            self._started.result()
            self._gather()
            self._collective = join_ranks(rendezvous, 0, world, device, MEET_S)
        except BaseException:
            self.close()
            raise

    @property
    def collective(self) -> Collective:
        assert self._collective is not None
        return self._collective

    def agree(self, num_blocks: int) -> int:
        fewest = min(num_blocks, *(_decode(message) for message in self._gather()))
        self.send(_encode(fewest))
        return fewest

    def lead(self, runner: Runner) -> Runner:
        return RankRunner(runner, self)

    def send(self, message: bytes) -> None:
        for rank, line in enumerate(self._lines, 1):
            try:
                line.send_bytes(message)
            except OSError as error:
                self.check(within_s=NOTICE_S)
                raise RankLost(rank, f"has hung up ({error})") from error

    def check(self, within_s: float = 0.0) -> None:
        if within_s or self._lost.done():
            with suppress(TimeoutError):
                self._lost.result(within_s)

    async def wait_lost(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._lost))

    def close(self) -> None:
        self._is_closing.set()
        for line in (*self._lines, *self.mover_lines):
            line.close()
        self._watcher.join(STOP_S)
        self._kill()
        self._watcher.join()
        self._abort()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _gather(self) -> list[bytes]:
        """Receive one message of each rank."""
        messages: list[bytes] = []
        for rank, line in enumerate(self._lines, 1):
            try:
                messages.append(line.recv_bytes())
            except (EOFError, OSError) as error:
                raise RankLost(rank, "ended during its start") from error
        return messages

    def _watch(self, seats: list[Seat]) -> None:
        try:
            for process, seat in zip(self._processes, seats, strict=True):
                process.start()
                for line in (seat.line, seat.mover_line):
                    line.close()  # ours of its two copies, so that its end ends the line
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        ended = wait([process.sentinel for process in self._processes])
        if not self._is_closing.is_set():
            self._report_lost(next(rank for rank, p in enumerate(self._processes, 1) if p.sentinel in ended))
        for process in self._processes:
            process.join()

    def _report_lost(self, rank: int) -> None:
        process = self._processes[rank - 1]
        process.join()
        self._lost.set_exception(RankLost(rank, f"ended with exit code {process.exitcode}"))
        self._kill()
        self._abort()  # else what waits on the device for the lost rank would wait for ever

    def _kill(self) -> None:
        for process in self._processes:
            if process.pid is not None:
                process.kill()

    def _abort(self) -> None:
        """End what waits on the device. NCCL's call itself returns only when no graph that captured it is left."""
        if self._collective is not None:
            thread = threading.Thread(target=self._collective.abort, name="baton-abort", daemon=True)
            thread.start()
            thread.join(ABORT_S)


def start_ranks(config: WorkerConfig, device: torch.device, main: FollowerMain) -> Ranks:
    return NoRanks() if config.tensor_parallel == 1 else RankProcesses(config, device, main)
