"""Which waiting sequence starts next.

By priority (lower first); then preempted ones; then the one with the fewest tokens to compute, that is, what is left
after the cached prefix, so long cached prefixes and short prompts go first. No sequence starves among its equals:
after `max_overtakes` later starts the one that waits longest goes first, and one that was refused for lack of room
keeps its turn. One whose next block somebody else is computing waits for that, so that it is computed once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice

from baton.actors.engine.sequence import Sequence, Turn

WINDOW = 32  # how many of the longest waiting are compared for each start


class WaitingQueue:
    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._turns: list[Turn] = []
        self._sequences: dict[Turn, Sequence] = {}
        self._work: dict[Turn, tuple[int, float]] = {}  # tokens and context, as of their coming
        self.num_tokens = 0  # uncached ones of all who wait
        self.context = 0.0  # sum over these of the positions that each attends to

    def __len__(self) -> int:
        return len(self._turns)

    def push(self, sequence: Sequence, num_uncached: int) -> None:
        turn = sequence.turn
        insort(self._turns, turn)
        self._sequences[turn] = sequence
        context = num_uncached * (len(sequence.tokens) - 0.5 * num_uncached)
        self._work[turn] = num_uncached, context
        self.num_tokens += num_uncached
        self.context += context

    def remove(self, sequence: Sequence) -> None:
        turn = sequence.turn
        del self._turns[bisect_left(self._turns, turn)]
        del self._sequences[turn]
        num_uncached, context = self._work.pop(turn)
        self.num_tokens -= num_uncached
        self.context -= context

    def select(self, num_uncached: Callable[[Sequence], int], is_coming: Callable[[Sequence], bool]) -> Sequence | None:
        """Return whose turn it is; it stays in the queue. None also when all wait for blocks that others compute."""
        if not self._turns:
            return None
        first = self._turns[0]
        eldest = self._sequences[first]
        if not first.is_new or eldest.num_overtaken >= self._max_overtakes:
            return eldest
        window = [self._sequences[turn] for turn in islice(self._turns, WINDOW) if turn.priority == first.priority]
        denied = next((sequence for sequence in window if sequence.was_denied), None)
        if denied is not None:
            return denied
        for sequence in sorted(window, key=num_uncached):
            if not is_coming(sequence):
                return sequence
        return None

    def start(self, sequence: Sequence) -> None:
        """Take out the selected sequence, which runs now."""
        eldest = self._sequences[self._turns[0]]
        if eldest is not sequence:
            eldest.num_overtaken += 1
        self.remove(sequence)
