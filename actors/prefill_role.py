"""The prefill side of hand-overs: joins the engine, the mover and the decode peers' streams.

All decisions are `HandoverSource`'s; this module carries out its actions. Lives in the asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from baton.actors import rpc
from baton.actors.engine.request import Request
from baton.actors.engine.updates import Update
from baton.actors.grammars import CompilerLost, GrammarRefused, Grammars
from baton.actors.messages import PrefillResult
from baton.actors.metrics import WorkerMetrics
from baton.actors.peer_session import PeerSession
from baton.actors.spans import NoSpans, Spans
from baton.actors.step_loop import StepLoop
from baton.transfer.actions import CancelPrefill, Prefill, Release, Send, SourceAction, SourceBlock, Write
from baton.transfer.layout import check_layout
from baton.transfer.mover import Completion, Incarnation
from baton.transfer.mover_loop import MoverLoop
from baton.transfer.route import source_blocks
from baton.transfer.slow_link import SlowLinks
from baton.transfer.source import HandoverSource
from baton.transfer.wire import Attempt, Hello, Message

log = logging.getLogger(__name__)
decode_request = msgspec.msgpack.Decoder(Request).decode


@dataclass(slots=True)
class _Export:
    """One prefill under way for a peer, and what its result will need."""

    attempt: Attempt
    block_size: int  # the peer's
    opened: float
    trace: str
    started: float = 0.0
    grammar: object = None  # held, so that the engine finds it


class PrefillRole:
    """Serves every decode peer that opens a hand-over stream."""

    spans: Spans = NoSpans()

    def __init__(
        self,
        hello: Hello,
        steps: StepLoop,
        mover: MoverLoop,
        source: HandoverSource,
        metrics: WorkerMetrics,
        grammars: Grammars,
    ) -> None:
        self._hello = hello
        self._block_size = hello.layout.block_size
        self._steps = steps
        self._mover = mover
        self._source = source
        self._metrics = metrics
        self._links = SlowLinks(is_gpu=hello.memory.memory == "VRAM")
        self._grammars = grammars
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: dict[Incarnation, PeerSession] = {}
        self._block_sizes: dict[Incarnation, int] = {}  # of every life so far, one number each
        self._lives: dict[str, Incarnation] = {}  # the last one of each decode worker
        self._write_ended = asyncio.Event()
        self._is_draining = False
        self._exports: dict[str, _Export] = {}  # by Attempt.name, the request's id in the engine

    def __len__(self) -> int:
        """Count the attempts that are not over."""
        return len(self._source)

    async def serve(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """Serve one stream: yield what goes to the peer. Raises LayoutMismatch or TransferError at the handshake."""
        hello = await anext(messages)
        if not isinstance(hello, Hello):
            raise ValueError(f"a hand-over stream begins with Hello, not {type(hello).__name__}")
        check_layout(self._hello.layout, hello.layout)
        peer = Incarnation(hello.incarnation)
        self._run(self._source.on_peer_connected(peer))
        previous = self._lives.get(hello.worker_id, peer)
        self._lives[hello.worker_id] = peer
        if previous != peer:
            self._run(self._source.on_peer_lost(previous))
            await self._mover.disconnect(previous)
        while self._source.is_writing(peer):  # or connecting anew would tear down what the writes go through
            self._write_ended.clear()
            await self._write_ended.wait()
        await self._mover.connect(peer, hello.memory)
        session = self._sessions[peer] = PeerSession()
        self._block_sizes[peer] = hello.layout.block_size
        session.send(self._hello)
        reader = asyncio.create_task(self._read(peer, session, messages))
        try:
            async for message in session.outgoing():
                yield message
        finally:
            reader.cancel()
            if self._sessions.get(peer) is session:
                del self._sessions[peer]
                self._run(self._source.on_peer_lost(peer))

    def on_update(self, update: Update) -> bool:
        """Take the update if it belongs to an export."""
        export = self._exports.get(update.request_id)
        if export is None:
            return False
        if update.finish == "error":
            self._run(self._source.on_failed(export.attempt, update.error or "the engine refused the prompt"))
        elif update.finish is not None:
            self._metrics.on_first_token(update.cached_tokens)
            self._run(
                self._source.on_prefilled(export.attempt, self._blocks(export, update), self._result(export, update))
            )
        else:
            export.started = export.started or time.monotonic()
            num_blocks = update.num_computed // export.block_size
            self._run(self._source.on_progress(export.attempt, num_blocks, self._blocks(export, update)))
        return True

    def on_completion(self, completion: Completion) -> None:
        if completion.error is None:
            self._metrics.on_write(completion.num_bytes, completion.seconds)
            if (slow := self._links.note(completion)) is not None:
                log.warning(slow)
        else:
            log.warning("write to %s failed: %s", completion.peer, completion.error)
            self._hang_up(completion.peer)
        self._run(self._source.on_completion(completion))
        self._write_ended.set()

    def drain(self) -> None:
        """Refuse what decode workers open from now on."""
        self._is_draining = True

    def tick(self) -> None:
        self._run(self._source.tick(time.monotonic()))

    def _hang_up(self, peer: Incarnation) -> None:
        """A failed write may be half under way. End the stream without a word, so that the peer keeps its blocks in
        quarantine until it has connected anew, which tears down what the write went through."""
        if (session := self._sessions.pop(peer, None)) is not None:
            session.close()
            self._run(self._source.on_peer_lost(peer))

    async def _read(self, peer: Incarnation, session: PeerSession, messages: AsyncIterator[Message]) -> None:
        try:
            async for message in messages:
                self._run(self._source.on_message(peer, message, time.monotonic()))
        finally:
            session.close()

    def _run(self, actions: list[SourceAction]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    if (session := self._sessions.get(peer)) is not None:
                        session.send(message)
                case Prefill(attempt, opened):
                    self._prefill(attempt, decode_request(opened.request))
                case CancelPrefill(attempt):
                    self._cancel(attempt.name)
                case Write(attempt, source_blocks, target_blocks, tag):
                    self._mover.write(attempt.peer, source_blocks, target_blocks, tag)
                case Release(attempt):
                    self._release(attempt.name)

    def _prefill(self, attempt: Attempt, request: Request) -> None:
        if self._is_draining:
            self._run(self._source.on_failed(attempt, "the prefill worker is draining"))
            return
        engine_id = attempt.name
        self._exports[engine_id] = _Export(attempt, self._block_sizes[attempt.peer], time.monotonic(), request.trace)
        own = msgspec.structs.replace(request, id=engine_id)
        if not request.grammar:
            self._steps.post(lambda engine: engine.submit(own, export=True))
            return
        task = asyncio.get_running_loop().create_task(self._prefill_constrained(own))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prefill_constrained(self, request: Request) -> None:
        """The peer has compiled the grammar too: what fails here is this worker's fault, and the peer goes on."""
        export = self._exports[request.id]
        try:
            export.grammar = await self._grammars.compiled(request.grammar)
        except (GrammarRefused, CompilerLost) as error:
            if self._exports.pop(request.id, None) is not None:
                self._run(self._source.on_failed(export.attempt, str(error)))
            return
        if request.id in self._exports:  # else it was cancelled meanwhile
            self._steps.post(lambda engine: engine.submit(request, export=True))

    def _cancel(self, engine_id: str) -> None:
        """The blocks stay until Release: writes from them may be pending, and the engine gives blocks out at once."""
        self._exports.pop(engine_id, None)
        self._steps.post(lambda engine: engine.stop_export(engine_id))

    def _release(self, engine_id: str) -> None:
        self._exports.pop(engine_id, None)
        self._steps.post(lambda engine: engine.release(engine_id))

    def _blocks(self, export: _Export, update: Update) -> Sequence[SourceBlock]:
        return source_blocks(update.blocks, self._block_size, export.block_size)

    def _result(self, export: _Export, update: Update) -> msgspec.Raw:
        now = time.monotonic()
        self.spans.record("queue", export.trace, export.opened, export.started)
        self.spans.record("prefill", export.trace, export.started, now, cached_tokens=update.cached_tokens)
        result = PrefillResult(
            tokens=update.tokens,
            logprobs=update.logprobs,
            cached_tokens=update.cached_tokens,
            queue_s=export.started - export.opened,
            prefill_s=now - export.started,
            drafts=update.drafts,
        )
        return msgspec.Raw(rpc.encode(result))
