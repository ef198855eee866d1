"""The worker's end of one gateway's stream: gathers news and hands it out as numbered frames.

All news since the last frame goes into the next one, so a slow gateway gets fewer, larger frames and never a backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.actors.messages import Frame, KVEvents, Load, Output


class KVView:
    """The set of block hashes that this worker's cache can match, as told by the engine's events so far."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def apply(self, events: KVEvents) -> None:
        self._hashes.difference_update(events.removed)
        self._hashes.update(events.stored)

    def snapshot(self) -> KVEvents:
        return KVEvents(stored=tuple(self._hashes), snapshot=True)


class GatewaySession:
    """One stream. `request_ids` are the live requests it opened: they are cancelled when it ends."""

    def __init__(self, incarnation: str, view: KVView) -> None:
        self.request_ids: set[str] = set()
        self._incarnation = incarnation
        self._view = view
        self._number = 0
        self._outputs: list[Output] = []
        self._changes: dict[bytes, bool] = {}  # block hash -> is it stored now: the last state wins
        self._load = Load()
        self._needs_snapshot = True
        self._is_closed = False
        self._news = asyncio.Event()
        self._news.set()

    @property
    def has_outputs(self) -> bool:
        """Something has not been sent yet."""
        return bool(self._outputs)

    def add_output(self, output: Output) -> None:
        if output.finish is not None:
            self.request_ids.discard(output.request_id)
        self._outputs.append(output)
        self._news.set()

    def add_state(self, load: Load, events: KVEvents) -> None:
        self._changes.update(dict.fromkeys(events.removed, False))
        self._changes.update(dict.fromkeys(events.stored, True))
        if load != self._load or events.stored or events.removed:
            self._load = load
            self._news.set()

    def resync(self) -> None:
        self._needs_snapshot = True
        self._news.set()

    def close(self) -> None:
        """The gateway reads no more: end `frames`."""
        self._is_closed = True
        self._news.set()

    async def frames(self) -> AsyncIterator[Frame]:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._is_closed:
                return
            yield self._next_frame()

    def _next_frame(self) -> Frame:
        frame = Frame(
            number=self._number,
            incarnation=self._incarnation,
            outputs=tuple(self._outputs),
            load=self._load,
            events=self._view.snapshot() if self._needs_snapshot else self._events(),
        )
        self._number += 1
        self._needs_snapshot = False
        self._outputs.clear()
        self._changes.clear()
        return frame

    def _events(self) -> KVEvents:
        return KVEvents(
            stored=tuple(block for block, is_stored in self._changes.items() if is_stored),
            removed=tuple(block for block, is_stored in self._changes.items() if not is_stored),
        )
