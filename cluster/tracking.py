"""What is known about one watched process, from its probes alone. Pure bookkeeping: tells nobody, starts nothing."""

from __future__ import annotations

import asyncio
from typing import Generic, Literal, TypeVar, cast

from baton.cluster.config import HealthConfig
from baton.cluster.errors import ProcessLostError
from baton.cluster.processes import Life, Place, Process

T = TypeVar("T")
P = TypeVar("P")  # a Process[T]; Python cannot say so

# waiting: to be launched, or launched again. lost: cannot be reached, and may still run. stuck: is being killed.
State = Literal["waiting", "starting", "ready", "silent", "stuck", "lost", "draining"]


class Backoff:
    """When a process that died may be started again: at once, then after 1, 2, 4 ... s, until it has proved stable."""

    def __init__(self, health: HealthConfig) -> None:
        self._health = health
        self.num_deaths = 0  # in a row

    def next_delay_s(self) -> float:
        self.num_deaths += 1
        return 0.0 if self.num_deaths == 1 else min(2.0 ** (self.num_deaths - 2), self._health.backoff_max_s)

    def served(self, seconds: float) -> None:
        if seconds > self._health.stable_s:
            self.num_deaths = 0


class Tracked(Generic[T, P]):
    """One name's processes, one after the other. At most one probe is under way at a time, however long it takes."""

    def __init__(self, name: str, health: HealthConfig, *, now_s: float) -> None:
        self.name = name
        self.process: P | None = None
        self.state: State = "waiting"
        self.failure: str | None = None  # why it is lost, or why its last try to start failed
        self.num_restarts = 0
        self.launch_at_s = now_s  # while there is no process
        self.is_unheard = False  # a process that was found, not launched, and has not been heard of
        self.backoff = Backoff(health)
        self._health = health
        self._life: Life[T] = Life()
        self._place: Place | None = None
        self._seen_s = self._ready_s = now_s
        self._probe: asyncio.Future[Life[T]] | None = None

    @property
    def current(self) -> T | None:
        """What the process announced, while it can be relied on to serve."""
        return self._life.ready if self.state == "ready" else None

    @property
    def last_known(self) -> T | None:
        """What the process announced, whatever became of it; None once it is known to have ended."""
        return self._life.ready

    @property
    def place(self) -> Place | None:
        """Where the process runs, or ran last."""
        return self._place

    @property
    def pid(self) -> int | None:
        return self._life.pid

    @property
    def has_left(self) -> bool:
        """It takes nothing new any more, and ends by itself."""
        return self._life.is_leaving

    @property
    def has_failed(self) -> bool:
        """It is there, and has said that it will never serve."""
        return self._life.failure is not None

    def take(self, ready: T) -> None:
        """The process announces something else, unasked."""
        self._life = Life(ready)

    def bind(self, process: P, *, now_s: float, found: bool = False) -> None:
        """Watch this process from now on."""
        self.process, self.state, self.is_unheard = process, "starting", found
        self._life, self._seen_s, self._ready_s = Life(), now_s, now_s

    def ask(self) -> asyncio.Future[Life[T]] | None:
        """Begin a probe, or return the one under way; `settle` takes its answer."""
        if self._probe is None and self.process is not None:
            self._probe = asyncio.ensure_future(cast("Process[T]", self.process).probe())
        return self._probe

    def settle(self, *, now_s: float) -> T | None:
        """Take in what the probe brought. Return what an ended process had announced, once its end is certain.

        Silence is no death: the silent process may still write into its peers' memory.
        """
        if self.process is None or self._probe is None:
            return None
        if not self._probe.done():
            self._note_silence(now_s - self._seen_s)
            return None
        probe, self._probe = self._probe, None
        try:
            life = probe.result()
        except ProcessLostError as error:
            self.state, self.failure, self.is_unheard = "lost", str(error), False
            return self.ended(now_s=now_s) if error.certain else None
        self._note_life(life, now_s)
        return None

    def ended(self, *, now_s: float, delay_s: float | None = None) -> T | None:
        """The process is gone: wait for the next launch. Return what it had announced.

        Without `delay_s` it has died; with it, its end was wanted.
        """
        before, self._life = self._life, Life()
        self.forget_probe()
        self.process, self.state, self.is_unheard = None, "waiting", False
        self.launch_at_s = now_s + (self.backoff.next_delay_s() if delay_s is None else delay_s)
        self.num_restarts += delay_s is None
        return before.ready

    def forget_probe(self) -> None:
        """Cancel the probe under way, when nobody will ask again."""
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    def _note_silence(self, silence_s: float) -> None:
        if self.state != "starting" and silence_s > self._health.stuck_s:
            self.state, self.failure = "stuck", f"answers nothing for {silence_s:.0f} s"
        elif self.state == "ready" and silence_s > self._health.silence_s:
            self.state, self.failure = "silent", f"answers nothing for {silence_s:.0f} s"

    def _note_life(self, life: Life[T], now_s: float) -> None:
        self._life, self._seen_s, self.is_unheard = life, now_s, False
        self._place = life.place or self._place
        if life.ready is not None or life.failure is not None:
            self.failure = life.failure  # until then it stays known why its predecessor ended
        if life.ready is None:
            self.state, self._ready_s = "starting", now_s
        elif life.failure is not None:
            self.state = "stuck"
        elif life.busy_s > self._health.stuck_s:
            self.state, self.failure = "stuck", f"computes at one step for {life.busy_s:.0f} s"
        else:
            self.state = "ready"
            self.backoff.served(now_s - self._ready_s)
