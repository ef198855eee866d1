"""One worker process of the hand-over benchmark: a real Worker that also notes when KV moves.

Prints its WorkerInfo as JSON, then answers each line on stdin with its Notes since the last one; ends with stdin.
`time.monotonic` is one clock for all processes of a machine, so that notes of several can be compared.

Run by handoff.py: python handoff_worker.py WORKER_ID CONFIG_JSON
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import TextIO

import msgspec
import numpy as np

from baton.actors.config import WorkerConfig
from baton.actors.generation import Moved
from baton.actors.messages import WorkerInfo
from baton.actors.step_loop import StepReport
from baton.actors.worker import Worker
from baton.transfer.mover import Incarnation, KVMover, News
from baton.transfer.mover_loop import MoverLoop
from baton.transfer.nixl_mover import set_env_defaults
from baton.transfer.wire import decode_tag


class WriteNote(msgspec.Struct):
    """One write as its mover saw it."""

    posted_s: float
    ended_s: float = 0.0
    num_blocks: int = 0
    num_bytes: int = 0
    num_runs: int = 0  # stretches of blocks that are adjacent on both sides: what NIXL makes one descriptor of


class RequestNotes(msgspec.Struct):
    """What one worker saw of a request's hand-over."""

    prefilled_s: float = 0.0  # the engine's last chunk is known to be complete
    landed_s: float = 0.0
    arrived_s: float = 0.0  # last write's notice
    writes: dict[int, WriteNote] = {}


Notes = dict[str, RequestNotes]
encode = msgspec.json.Encoder().encode
decode_notes = msgspec.json.Decoder(Notes).decode
decode_info = msgspec.json.Decoder(WorkerInfo).decode


class NotingMover:
    """A mover that writes down when its writes begin and end."""

    def __init__(self, mover: KVMover, notes: Notes) -> None:
        self._mover = mover
        self._notes = notes
        self.describe = mover.describe
        self.connect = mover.connect
        self.disconnect = mover.disconnect
        self.read = mover.read
        self.close = mover.close

    def write(self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes) -> int:
        name = decode_tag(tag)
        breaks = np.diff(target) != 1
        if source.ndim == 1:  # else it goes from staging, where all is adjacent
            breaks |= np.diff(source) != 1
        note = WriteNote(time.monotonic(), num_blocks=len(source), num_runs=1 + int(breaks.sum()))
        self._notes.setdefault(name.handover, RequestNotes()).writes[name.number] = note
        return self._mover.write(peer, source, target, tag)

    def poll(self) -> News:
        news = self._mover.poll()
        now = time.monotonic()
        for completion in news.completions:
            name = decode_tag(completion.tag)
            if (note := self._notes.get(name.handover)) is not None:
                note.writes[name.number].ended_s = now
                note.writes[name.number].num_bytes = completion.num_bytes
        for arrival in news.arrivals:
            self._notes.setdefault(decode_tag(arrival.tag).handover, RequestNotes()).arrived_s = now
        return news


class BenchWorker(Worker):
    def __init__(self, worker_id: str, config: WorkerConfig) -> None:
        super().__init__(worker_id=worker_id, role="both", config=config)
        self.notes: Notes = {}

    def _join_roles(self, mover_loop: MoverLoop) -> None:
        mover_loop._mover = NotingMover(mover_loop._mover, self.notes)
        super()._join_roles(mover_loop)

    def _on_report(self, report: StepReport) -> None:
        now = time.monotonic()
        for update in report.updates:
            if update.finish is not None and update.blocks:  # an export, named HANDOVER#EPOCH@PEER
                self.notes.setdefault(update.request_id.split("#")[0], RequestNotes()).prefilled_s = now
        super()._on_report(report)

    def on_landed(self, request_id: str, moved: Moved) -> None:
        self.notes.setdefault(request_id, RequestNotes()).landed_s = time.monotonic()
        super().on_landed(request_id, moved)


async def serve(worker_id: str, config: WorkerConfig, answers: TextIO) -> None:
    worker = BenchWorker(worker_id, config)
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    print(encode(await worker.start()).decode(), file=answers, flush=True)
    answering = asyncio.create_task(answer(worker, stdin, answers))
    await asyncio.wait([answering, worker.failed], return_when=asyncio.FIRST_COMPLETED)
    if worker.failed.done():
        worker.failed.result()
    await worker.stop()


async def answer(worker: BenchWorker, stdin: asyncio.StreamReader, answers: TextIO) -> None:
    while await stdin.readline():
        print(encode(worker.notes).decode(), file=answers, flush=True)
        worker.notes.clear()


if __name__ == "__main__":
    set_env_defaults(os.environ)
    logging.basicConfig(level=logging.WARNING, format=f"{sys.argv[1]} %(levelname)s %(message)s")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # progress bars and whatever libraries print must not stand among the answers
    asyncio.run(serve(sys.argv[1], WorkerConfig.model_validate_json(sys.argv[2]), answers))
