"""Whose turn it is: better priority first, then deficit round robin by tokens between keys, then the shorter first.

Within a key a request of n tokens is overtaken by later ones only until n tokens have come in after it, so a long
prompt costs the short ones little and still waits a bounded time. Between keys every round gives each that waits
the same number of tokens; what a key's running requests generate is taken off its next rounds. Pure: knows no clock.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple, Protocol

QUANTUM = 1024  # tokens a key and round
MAX_DEBTORS = 4096  # keys whose debts are remembered while nothing of theirs waits


class Waiting(Protocol):
    """What may wait. `is_waiting` is the queue's: nobody else writes it."""

    is_waiting: bool

    @property
    def key(self) -> str: ...

    @property
    def priority(self) -> int: ...  # lower goes first

    @property
    def num_tokens(self) -> int: ...


class _Entry(NamedTuple):
    rank: int
    number: int  # settles ties: who came first
    item: Waiting


class _Flow:
    """What waits of one key and priority. Entries that were removed are dropped when they come to the top."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.num_waiting = 0
        self.num_tokens = 0

    def head(self) -> Waiting:
        while not self.entries[0].item.is_waiting:
            heapq.heappop(self.entries)
        return self.entries[0].item


class FairQueue:
    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, _Flow]] = {}  # priority -> key -> flow, in the order of their turns
        self._deficits: OrderedDict[str, int] = OrderedDict()  # tokens that a key may still take; negative: a debt
        self._num_entered = 0
        self._tokens_entered = 0
        self._num_waiting = 0
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, item: Waiting) -> None:
        flow = self._levels.setdefault(item.priority, OrderedDict()).setdefault(item.key, _Flow())
        item.is_waiting = True
        heapq.heappush(flow.entries, _Entry(self._rank(item.num_tokens), self._num_entered, item))
        flow.num_waiting += 1
        flow.num_tokens += item.num_tokens
        self._num_entered += 1
        self._tokens_entered += item.num_tokens
        self._num_waiting += 1
        self.num_tokens += item.num_tokens

    def head(self) -> Waiting | None:
        """Return whose turn it is; it stays. Its key's deficit is topped up to cover it."""
        if not self._levels:
            return None
        flows = self._levels[min(self._levels)]
        rounds = {key: self._rounds_until(key, flow.head().num_tokens) for key, flow in flows.items()}
        chosen = min(rounds, key=rounds.__getitem__)  # of equals the first, by the order of their turns
        if num_rounds := rounds[chosen]:
            for key in flows:
                self._deficits[key] = self._deficits.get(key, 0) + num_rounds * QUANTUM
        return flows[chosen].head()

    def take(self, item: Waiting) -> None:
        """Take the head out: its key pays for it."""
        self.charge(item.key, item.num_tokens)
        self.remove(item)

    def remove(self, item: Waiting) -> None:
        """Take out anything that waits, without payment."""
        item.is_waiting = False
        self._num_waiting -= 1
        self.num_tokens -= item.num_tokens
        flows = self._levels[item.priority]
        flow = flows[item.key]
        flow.num_waiting -= 1
        flow.num_tokens -= item.num_tokens
        if flow.num_waiting:
            return
        del flows[item.key]
        if not flows:
            del self._levels[item.priority]
        if not any(item.key in others for others in self._levels.values()):
            self._settle(item.key)

    def charge(self, key: str, num_tokens: int) -> None:
        """Take tokens that the key used off what it may still take."""
        self._deficits[key] = self._deficits.get(key, 0) - num_tokens
        if len(self._deficits) > MAX_DEBTORS:
            self._forget_one()

    def tokens_ahead(self, num_tokens: int, key: str, priority: int) -> int:
        """Return how many waiting tokens would go before a request that came now, if nothing came after it."""
        better = sum(flow.num_tokens for level in self._levels if level < priority for flow in self._flows(level))
        flows = self._levels.get(priority)
        if flows is None:
            return better
        others = sum(flow.num_tokens for name, flow in flows.items() if name != key)
        rank = self._rank(num_tokens)
        own = flows[key].entries if key in flows else ()
        before = sum(entry.item.num_tokens for entry in own if entry.item.is_waiting and entry.rank <= rank)
        fair_share = (before + num_tokens) * len(flows.keys() - {key})
        return better + before + min(others, fair_share)

    def _flows(self, priority: int) -> Collection[_Flow]:
        return self._levels[priority].values()

    def _rank(self, num_tokens: int) -> int:
        """Once for the tokens that come in with it, once for as many after it."""
        return self._tokens_entered + 2 * num_tokens

    def _rounds_until(self, key: str, num_tokens: int) -> int:
        return max(math.ceil((num_tokens - self._deficits.get(key, 0)) / QUANTUM), 0)

    def _settle(self, key: str) -> None:
        """Nothing of the key waits: it keeps its debts, and saves up no claims."""
        if self._deficits.get(key, 0) >= 0:
            self._deficits.pop(key, None)

    def _forget_one(self) -> None:
        waiting = {key for flows in self._levels.values() for key in flows}
        oldest = next((key for key in self._deficits if key not in waiting), None)
        if oldest is not None:
            del self._deficits[oldest]
