"""Which worker life holds which KV blocks: what its events said, and for a few seconds what was just sent to it.

Knows block hashes and incarnations; knows no tokens. A hash covers its cache salt and adapter, and chains its
parent's. A radix cache evicts leaves first, so a worker that holds a block of a chain holds all blocks before it:
along a chain the sets of holders only shrink, and bisection finds every worker's match at once.

A set of holders is an int with one bit for each worker life. A life that ends is masked out at once; its bits are
swept from the table little by little, and its place is given to another life only after that.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.actors.messages import KVEvents

logger = logging.getLogger(__name__)

MAX_PREDICTED = 1 << 18  # blocks in a generation of predictions, of all workers together
MAX_LISTS = 64  # of lives whose slots are remembered
NUM_SHARDS = 1024  # so that no single dict grows, or is swept, for long


@dataclass(slots=True)
class _Life:
    slot: int
    bit: int  # 1 << slot: one object for all blocks that only this life holds
    max_blocks: int
    num_blocks: int = 0
    is_synced: bool = False  # a snapshot has come; until then, changes say nothing


class PrefixIndex:
    """`predicted_s`: how long at least (twice that at most) a request that was just sent counts as cached there."""

    def __init__(self, *, predicted_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stored = _HolderTable()
        self._predicted = _Predictions(predicted_s)
        self._slots = _Slots(quarantine_s=2 * predicted_s)
        self._lives: dict[str, _Life] = {}
        self._known_slots: dict[tuple[str, ...], NDArray[np.intp]] = {}  # of lists that were asked for
        self._alive = 0  # bits of the lives above: no other bit in a table counts

    def add(self, incarnation: str, max_blocks: int) -> None:
        """Know a life from now on, with nothing stored; what was known of it is forgotten."""
        self.drop(incarnation)
        slot = self._slots.take()
        bit = 1 << slot
        self._lives[incarnation] = _Life(slot, bit, max_blocks)
        self._known_slots.clear()
        self._alive |= bit

    def drop(self, incarnation: str) -> None:
        """Forget everything that this life held; idempotent."""
        life = self._lives.pop(incarnation, None)
        if life is not None:
            self._known_slots.clear()
            self._alive ^= life.bit
            self._slots.retire(life.slot, self._clock())

    def apply(self, incarnation: str, events: KVEvents) -> bool:
        """Apply one frame's events. False: they claim more blocks than the worker has, so ask for a snapshot."""
        self._slots.sweep(self._stored, self._clock())
        life = self._lives.get(incarnation)
        if life is None:
            return True
        if events.snapshot:
            self.add(incarnation, life.max_blocks)
            life = self._lives[incarnation]
            life.is_synced = True
        if life.is_synced:
            life.num_blocks -= self._stored.remove(events.removed, life.bit)
            life.num_blocks += self._stored.add(events.stored, life.bit)
        if life.num_blocks <= life.max_blocks:
            return True
        logger.warning("worker life %s reported more blocks than it has; dropping its entries", incarnation)
        self.add(incarnation, life.max_blocks)
        return False

    def predict(self, incarnation: str, hashes: Sequence[bytes]) -> None:
        """Count `hashes` as held for a while: a request with them was just sent there."""
        life = self._lives.get(incarnation)
        if life is not None:
            num_stored = bisect_left(hashes, True, key=lambda block: not self._stored.holders(block) & life.bit)
            self._predicted.add(hashes[num_stored:], life.bit, self._clock())

    def match(self, hashes: Sequence[bytes], incarnation: str) -> int:
        """Return how many leading blocks of the chain a worker life holds."""
        life = self._lives.get(incarnation)
        if life is None:
            return 0
        self._predicted.expire(self._clock())
        return bisect_left(hashes, True, key=lambda block: not self._holders(block) & life.bit)

    def match_all(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks of the chain each worker life holds; those that hold none are left out."""
        matches = self.match_slots(hashes).tolist()
        return {incarnation: matches[life.slot] for incarnation, life in self._lives.items() if matches[life.slot]}

    def match_slots(self, hashes: Sequence[bytes]) -> NDArray[np.int32]:
        """Return the same for each slot (see `slots`), and a last 0 for lives that are not known.

        Takes about log2(len(hashes)) look-ups for each different answer, however many workers there are.
        """
        self._predicted.expire(self._clock())
        num_bytes = self._slots.num_slots // 8 + 1
        matches = np.zeros(8 * num_bytes, dtype=np.int32)
        # Ranges: these lives hold at least so many blocks, at most so many.
        open_ranges = [(0, len(hashes), self._alive)] if self._alive else []
        while open_ranges:
            low, high, lives = open_ranges.pop()
            while low < high:
                middle = (low + high) // 2
                holders = self._holders(hashes[middle]) & lives
                if holders == lives:
                    low = middle + 1
                    continue
                if holders:
                    open_ranges.append((middle + 1, high, holders))
                    lives ^= holders
                high = middle
            if low and not lives & (lives - 1):
                matches[lives.bit_length() - 1] = low
            elif low:
                bits = np.frombuffer(lives.to_bytes(num_bytes, "little"), dtype=np.uint8)
                matches[np.unpackbits(bits, bitorder="little").view(np.bool_)] = low
        return matches

    def slots(self, incarnations: tuple[str, ...]) -> NDArray[np.intp]:
        """Return where the answers of these lives stand in what `match_slots` returns, until a life comes or goes."""
        known = self._known_slots.get(incarnations)
        if known is None:
            if len(self._known_slots) == MAX_LISTS:
                self._known_slots.clear()
            lives = self._lives
            slots = [lives[name].slot if name in lives else -1 for name in incarnations]
            known = self._known_slots[incarnations] = np.array(slots, dtype=np.intp)
        return known

    def num_blocks(self, incarnation: str) -> int:
        life = self._lives.get(incarnation)
        return life.num_blocks if life else 0

    def _holders(self, block: bytes) -> int:
        key = int.from_bytes(block[:8], "little") >> 4
        predicted = self._predicted
        stored = self._stored.shards[key % NUM_SHARDS].get(key, 0)
        return stored | predicted.young.get(block, 0) | predicted.old.get(block, 0)


class _HolderTable:
    """Block -> bits of its holders. Keys are 60 bits of the hash: ints of two digits, half the size of bytes.

    Two blocks with one key would make a wrong guess of what is cached, never a wrong answer.
    """

    def __init__(self) -> None:
        self.shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]

    def holders(self, block: bytes) -> int:
        key = int.from_bytes(block[:8], "little") >> 4
        return self.shards[key % NUM_SHARDS].get(key, 0)

    def add(self, blocks: Iterable[bytes], bit: int) -> int:
        """Return how many were new for this holder."""
        num_new, shards = 0, self.shards
        for block in blocks:
            key = int.from_bytes(block[:8], "little") >> 4
            shard = shards[key % NUM_SHARDS]
            present = shard.get(key)
            if present is None:
                shard[key] = bit
            elif present & bit:
                continue
            else:
                shard[key] = present | bit
            num_new += 1
        return num_new

    def remove(self, blocks: Iterable[bytes], bit: int) -> int:
        """Return how many this holder had."""
        num_removed, shards = 0, self.shards
        for block in blocks:
            key = int.from_bytes(block[:8], "little") >> 4
            shard = shards[key % NUM_SHARDS]
            present = shard.get(key, 0)
            if present & bit:
                _put(shard, key, present ^ bit)
                num_removed += 1
        return num_removed

    def purge(self, shard_index: int, bits: int) -> None:
        """Take `bits` off every block of one shard."""
        shard = self.shards[shard_index]
        for key, present in [item for item in shard.items() if item[1] & bits]:
            _put(shard, key, present & ~bits)


def _put(shard: dict[int, int], key: int, holders: int) -> None:
    if holders:
        shard[key] = holders
    else:
        del shard[key]


class _Predictions:
    """Two generations of block -> bits of holders. The older goes, as a whole, when the younger is full or aged."""

    def __init__(self, generation_s: float) -> None:
        self._generation_s = generation_s
        self.young: dict[bytes, int] = {}
        self.old: dict[bytes, int] = {}
        self._young_since = 0.0

    def add(self, blocks: Sequence[bytes], bit: int, now: float) -> None:
        self.expire(now)
        if len(self.young) + len(blocks) > MAX_PREDICTED:
            self._turn(now)
        young = self.young
        for block in blocks[:MAX_PREDICTED]:
            young[block] = young.get(block, 0) | bit

    def expire(self, now: float) -> None:
        age_s = now - self._young_since
        if age_s >= self._generation_s:
            self._turn(now)
            if age_s >= 2 * self._generation_s:
                self.old = {}

    def _turn(self, now: float) -> None:
        self.young, self.old, self._young_since = {}, self.young, now


class _Slots:
    """Bit positions for lives. One comes back when no table can hold its bit any more."""

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s  # as long as a prediction may last
        self.num_slots = 0
        self._free: list[int] = []
        self._retired: list[tuple[int, float]] = []  # slot, when the sweep may begin
        self._sweeping: list[int] = []
        self._next_shard = 0

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self.num_slots += 1
        return self.num_slots - 1

    def retire(self, slot: int, now: float) -> None:
        self._retired.append((slot, now + self._quarantine_s))

    def sweep(self, table: _HolderTable, now: float) -> None:
        """Do a small part of what is to be done: one shard."""
        if not self._sweeping:
            self._sweeping = [slot for slot, ready_at in self._retired if ready_at <= now]
            del self._retired[: len(self._sweeping)]
            self._next_shard = 0
        if not self._sweeping:
            return
        table.purge(self._next_shard, sum(1 << slot for slot in self._sweeping))
        self._next_shard += 1
        if self._next_shard == NUM_SHARDS:
            self._free += self._sweeping
            self._sweeping = []
