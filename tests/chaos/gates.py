"""Named points of the protocol inside one worker process, where the test can hold, repeat or break what passes.

A gate acts on one request only, at the n-th time that something of it comes to the point. It knows no worker: what
passes is a message on a stream, which waits in its order, or a callback, which others may overtake.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

Message = TypeVar("Message")

Act = Literal["hold", "double", "break"]


class GateSpec(msgspec.Struct, frozen=True, tag=True):
    """Arm a gate: `act` on what passes `point` of `request_id` for the `nth` time."""

    point: str
    request_id: str
    act: Act
    nth: int = 1


class StreamBroken(Exception):
    """Injected: the stream or the transfer ends here."""


@dataclass
class _Gate:
    spec: GateSpec
    num_seen: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class Gates:
    """`report` is told of each armed gate that was reached. Lives in one asyncio loop."""

    def __init__(self, report: Callable[[GateSpec], None]) -> None:
        self._report = report
        self._gates: list[_Gate] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def arm(self, spec: GateSpec) -> None:
        self._gates.append(_Gate(spec))

    def open_all(self) -> None:
        """Let everything that is held go on, and forget all gates."""
        for gate in self._gates:
            gate.opened.set()
        self._gates.clear()

    async def pass_messages(
        self, side: str, messages: AsyncIterator[Message], names: Callable[[Message], set[str]]
    ) -> AsyncIterator[Message]:
        """Pass a stream's messages on; `names` tells which requests a message is about."""
        async for message in messages:
            for _ in range(await self._cross(f"{side}.{type(message).__name__}", names(message))):
                yield message

    def pass_callback(self, point: str, request_id: str, go: Callable[[], None], fail: Callable[[], None]) -> None:
        """Call `go`, once, twice or later, or `fail` in its stead."""
        gate = self._reached(point, {request_id})
        if gate is None:
            go()
        elif gate.spec.act == "break":
            fail()
        elif gate.spec.act == "double":
            go()
            go()
        else:
            task = asyncio.get_running_loop().create_task(self._later(gate, go))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _cross(self, point: str, request_ids: set[str]) -> int:
        gate = self._reached(point, request_ids)
        if gate is None:
            return 1
        if gate.spec.act == "break":
            raise StreamBroken(point)
        if gate.spec.act == "double":
            return 2
        await gate.opened.wait()
        return 1

    def _reached(self, point: str, request_ids: set[str]) -> _Gate | None:
        for gate in self._gates:
            if gate.spec.point == point and gate.spec.request_id in request_ids:
                gate.num_seen += 1
                if gate.num_seen == gate.spec.nth:
                    self._report(gate.spec)
                    return gate
        return None

    async def _later(self, gate: _Gate, go: Callable[[], None]) -> None:
        await gate.opened.wait()
        go()
