"""A worker process under test: a real Worker on the fake engine and the NIXL DRAM mover, with gates in its seams.

`main` is what the Ray shell is elsewhere: it starts the worker, obeys commands, and drains on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, cast

from baton.actors.collector import spare_startup
from baton.actors.config import WorkerConfig
from baton.actors.messages import Cancel, Frame, Role, Submit, ToWorker
from baton.actors.worker import Worker
from baton.transfer.mover import Arrival, Completion, Incarnation
from baton.transfer.mover_loop import MoverLoop
from baton.transfer.wire import Hello, Message, decode_tag
from tests.actors.fake_engine import build_fake_engine
from tests.chaos import control
from tests.chaos.gates import Gates, GateSpec

STEP_S = 1e-3
DRAIN_S = 5.0
STOP_S = 3.0


class GatedMover:
    """A MoverLoop whose writes pass the gate `write`."""

    def __init__(self, mover: MoverLoop, worker: ChaosWorker) -> None:
        self._mover = mover
        self._worker = worker
        self.connect = mover.connect
        self.disconnect = mover.disconnect
        self.restore = mover.restore
        self.expect_arrivals = mover.expect_arrivals
        self.close = mover.close
        self.wait_ended = mover.wait_ended

    def write(self, peer: Incarnation, source: Sequence[int], target: Sequence[int], tag: bytes) -> None:
        failed = Completion(0, peer, tag, 0, 0.0, "injected: the write could not be posted")
        self._worker.gates.pass_callback(
            "write",
            decode_tag(tag).handover,
            go=partial(self._mover.write, peer, source, target, tag),
            fail=partial(self._worker._on_completion, failed),
        )


class ChaosWorker(Worker):
    gates: Gates

    def _join_roles(self, mover_loop: MoverLoop) -> None:
        super()._join_roles(cast(MoverLoop, GatedMover(mover_loop, self)))

    async def _serve_gateway(self, calls: AsyncIterator[ToWorker], context: Any) -> AsyncIterator[Frame]:
        heard = self.gates.pass_messages("hears", calls, _requests_of)
        async with aclosing(super()._serve_gateway(heard, context)) as frames:  # type: ignore[type-var]
            async for frame in self.gates.pass_messages("says", frames, _requests_of):
                yield frame

    async def _serve_peer(self, messages: AsyncIterator[Message], context: Any) -> AsyncIterator[Message]:
        heard = self.gates.pass_messages("hears", messages, _requests_of)
        async with aclosing(super()._serve_peer(heard, context)) as answers:  # type: ignore[type-var]
            async for message in self.gates.pass_messages("says", answers, _requests_of):
                yield message

    def _on_completion(self, completion: Completion) -> None:
        take = super()._on_completion
        failed = replace(completion, error="injected: the write failed")
        request_id = decode_tag(completion.tag).handover
        self.gates.pass_callback("completion", request_id, go=partial(take, completion), fail=partial(take, failed))

    def _on_arrival(self, arrival: Arrival) -> None:
        take = super()._on_arrival
        request_id = decode_tag(arrival.tag).handover
        self.gates.pass_callback("arrival", request_id, go=partial(take, arrival), fail=lambda: None)

    async def state(self) -> control.State:
        counts = await self.counts()
        prefill, decode = self._prefill, self._decode
        return control.State(
            total=counts.total,
            free=counts.free,
            cached=counts.cached,
            held=counts.held,
            num_live=len(self._live),
            num_exports=len(prefill) + len(prefill._exports),
            num_imports=len(decode) + len(decode._target),
            num_quarantined=decode._target.num_quarantined,
            num_gateways=len(self._sessions),
            num_prefill_peers=len(decode._connections),
            num_decode_peers=len(prefill._sessions),
        )

    async def drop_peers(self) -> None:
        for connection in list(self._decode._connections.values()):
            await connection.link.close()

    def hang_engine(self) -> None:
        self._steps.post(lambda engine: threading.Event().wait())


def _requests_of(message: Message | ToWorker | Frame) -> set[str]:
    match message:
        case Submit():
            return {message.request.id}
        case Cancel():
            return {message.request_id}
        case Hello():
            return {"Hello"}
        case Frame():
            return {output.request_id for output in message.outputs}
        case _:
            handover = getattr(message, "handover", None)
            return set() if handover is None else {handover}


def main(sock: socket.socket, spec: control.WorkerSpec) -> None:
    logging.basicConfig(level=os.environ.get("BATON_CHAOS_LOG", "CRITICAL"), format=f"{spec.worker_id} %(message)s")
    asyncio.run(_run(sock, spec))
    os._exit(0)  # an engine thread that hangs must not keep the process


async def _run(sock: socket.socket, spec: control.WorkerSpec) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)

    def say(answer: control.Answer) -> None:
        writer.write(control.encode(answer) + b"\n")

    config = WorkerConfig.model_validate_json(spec.config)
    role = cast(Role, spec.role)
    worker = ChaosWorker(
        worker_id=spec.worker_id, role=role, config=config, build=partial(build_fake_engine, step_s=STEP_S)
    )
    worker.port = spec.port
    worker.gates = Gates(lambda gate: say(control.Reached(gate)))
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    info = await worker.start()
    spare_startup()
    say(control.Started(info))
    obeying = asyncio.create_task(_obey(worker, reader, say))
    ends = [obeying, asyncio.create_task(terminated.wait()), worker.failed]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if worker.failed.done():
        logging.critical("worker failed: %r", worker.failed.exception())
        os._exit(1)
    if terminated.is_set():
        await asyncio.wait([asyncio.create_task(worker.drain(DRAIN_S))], timeout=2 * DRAIN_S)
    await asyncio.wait([asyncio.create_task(worker.stop())], timeout=STOP_S)


async def _obey(worker: ChaosWorker, reader: asyncio.StreamReader, say: Any) -> None:
    """Until the test closes the socket, or dies."""
    while line := await reader.readline():
        match control.decode_command(line):
            case GateSpec() as gate:
                worker.gates.arm(gate)
            case control.OpenGates():
                worker.gates.open_all()
            case control.PeerDead(incarnation):
                await worker.peer_dead(incarnation)
            case control.DropPeers():
                await worker.drop_peers()
            case control.AskState():
                say(await worker.state())
            case control.HangEngine():
                worker.hang_engine()
            case control.Generate():
                raise ValueError("Generate is for gateways")
