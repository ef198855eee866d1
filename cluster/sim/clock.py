"""A fake clock with what is to happen when: the simulator's event loop."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventLoop:
    """Runs actions in the order of their times; those of one time in the order in which they were given."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_given = 0

    def time(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        assert time_s >= self.now, "the past cannot be changed"
        self._num_given += 1
        heapq.heappush(self._heap, (time_s, self._num_given, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self) -> None:
        """Run until nothing is left to happen."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, action = pop(heap)
            self.num_events += 1
            action()
