"""What the router knows of the workers: one by one, and as columns for the policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baton.actors.messages import Load, WorkerInfo
from baton.actors.step_cost import StepCost

Column = NDArray[np.float64]


SPARE_SEQUENCES = 4  # that may wait on a worker for a seat
MIN_AVAILABLE = 0.05  # share of a worker's blocks, free or cached, below which what runs there needs them itself


@dataclass(slots=True)
class Tally:
    """Requests, and the prompt tokens that are to be computed for them."""

    num_requests: int = 0
    num_tokens: int = 0
    context: float = 0.0  # sum over these tokens of the positions that each attends to


class RoutedWorker:
    """What the router knows of one life of a worker: what it says of itself, and what this gateway has sent it."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.load = Load()
        self.cost = StepCost()  # as last published
        self.num_own_requests = 0  # this gateway's, charged before they are sent
        self.num_own_tokens = 0
        self.num_own_prefills = 0  # those of them that are prefilled here and have no first token yet
        self.own_kv_tokens = 0  # of those that decode here, or will
        self.num_dispatched = 0
        # Charged after the last report, and between the last two. A worker counts what it had when a step began, and
        # a request for a prefill worker comes by way of another: only the second report after it surely counts it.
        self._fresh = Tally()
        self._recent = Tally()

    @property
    def incarnation(self) -> str:
        return self.info.peer.incarnation

    @property
    def num_requests(self) -> int:
        """Everybody's requests there: as last reported, and this gateway's that cannot be in the report yet."""
        load = self.load
        num_reported = load.num_running + load.num_waiting + load.num_importing
        return num_reported + self._fresh.num_requests + self._recent.num_requests

    @property
    def num_tokens(self) -> int:
        """Uncached prompt tokens that it has yet to compute, in the same sense."""
        return self.load.waiting_tokens + self._fresh.num_tokens + self._recent.num_tokens

    @property
    def prefill_ms(self) -> float:
        """Predicted time that computing these tokens takes."""
        context = self.load.waiting_context + self._fresh.context + self._recent.context
        return self.cost.prefill_token_ms * self.num_tokens + self.cost.prefill_context_ms * context

    @property
    def kv_tokens(self) -> int:
        return max(self.own_kv_tokens, self.load.blocks_held * self.info.block_size)

    @property
    def has_room(self) -> bool:
        """Whether another request would start soon, so that it need not wait where its turn can still be decided.

        A worker always has work for two steps, and a few sequences for seats that come free.
        """
        info, load = self.info, self.load
        num_requests = self.num_requests
        num_available = load.blocks_free + load.blocks_cached
        return num_requests == 0 or (
            num_requests < info.max_sequences + SPARE_SEQUENCES
            and self.num_tokens < 2 * info.step_tokens
            and load.num_waiting < SPARE_SEQUENCES
            and (num_available + load.blocks_held == 0 or num_available > MIN_AVAILABLE * info.num_blocks)
        )

    def take_load(self, load: Load) -> None:
        self.load = load
        if load.cost is not None:
            self.cost = load.cost
        self._recent, self._fresh = self._fresh, Tally()

    def charge(self, num_tokens: int, context: float) -> Tally:
        """Count one request more. What is released before a report can count it must come off the returned tally."""
        self.num_own_requests += 1
        self.num_own_tokens += num_tokens
        self.num_own_prefills += num_tokens > 0
        self.num_dispatched += 1
        self._fresh.num_requests += 1
        self._fresh.num_tokens += num_tokens
        self._fresh.context += context
        return self._fresh


class Pool:
    """The workers that may take one part of one request, as columns: row i is worker i. Made when first asked for."""

    def __init__(self, workers: Sequence[RoutedWorker], match: Callable[[int], Mapping[str, int]]) -> None:
        """`match` counts, for a block size, the prompt's leading blocks that each incarnation holds, if any."""
        self.workers = workers
        self._match = match

    def __len__(self) -> int:
        return len(self.workers)

    def only(self, row: int) -> Pool:
        return Pool(self.workers[row : row + 1], self._match)

    @cached_property
    def cached(self) -> Column:
        """Leading tokens of the prompt that each holds."""
        infos = [worker.info for worker in self.workers]
        matched = {size: self._match(size) for size in {info.block_size for info in infos}}
        tokens = [matched[info.block_size].get(info.peer.incarnation, 0) * info.block_size for info in infos]
        return np.array(tokens, dtype=np.float64)

    @cached_property
    def num_requests(self) -> Column:
        """There now, running and waiting."""
        return np.array([worker.num_requests for worker in self.workers], dtype=np.float64)

    @cached_property
    def num_tokens(self) -> Column:
        """Uncached prompt tokens that each has yet to compute."""
        return np.array([worker.num_tokens for worker in self.workers], dtype=np.float64)

    @cached_property
    def num_dispatched(self) -> Column:
        """Requests ever sent there: what breaks ties."""
        return np.array([worker.num_dispatched for worker in self.workers], dtype=np.float64)

    @cached_property
    def num_prefills(self) -> Column:
        """Own requests there that have no first token yet."""
        return np.array([worker.num_own_prefills for worker in self.workers], dtype=np.float64)

    @cached_property
    def prefill_ms(self) -> Column:
        return np.array([worker.prefill_ms for worker in self.workers], dtype=np.float64)

    @cached_property
    def prefill_share(self) -> Column:
        return np.array([worker.load.prefill_share for worker in self.workers], dtype=np.float64)

    @cached_property
    def kv_tokens(self) -> Column:
        return np.array([worker.kv_tokens for worker in self.workers], dtype=np.float64)

    @cached_property
    def capacity(self) -> Column:
        """KV tokens that fit."""
        return np.array([worker.info.num_blocks * worker.info.block_size for worker in self.workers], dtype=np.float64)

    @cached_property
    def step_tokens(self) -> Column:
        """Tokens that one step computes at most."""
        return np.array([worker.info.step_tokens for worker in self.workers], dtype=np.float64)

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """Coefficients as columns [part of StepCost][worker]."""
        rows = [
            (c.constant_ms, c.prefill_token_ms, c.prefill_context_ms, c.decode_ms, c.decode_token_ms)
            for c in (worker.cost for worker in self.workers)
        ]
        return np.array(rows, dtype=np.float64).T
