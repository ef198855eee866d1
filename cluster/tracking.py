"""What is known about one watched process, from its probes alone. Pure bookkeeping: tells nobody, starts nothing."""

from __future__ import annotations

import asyncio
from typing import Generic, Literal, TypeVar

from baton.cluster.errors import ProcessLostError
from baton.cluster.processes import Life, Process

T = TypeVar("T")

State = Literal["starting", "ready", "silent", "lost"]


class Tracked(Generic[T]):
    """At most one probe is under way at a time, however long it takes."""

    def __init__(self, process: Process[T], *, now_s: float) -> None:
        self.name = process.name
        self.state: State = "starting"
        self.failure: str | None = None  # why it is lost, or why its last try to start failed
        self._process = process
        self._life: Life[T] | None = None
        self._seen_s = now_s
        self._probe: asyncio.Future[Life[T]] | None = None

    @property
    def current(self) -> T | None:
        """What the process announced, while it can be relied on to serve."""
        return self._life.ready if self._life and self.state == "ready" else None

    @property
    def boot(self) -> str | None:
        return self._life.boot if self._life else None

    def ask(self) -> asyncio.Future[Life[T]]:
        """Begin a probe, or return the one under way; `settle` takes its answer."""
        if self._probe is None:
            self._probe = asyncio.ensure_future(self._process.probe())
        return self._probe

    def settle(self, *, now_s: float, silence_s: float) -> T | None:
        """Take in what the probe brought. Return what an earlier life announced once that life is known to be over.

        Silence is no death: the silent process may still write into its peers' memory.
        """
        if self._probe is None or not self._probe.done():
            if self.state == "ready" and now_s - self._seen_s > silence_s:
                self.state = "silent"
            return None
        probe, self._probe = self._probe, None
        before = self._life
        try:
            self._life = probe.result()
        except ProcessLostError as error:
            self.state, self.failure = "lost", str(error)
            if not error.certain:
                return None
            self._life = None
            return before.ready if before else None
        self._seen_s, self.failure = now_s, self._life.failure
        self.state = "starting" if self._life.ready is None else "ready"
        return before.ready if before and before.boot != self._life.boot else None

    def forget_probe(self) -> None:
        """Cancel the probe under way, when nobody will ask again."""
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
