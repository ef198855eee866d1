"""The decode side of hand-overs: joins the engine, the mover and the streams to prefill peers.

All decisions are `HandoverTarget`'s; this module carries out its actions. Lives in the asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from baton.actors import rpc
from baton.actors.engine.engine import Engine
from baton.actors.engine.imports import QuarantineKey
from baton.actors.engine.request import Request
from baton.actors.generation import Moved
from baton.actors.messages import PeerAddress, PrefillResult
from baton.actors.peer_session import PeerLink, PeerRefused
from baton.actors.step_loop import StepLoop
from baton.transfer.actions import (
    Deliver,
    Disconnect,
    Drop,
    Fallback,
    Land,
    Quarantine,
    Reserve,
    Send,
    TargetAction,
    Unquarantine,
)
from baton.transfer.layout import LayoutMismatch, check_layout
from baton.transfer.mover import Arrival, Incarnation, TransferError
from baton.transfer.mover_loop import MoverLoop
from baton.transfer.route import SLICES
from baton.transfer.target import HandoverTarget
from baton.transfer.wire import Attempt, Hello, Message

log = logging.getLogger(__name__)
decode_result = msgspec.msgpack.Decoder(PrefillResult).decode

RECONNECT_S = 0.5
HELLO_TIMEOUT_S = 5.0


class DecodeListener(Protocol):
    """Whoever owns the requests: hears how each hand-over goes."""

    def on_prefilled(self, request_id: str, result: PrefillResult) -> None: ...

    def on_landed(self, request_id: str, moved: Moved) -> None: ...

    def on_fallback(self, request_id: str, reason: str) -> None: ...


@dataclass(slots=True)
class _Import:
    attempt: Attempt
    num_blocks: int  # that the peer sends
    parts: int  # that the heads come in: how many times our ranks the peer has
    blocks: tuple[int, ...] = ()  # where it puts them
    is_restoring: bool = False  # all are there, and the mover makes them what they are to be
    tokens: tuple[int, ...] = ()  # what the peer sampled
    drafts: tuple[int, ...] = ()  # and what it thinks may follow


@dataclass(slots=True)
class _Connection:
    link: PeerLink
    incarnation: Incarnation
    parts: int  # see _Import
    reader: asyncio.Task[None]


class DecodeRole:
    """Fetches prompts' KV from prefill peers. `fetch` may be cancelled; `cancel` ends it at any stage."""

    def __init__(
        self, hello: Hello, steps: StepLoop, mover: MoverLoop, target: HandoverTarget, listener: DecodeListener
    ) -> None:
        self._hello = hello
        self._steps = steps
        self._mover = mover
        self._target = target
        self._listener = listener
        self._imports: dict[str, _Import] = {}  # by request id
        self._connections: dict[str, _Connection] = {}  # by address
        self._connecting: dict[str, asyncio.Task[_Connection]] = {}  # by address
        self._quarantine_keys: dict[Attempt, QuarantineKey | None] = {}  # touched by the engine's thread only
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._imports)

    async def fetch(self, request: Request, peer: PeerAddress) -> bool:
        """Ask `peer` for the prompt's KV; False when all that is missing is the prompt's last block, or about to come.

        Raises PeerRefused, LayoutMismatch, TransferError or EngineError.
        """
        connection = await self._connect(peer)
        opened = await self._steps.call(lambda engine: engine.open_import(request))
        if opened.is_coming or opened.num_blocks - opened.skip_blocks <= 1:
            self._steps.post(lambda engine: engine.abandon_import(request.id, quarantine=False))
            return False
        attempt, actions = self._target.open(
            request.id,
            connection.incarnation,
            skip_blocks=opened.skip_blocks,
            num_blocks=opened.num_blocks,
            request=msgspec.Raw(rpc.encode(request)),
            now=time.monotonic(),
        )
        self._imports[request.id] = _Import(attempt, opened.num_blocks - opened.skip_blocks, connection.parts)
        self._run(actions)
        return True

    def cancel(self, request_id: str) -> None:
        """End the request's hand-over; fine when there is none."""
        if (current := self._imports.get(request_id)) is None:
            return
        if current.is_restoring:
            self._quarantine(current.attempt)  # from our own mover
        else:
            self._run(self._target.abort(current.attempt, time.monotonic()))

    def peer_dead(self, incarnation: Incarnation) -> None:
        """The cluster knows that this process is gone."""
        for connection in self._connections.values():
            if connection.incarnation == incarnation:
                connection.reader.cancel()
        self._run(self._target.on_peer_dead(incarnation, time.monotonic()))

    def on_arrival(self, arrival: Arrival) -> None:
        self._run(self._target.on_arrival(arrival, time.monotonic()))

    def on_step(self) -> None:
        """Blocks may have come free."""
        self._run(self._target.on_room())

    def tick(self) -> None:
        self._run(self._target.tick(time.monotonic()))

    async def close(self) -> None:
        self._is_closed = True
        links = [connection.link for connection in self._connections.values()]
        tasks: list[asyncio.Task[Any]] = [
            *self._tasks,
            *self._connecting.values(),
            *(connection.reader for connection in self._connections.values()),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in links:
            await link.close()

    # Streams.

    async def _connect(self, peer: PeerAddress) -> _Connection:
        """Share one attempt among all who want the peer: none waits for others' failures, none's end ends it."""
        if (present := self._connections.get(peer.address)) is not None:
            return present
        attempt = self._connecting.get(peer.address)
        if attempt is None:
            attempt = self._connecting[peer.address] = asyncio.create_task(self._open_connection(peer))
            attempt.add_done_callback(lambda done: self._attempted(peer.address, done))
        return await asyncio.shield(attempt)

    def _attempted(self, address: str, attempt: asyncio.Task[_Connection]) -> None:
        del self._connecting[address]
        if not attempt.cancelled():
            attempt.exception()  # whoever still waits for it hears of it

    async def _open_connection(self, peer: PeerAddress) -> _Connection:
        link = PeerLink(peer, self._hello)
        try:
            hello = await link.open(HELLO_TIMEOUT_S)
            check_layout(self._hello.layout, hello.layout)
            incarnation = Incarnation(hello.incarnation)
            await self._mover.connect(incarnation, hello.memory)
        except BaseException:  # a cancelled attempt must not leave its stream behind either
            await link.close()
            raise
        reader = asyncio.create_task(self._read(link, incarnation))
        parts = max(1, hello.layout.tensor_parallel // self._hello.layout.tensor_parallel)
        connection = self._connections[peer.address] = _Connection(link, incarnation, parts, reader)
        reader.add_done_callback(lambda done: self._on_stream_end(link, incarnation, done))
        self._run(self._target.on_peer_connected(peer.address, incarnation, time.monotonic()))
        return connection

    async def _read(self, link: PeerLink, peer: Incarnation) -> None:
        async for message in link.messages():
            self._run(self._target.on_message(peer, message, time.monotonic()))

    def _on_stream_end(self, link: PeerLink, peer: Incarnation, reader: asyncio.Task[None]) -> None:
        """However it ended, even by a cancel before it began."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.error("stream to %s ended by an error here", link.peer.worker_id, exc_info=error)
        del self._connections[link.peer.address]
        self._run(self._target.on_peer_lost(peer, time.monotonic()))
        if not self._is_closed:
            self._start(self._resolve(link, peer))

    async def _resolve(self, link: PeerLink, peer: Incarnation) -> None:
        """After a lost stream: find out whether the peer still lives, as long as it may write into our blocks."""
        await link.close()
        while self._target.has_quarantined(peer):
            try:
                await self._connect(link.peer)
                return
            except (PeerRefused, LayoutMismatch, TransferError):
                await asyncio.sleep(RECONNECT_S)

    # Actions.

    def _run(self, actions: Sequence[TargetAction]) -> None:
        for index, action in enumerate(actions):
            if isinstance(action, Disconnect):
                self._start(self._disconnect(action.peer, actions[index + 1 :]))
                break
            self._do(action)
        self._mover.expect_arrivals(self._target.is_receiving, urgent=self._target.is_landing)

    def _do(self, action: TargetAction) -> None:
        match action:
            case Send(peer, message):
                self._send_to(peer, message)
            case Reserve(attempt):
                self._start(self._reserve(attempt))
            case Deliver(attempt, result):
                self._deliver(attempt, decode_result(result))
            case Land(attempt):
                self._land(attempt)
            case Quarantine(attempt):
                self._quarantine(attempt)
            case Unquarantine(attempt):
                self._steps.post(lambda engine: self._release_quarantine(engine, attempt))
            case Fallback() | Drop():
                self._end(action)
            case _:
                pass  # Unreserve: the Fallback or Drop of the same attempt gives its blocks back

    def _end(self, end: Fallback | Drop) -> None:
        """Give the attempt's blocks back, unless a Quarantine has taken them."""
        request_id = end.attempt.handover
        if self._imports.pop(request_id, None) is not None:
            self._steps.post(lambda engine: engine.abandon_import(request_id, quarantine=False))
        if isinstance(end, Fallback):
            self._listener.on_fallback(request_id, end.reason)

    def _send_to(self, peer: Incarnation, message: Message) -> None:
        for connection in self._connections.values():
            if connection.incarnation == peer:
                connection.link.send(message)

    async def _reserve(self, attempt: Attempt) -> None:
        blocks = await self._steps.call(lambda engine: _reserve_if_open(engine, attempt.handover))
        if blocks is None:
            self._run(self._target.no_room(attempt))
        else:
            if (current := self._imports.get(attempt.handover)) is not None and current.attempt == attempt:
                current.blocks = blocks
            self._run(self._target.placed(attempt, blocks, time.monotonic()))

    def _deliver(self, attempt: Attempt, result: PrefillResult) -> None:
        current = self._imports[attempt.handover]
        current.tokens, current.drafts = result.tokens, result.drafts
        self._listener.on_prefilled(attempt.handover, result)

    def _land(self, attempt: Attempt) -> None:
        current = self._imports[attempt.handover]
        if current.parts == 1 and not self._hello.memory.compressed:
            self._adopt(attempt)
        else:
            current.is_restoring = True
            self._start(self._restore(current))

    async def _restore(self, current: _Import) -> None:
        await self._mover.restore(current.blocks, current.parts)
        if self._imports.get(current.attempt.handover) is current:
            self._adopt(current.attempt)
        else:  # cancelled meanwhile
            self._steps.post(lambda engine: self._release_quarantine(engine, current.attempt))

    def _adopt(self, attempt: Attempt) -> None:
        current = self._imports.pop(attempt.handover)
        memory = self._hello.memory
        num_bytes = current.num_blocks * memory.total_block_bytes
        if memory.compressed:
            num_bytes = num_bytes * memory.compressed // SLICES
        moved = Moved(current.num_blocks, num_bytes, memory.mover)
        self._steps.post(lambda engine: engine.adopt_import(attempt.handover, current.tokens, current.drafts))
        self._listener.on_landed(attempt.handover, moved)

    def _quarantine(self, attempt: Attempt) -> None:
        del self._imports[attempt.handover]  # so that the Fallback or Drop that follows finds it abandoned

        def quarantine(engine: Engine) -> None:
            self._quarantine_keys[attempt] = engine.abandon_import(attempt.handover, quarantine=True)

        self._steps.post(quarantine)

    def _release_quarantine(self, engine: Engine, attempt: Attempt) -> None:
        if (key := self._quarantine_keys.pop(attempt, None)) is not None:
            engine.release_quarantine(key)

    async def _disconnect(self, peer: Incarnation, rest: Sequence[TargetAction]) -> None:
        await self._mover.disconnect(peer)
        self._run(rest)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reserve_if_open(engine: Engine, request_id: str) -> tuple[int, ...] | None:
    """The attempt may have ended while this waited for its turn on the engine's thread."""
    return engine.reserve_import(request_id) if engine.is_import_open(request_id) else None
