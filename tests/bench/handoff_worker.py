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

from baton.actors.collector import spare_startup
from baton.actors.config import WorkerConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.scheduler import Plan
from baton.actors.engine.updates import Update
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

    computed_s: float = 0.0  # P's engine: the last chunk is complete and its token known
    told_s: float = 0.0  # P's event loop hears of it
    arrived_s: float = 0.0  # D's mover: the last write's notice
    landed_s: float = 0.0  # D's event loop: all has arrived
    adopted_s: float = 0.0  # D's engine takes it over
    launched_s: float = 0.0  # its first step is queued on the device
    sampled_s: float = 0.0  # that step's token is known
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
        self.restore = mover.restore
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


class NotingEngine:
    """Adds notes to an engine's calls, in the engine's thread."""

    def __init__(self, engine: Engine, notes: Notes) -> None:
        self._engine_run, self._engine_adopt, self._engine_launch = engine.run, engine.adopt_import, engine._launch
        self._notes = notes
        self._adopted: list[str] = []
        engine.run, engine.adopt_import, engine._launch = self.run, self.adopt_import, self.launch

    def adopt_import(self, request_id: str, tokens: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        self._engine_adopt(request_id, tokens, drafts)
        self._note(request_id).adopted_s = time.monotonic()
        self._adopted.append(request_id)

    def launch(self, plan: Plan) -> None:
        self._engine_launch(plan)
        for request_id in self._adopted:
            self._note(request_id).launched_s = time.monotonic()
        self._adopted.clear()

    def run(self) -> list[Update]:
        updates = self._engine_run()
        now = time.monotonic()
        for update in updates:
            if update.finish is not None and update.blocks:  # an export
                self._note(handover_of(update.request_id)).computed_s = now
            elif update.tokens and (note := self._notes.get(update.request_id)) is not None and not note.sampled_s:
                note.sampled_s = now
        return updates

    def _note(self, request_id: str) -> RequestNotes:
        return self._notes.setdefault(request_id, RequestNotes())


def handover_of(engine_id: str) -> str:
    """An export is named HANDOVER#EPOCH@PEER in its engine."""
    return engine_id.split("#")[0]


class BenchWorker(Worker):
    def __init__(self, worker_id: str, config: WorkerConfig) -> None:
        super().__init__(worker_id=worker_id, role="both", config=config)
        self.notes: Notes = {}

    def _join_roles(self, mover_loop: MoverLoop) -> None:
        mover_loop._mover = NotingMover(mover_loop._mover, self.notes)
        NotingEngine(self._built.engine, self.notes)
        super()._join_roles(mover_loop)

    def _on_report(self, report: StepReport) -> None:
        now = time.monotonic()
        for update in report.updates:
            if update.finish is not None and update.blocks:
                self.notes.setdefault(handover_of(update.request_id), RequestNotes()).told_s = now
        super()._on_report(report)

    def on_landed(self, request_id: str, moved: Moved) -> None:
        self.notes.setdefault(request_id, RequestNotes()).landed_s = time.monotonic()
        super().on_landed(request_id, moved)


async def serve(worker_id: str, config: WorkerConfig, answers: TextIO) -> None:
    worker = BenchWorker(worker_id, config)
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    info = await worker.start()
    spare_startup()
    print(encode(info).decode(), file=answers, flush=True)
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
