"""One worker: an engine, its mover, and the streams of gateways and peers, joined in one asyncio loop.

A plain class; Ray wraps it elsewhere. Every worker can do everything: its role is data that the router reads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable

import grpc.aio
import torch

from baton.actors import rpc
from baton.actors.build import BuiltEngine, build_engine
from baton.actors.config import WorkerConfig
from baton.actors.decode_role import DecodeRole
from baton.actors.engine.engine import Engine
from baton.actors.engine.errors import EngineError
from baton.actors.engine.updates import BlockCounts, Update
from baton.actors.gateway_session import GatewaySession, KVView
from baton.actors.generation import Generation, Moved
from baton.actors.grammars import CompilerLost, GrammarRefused
from baton.actors.live import Live, cut_short, record_spans
from baton.actors.messages import (
    Cancel,
    Frame,
    Output,
    PeerAddress,
    PrefillResult,
    Resync,
    Role,
    Submit,
    ToWorker,
    WorkerInfo,
)
from baton.actors.metrics import WorkerMetrics
from baton.actors.peer_session import PeerRefused
from baton.actors.prefill_role import PrefillRole
from baton.actors.profiling import profile_steps
from baton.actors.spans import NoSpans, Spans
from baton.actors.step_loop import StepLoop, StepReport
from baton.transfer.factory import MoverPlace, make_mover
from baton.transfer.layout import LayoutMismatch
from baton.transfer.local_mover import LocalFabric
from baton.transfer.mover import Arrival, Completion, Incarnation, TransferError
from baton.transfer.mover_loop import MoverLoop
from baton.transfer.source import HandoverSource
from baton.transfer.target import HandoverTarget
from baton.transfer.wire import Hello, Message, decode_message

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05


class Worker:
    """`start` first. `failed` ends with an exception when the worker cannot go on: its process should exit."""

    failed: asyncio.Future[None]
    port = 0  # of the gRPC server; 0 = any free one. Set it before `start`, and `spans` too
    spans: Spans = NoSpans()

    def __init__(
        self,
        *,
        worker_id: str,
        role: Role,
        config: WorkerConfig,
        host: str = "127.0.0.1",
        build: Callable[[WorkerConfig], BuiltEngine] = build_engine,
        fabric: LocalFabric | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.role: Role = role
        self.incarnation = Incarnation(uuid.uuid4().hex)
        self._config = config
        self._host = host
        self._build = build
        self._fabric = fabric
        self._metrics = WorkerMetrics(worker_id)
        self._view = KVView()
        self._live: dict[str, Live] = {}
        self._sessions: set[GatewaySession] = set()
        self._is_draining = False

    # Life.

    async def start(self) -> WorkerInfo:
        """Load the model, register the KV with the mover, and listen."""
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()
        self._built = await asyncio.to_thread(self._build, self._config)
        try:
            return await self._open(loop)
        except BaseException:
            await asyncio.to_thread(self._built.ranks.close)
            raise

    async def _open(self, loop: asyncio.AbstractEventLoop) -> WorkerInfo:
        transfer, kv = self._config.transfer, self._built.kv
        place = MoverPlace(self._host, self._fabric)
        mover = make_mover(transfer, kv, self.incarnation, place, self._built.ranks.mover_lines)
        self._hello = Hello(
            incarnation=self.incarnation,
            worker_id=self.worker_id,
            layout=self._built.layout,
            memory=mover.describe(),
        )
        self._steps = StepLoop(self._built.engine, loop, self._on_report, self._on_failure)
        if kv.is_cuda:
            self._steps.post(lambda _: torch.cuda.set_device(kv.device))  # the current device is a thread's own
        self._join_roles(mover_loop=MoverLoop(mover, self._on_completion, self._on_arrival, loop))
        self._metrics_address, self._close_metrics = self._metrics.serve(self._host, 0)
        sides = {"prefill": self._prefill, "decode": self._decode}
        self._metrics.watch(self._built.work, self._built.ceilings, self.info, sides, self._built.drafts)
        self._server = rpc.make_server({
            rpc.SERVE: (self._serve_gateway, rpc.decode_to_worker),
            rpc.HANDOVER: (self._serve_peer, decode_message),
        })  # fmt: skip
        self._address = f"{self._host}:{self._server.add_insecure_port(f'{self._host}:{self.port}')}"
        self._steps.start()
        await self._server.start()
        watched = (self._tick(), self._mover.wait_ended(), self._built.ranks.wait_lost())
        self._tasks = [asyncio.create_task(coroutine) for coroutine in watched]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        return self.info()

    def _join_roles(self, mover_loop: MoverLoop) -> None:
        transfer = self._config.transfer
        source = HandoverSource(
            lease_s=transfer.lease_s, beat_s=transfer.beat_s, max_write_blocks=transfer.max_write_blocks
        )
        target = HandoverTarget(beat_s=transfer.beat_s, stall_s=transfer.stall_s, hold_s=transfer.hold_s)
        self._mover = mover_loop
        self._prefill = PrefillRole(self._hello, self._steps, mover_loop, source, self._metrics, self._built.grammars)
        self._prefill.spans = self.spans
        self._decode = DecodeRole(self._hello, self._steps, mover_loop, target, self)

    async def stop(self) -> None:
        """Close everything; live requests end with an error at their gateways."""
        for task in self._tasks:
            task.cancel()
        await self._decode.close()
        await self._server.stop(grace=0)
        self._steps.stop()
        await self._built.grammars.close()
        await self._mover.close()
        await asyncio.to_thread(self._built.ranks.close)
        self._close_metrics()
        await asyncio.to_thread(self.spans.close)

    async def drain(self, wait_s: float) -> None:
        """Refuse new requests; let those that run end for `wait_s`, then hand them back: others go on with them."""
        self._is_draining = True
        self._prefill.drain()
        deadline = time.monotonic() + wait_s
        while (self._live or len(self._prefill)) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        for request_id, live in list(self._live.items()):
            self.cancel(request_id)
            live.session.add_output(Output(request_id=request_id, finish="cancelled"))
        while len(self._prefill) or any(session.has_outputs for session in self._sessions):
            await asyncio.sleep(DRAIN_POLL_S)

    def set_role(self, role: Role) -> None:
        self.role = role

    async def profile(self, seconds: float) -> bytes:
        return await profile_steps(self._steps, seconds)

    def info(self) -> WorkerInfo:
        built = self._built
        return WorkerInfo(
            peer=PeerAddress(self.worker_id, self._address, self.incarnation),
            role=self.role,
            model=self._config.served_name,
            block_size=built.layout.block_size,
            num_blocks=built.num_blocks,
            max_context=built.max_context,
            max_sequences=self._config.engine.max_num_seqs,
            step_tokens=self._config.engine.max_step_tokens,
            mover=self._hello.memory.mover,
            metrics_address=self._metrics_address,
            pid=os.getpid(),
            version=built.layout.weights_version,
        )

    async def counts(self) -> BlockCounts:
        """Count blocks after a full integrity check, which walks every block: for tests and operators."""

        def check(engine: Engine) -> BlockCounts:
            engine.check_integrity()
            return engine.counts()

        return await self._steps.call(check)

    async def peer_dead(self, incarnation: str) -> None:
        """The cluster knows that this process is gone: end what it had here."""
        self._decode.peer_dead(Incarnation(incarnation))
        await self._mover.disconnect(Incarnation(incarnation))

    # Streams.

    async def _serve_gateway(
        self, calls: AsyncIterator[ToWorker], context: grpc.aio.ServicerContext[ToWorker, Frame]
    ) -> AsyncIterator[Frame]:
        if self._is_stuck:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the engine of worker {self.worker_id} hangs")
        session = GatewaySession(self.incarnation, self._view)
        self._sessions.add(session)
        reader = asyncio.create_task(self._read_gateway(session, calls))
        try:
            async for frame in session.frames():
                yield frame
        finally:
            reader.cancel()
            self._sessions.discard(session)
            for request_id in list(session.request_ids):
                self.cancel(request_id)

    async def _read_gateway(self, session: GatewaySession, calls: AsyncIterator[ToWorker]) -> None:
        try:
            async for call in calls:
                match call:
                    case Submit():
                        self._submit(session, call)
                    case Cancel(request_id):
                        if request_id in session.request_ids:
                            self.cancel(request_id)
                    case Resync():
                        session.resync()
        finally:
            session.close()

    async def _serve_peer(
        self, messages: AsyncIterator[Message], context: grpc.aio.ServicerContext[Message, Message]
    ) -> AsyncIterator[Message]:
        try:
            async for message in self._prefill.serve(messages):
                yield message
        except (LayoutMismatch, TransferError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    # Requests.

    def _submit(self, session: GatewaySession, submit: Submit) -> None:
        request = submit.request
        if self._is_draining:
            session.add_output(Output(request_id=request.id, finish="cancelled"))  # unasked: try another worker
            return
        if request.id in self._live:
            error = f"request id {request.id!r} is already live on worker {self.worker_id}: ids must be fresh"
            session.add_output(Output(request_id=request.id, finish="error", error=error))
            return
        live = self._live[request.id] = Live(Generation(submit, self.worker_id, time.monotonic), session)
        session.request_ids.add(request.id)
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(request.deadline_s, self._expire, live, request.deadline_s)
        if request.grammar:
            live.fetch = asyncio.create_task(self._start_constrained(live))
        else:
            self._start(live)

    async def _start_constrained(self, live: Live) -> None:
        request = live.generation.submit.request
        try:
            live.grammar = await self._built.grammars.compiled(request.grammar)
        except (GrammarRefused, CompilerLost) as error:
            is_refusal = isinstance(error, GrammarRefused)
            self._emit(live, Output(request_id=request.id, finish="error", error=str(error), is_refusal=is_refusal))
        else:
            self._start(live)

    def _start(self, live: Live) -> None:
        submit, request = live.generation.submit, live.generation.submit.request
        if submit.prefill is None or submit.prefill.incarnation == self.incarnation:
            self._steps.post(lambda engine: engine.submit(request))
        else:
            live.fetch = asyncio.create_task(self._fetch(submit, submit.prefill))

    async def _fetch(self, submit: Submit, peer: PeerAddress) -> None:
        request = submit.request
        try:
            if not await self._decode.fetch(request, peer):
                self._steps.post(lambda engine: engine.submit(request))
        except (PeerRefused, LayoutMismatch, TransferError) as error:
            self.on_fallback(request.id, str(error))
        except EngineError:
            self._steps.post(lambda engine: engine.submit(request))  # which says what is wrong, as an update

    def cancel(self, request_id: str) -> None:
        """End a request at any stage and free everything it holds, here and at its peer; idempotent."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        live.end()
        self._decode.cancel(request_id)
        self._steps.post(lambda engine: engine.cancel(request_id))

    def _expire(self, live: Live, deadline_s: float) -> None:
        request_id = live.generation.request_id
        self.cancel(request_id)
        error = f"deadline_s = {deadline_s:g} s of the request is over; allow more, or ask for fewer tokens"
        live.session.add_output(Output(request_id=request_id, finish="error", error=error))

    def _emit(self, live: Live, output: Output) -> None:
        live.session.add_output(output)
        if output.finish is not None:
            del self._live[output.request_id]
            live.end()
            self._metrics.on_phases(live.generation.times)
            record_spans(self.spans, live.generation, output)

    # News from the hand-overs, the engine and the mover.

    def on_prefilled(self, request_id: str, result: PrefillResult) -> None:
        live = self._live[request_id]
        self._emit(live, live.generation.on_prefilled(result))

    def on_landed(self, request_id: str, moved: Moved) -> None:
        self._live[request_id].generation.on_landed(moved)

    def on_fallback(self, request_id: str, reason: str) -> None:
        """Prefill here, from the tokens known so far."""
        live = self._live.get(request_id)
        if live is None:
            return
        log.warning("request %s: prefill by a peer failed (%s); prefilling here", request_id, reason)
        self._metrics.on_fallback()
        request = live.generation.resumed_request
        self._steps.post(lambda engine: engine.submit(request))

    def _on_report(self, report: StepReport) -> None:
        for update in report.updates:  # first: a peer waits for what it brings
            if not self._prefill.on_update(update):
                self._on_update(update)
        self._metrics.on_report(report)
        self._view.apply(report.events)
        load = report.load(len(self._decode))
        for session in self._sessions:
            session.add_state(load, report.events)
        self._decode.on_step()

    def _on_update(self, update: Update) -> None:
        live = self._live.get(update.request_id)
        if live is None:
            return  # cancelled meanwhile
        if update.tokens and not live.generation.sent:
            self._metrics.on_first_token(update.cached_tokens)
        output = live.generation.on_update(update)
        if output is not None:
            self._emit(live, output)

    def _on_completion(self, completion: Completion) -> None:
        self._prefill.on_completion(completion)

    def _on_arrival(self, arrival: Arrival) -> None:
        self._decode.on_arrival(arrival)

    def _on_failure(self, error: BaseException) -> None:
        """The engine or the mover is gone: tell every client, then let the process end."""
        self._is_draining = True  # nothing more can be served
        for live in list(self._live.values()):
            self._emit(live, cut_short(live.generation.request_id, self.worker_id, error))
        if not self.failed.done():
            self.failed.set_exception(error)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """What ends the ticking, or the mover's thread, ends the worker."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    @property
    def busy_s(self) -> float:
        """How long the engine has been at its present step."""
        return self._steps.busy_s

    @property
    def _is_stuck(self) -> bool:
        """The engine's thread hangs: whoever takes signs of life for life must not see any."""
        return self.busy_s > self._config.transfer.stall_s

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.transfer.beat_s / 4)
            if self._is_stuck:
                for session in self._sessions:
                    session.close()
                continue
            self._prefill.tick()
            self._decode.tick()
