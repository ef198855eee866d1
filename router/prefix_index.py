"""Which worker life holds which KV blocks: what its events said, and for a few seconds what was just sent to it.

Knows block hashes and incarnations; knows no tokens. A radix cache evicts leaves first, so a worker that holds a
block of a chain holds all blocks before it: the length of a match is found by bisection.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.actors.messages import KVEvents

logger = logging.getLogger(__name__)

MAX_PREDICTED = 1 << 16  # hashes a worker; the oldest predictions go first


@dataclass(slots=True)
class _Holdings:
    max_blocks: int
    stored: set[bytes] = field(default_factory=set[bytes])
    is_synced: bool = False  # a snapshot has come; until then, changes say nothing
    predicted: OrderedDict[bytes, float] = field(default_factory=OrderedDict[bytes, float])  # hash -> expiry, in order


class PrefixIndex:
    def __init__(self, *, predicted_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._predicted_s = predicted_s
        self._clock = clock
        self._workers: dict[str, _Holdings] = {}

    def add(self, incarnation: str, max_blocks: int) -> None:
        self._workers[incarnation] = _Holdings(max_blocks)

    def drop(self, incarnation: str) -> None:
        """Forget everything that this life held; idempotent."""
        self._workers.pop(incarnation, None)

    def apply(self, incarnation: str, events: KVEvents) -> bool:
        """Apply one frame's events. False: they claim more blocks than the worker has, so ask for a snapshot."""
        holdings = self._workers.get(incarnation)
        if holdings is None:
            return True
        if events.snapshot:
            holdings.stored = set(events.stored)
            holdings.is_synced = True
        elif holdings.is_synced:
            holdings.stored.difference_update(events.removed)
            holdings.stored.update(events.stored)
        if len(holdings.stored) <= holdings.max_blocks:
            return True
        logger.warning("worker life %s reported more blocks than it has; dropping its entries", incarnation)
        holdings.stored.clear()
        holdings.is_synced = False
        return False

    def predict(self, incarnation: str, hashes: Sequence[bytes]) -> None:
        """Count `hashes` as held for a while: a request with them was just sent there."""
        holdings = self._workers.get(incarnation)
        if holdings is None:
            return
        now = self._clock()
        predicted = holdings.predicted
        for block in reversed(hashes):  # so that a chain's end goes first when the bound evicts
            predicted[block] = now + self._predicted_s
            predicted.move_to_end(block)
        while predicted and (len(predicted) > MAX_PREDICTED or next(iter(predicted.values())) <= now):
            predicted.popitem(last=False)

    def match(self, hashes: Sequence[bytes], incarnation: str) -> int:
        """Return how many leading blocks of the chain a worker life holds."""
        holdings = self._workers.get(incarnation)
        if holdings is None:
            return 0
        now, stored, predicted = self._clock(), holdings.stored, holdings.predicted

        def is_missing(block: bytes) -> bool:
            return block not in stored and predicted.get(block, 0.0) <= now

        return bisect_left(hashes, True, key=is_missing)

    def num_blocks(self, incarnation: str) -> int:
        holdings = self._workers.get(incarnation)
        return len(holdings.stored) if holdings else 0
