"""The engine's thread: steps the engine beside the asyncio loop and never inside it.

The thread owns the engine; everybody else asks it through `call` or `post`, whose functions run between two steps.
Results reach the asyncio loop in the order in which the engine produced them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from baton.actors.engine.engine import Engine
from baton.actors.engine.updates import BlockCounts, Update
from baton.actors.messages import KVEvents, Load
from baton.actors.step_cost import StepCost
from baton.actors.step_meter import StepMeter

T = TypeVar("T")
log = logging.getLogger(__name__)

JOIN_S = 2.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything that happened between two reports, for the asyncio side."""

    updates: tuple[Update, ...]
    events: KVEvents
    counts: BlockCounts
    num_running: int
    num_waiting: int
    waiting_tokens: int
    waiting_context: float
    prefill_share: float
    cost: StepCost | None
    step_s: float

    def load(self, num_importing: int) -> Load:
        """What the gateways are told of it."""
        return Load(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_importing=num_importing,
            waiting_tokens=self.waiting_tokens,
            waiting_context=self.waiting_context,
            prefill_share=self.prefill_share,
            blocks_free=self.counts.free,
            blocks_cached=self.counts.cached,
            blocks_held=self.counts.held,
            cost=self.cost,
        )


class StepLoop:
    """Runs `engine` until `stop`. `on_report` and `on_failure` are called in `loop`."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[StepReport], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._on_report = on_report
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Callable[[Engine], object] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._meter = StepMeter()
        self._thread = threading.Thread(target=self._main, name="baton-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """How long the step or the ask that runs now has been running; 0 when none does."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        """End the thread after the step that runs now; idempotent. One that hangs is left to end with the process."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def post(self, ask: Callable[[Engine], object]) -> None:
        """Run `ask` on the engine between two steps; its result is dropped, its exception fails the worker."""
        self._inbox.put(ask)

    async def call(self, ask: Callable[[Engine], T]) -> T:
        """Run `ask` on the engine between two steps and return what it returns, or raise what it raises."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run(engine: Engine) -> None:
            try:
                value = ask(engine)
            except Exception as error:  # carried to the caller, not swallowed
                self._loop.call_soon_threadsafe(_set_exception, future, error)
            else:
                self._loop.call_soon_threadsafe(_set_result, future, value)

        self._inbox.put(run)
        return await future

    def _main(self) -> None:
        try:
            while self._take_asks(block=not self._engine.has_work):
                self._step()
        except BaseException as error:
            log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._on_failure, error)

    def _take_asks(self, *, block: bool) -> bool:
        """Run what waits in the inbox, first waiting for something if `block`. False: stop."""
        while True:
            self._busy_since = None if block else time.monotonic()
            try:
                ask = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if ask is None:
                return False
            self._busy_since = time.monotonic()
            ask(self._engine)
            block = False

    def _step(self) -> None:
        """Step once if there is work; report in any case, since asks may have moved blocks."""
        started = self._busy_since = time.monotonic()
        updates: list[Update] = []
        if self._engine.has_work:
            starting = self._engine.plan()
            if starting:  # a peer can reserve blocks while the first chunk computes
                self._tell(starting, 0.0)
            updates = self._run()
        self._tell(updates, time.monotonic() - started)

    def _run(self) -> list[Update]:
        """Run the planned step, timed: what ends with it may be the step before, if steps overlap."""
        engine, meter = self._engine, self._meter
        batch = engine.planned
        if batch is not None:
            meter.launched(batch, time.monotonic())
        updates = engine.run()
        meter.ended(engine.num_in_flight, time.monotonic())
        return updates

    def _tell(self, updates: list[Update], step_s: float) -> None:
        self._loop.call_soon_threadsafe(self._on_report, self._report(tuple(updates), step_s))

    def _report(self, updates: tuple[Update, ...], step_s: float) -> StepReport:
        engine = self._engine
        events = engine.take_events()
        cost = self._meter.cost
        engine.note_cost(self._meter.decodes)
        return StepReport(
            updates=updates,
            events=KVEvents(stored=tuple(events.stored), removed=tuple(events.removed)),
            counts=engine.counts(),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            waiting_tokens=engine.waiting_tokens,
            waiting_context=engine.waiting_context,
            prefill_share=self._meter.share.at(time.monotonic()),
            cost=cost,
            step_s=step_s,
        )


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
