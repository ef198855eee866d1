"""What the router knows of the workers: one by one, and as columns for the policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baton.actors.messages import Load, WorkerInfo
from baton.actors.step_cost import StepCost

Column = NDArray[np.float64]


class RoutedWorker:
    """What the router knows of one life of a worker: what it says of itself, and what this gateway has sent it."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.load = Load()
        self.cost = StepCost()  # as last published
        self.num_own_requests = 0  # this gateway's, charged before they are sent
        self.num_own_tokens = 0  # uncached prompt tokens of those that have no first token yet
        self.num_own_prefills = 0  # those of them that are to be prefilled here
        self.own_prefill_ms = 0.0  # predicted for them
        self.own_kv_tokens = 0  # of all own requests that decode here, or will
        self.num_dispatched = 0
        self._num_foreign_requests = 0  # other gateways', as of the last report
        self._num_foreign_tokens = 0

    @property
    def incarnation(self) -> str:
        return self.info.peer.incarnation

    @property
    def num_requests(self) -> int:
        return self.num_own_requests + self._num_foreign_requests

    @property
    def num_tokens(self) -> int:
        return self.num_own_tokens + self._num_foreign_tokens

    @property
    def prefill_ms(self) -> float:
        """Predicted time of all prompts that are still to be computed here."""
        return self.own_prefill_ms + self.cost.prefill_ms(self._num_foreign_tokens, 0)

    @property
    def kv_tokens(self) -> int:
        return max(self.own_kv_tokens, self.load.blocks_held * self.info.block_size)

    def take_load(self, load: Load) -> None:
        self.load = load
        if load.cost is not None:
            self.cost = load.cost
        self._num_foreign_requests = max(load.num_running + load.num_waiting - self.num_own_requests, 0)
        self._num_foreign_tokens = max(load.waiting_tokens - self.num_own_tokens, 0)


class Pool:
    """The workers that may take one part of one request, as columns: row i is worker i. Made when first asked for."""

    def __init__(self, workers: Sequence[RoutedWorker], match: Callable[[RoutedWorker], int]) -> None:
        """`match` counts the prompt's leading tokens that a worker holds."""
        self.workers = workers
        self._match = match

    def __len__(self) -> int:
        return len(self.workers)

    def only(self, row: int) -> Pool:
        return Pool(self.workers[row : row + 1], self._match)

    @cached_property
    def cached(self) -> Column:
        """Leading tokens of the prompt that each holds."""
        return np.array([self._match(worker) for worker in self.workers], dtype=np.float64)

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
    def kv_tokens(self) -> Column:
        return np.array([worker.kv_tokens for worker in self.workers], dtype=np.float64)

    @cached_property
    def capacity(self) -> Column:
        """KV tokens that fit."""
        return np.array([worker.info.num_blocks * worker.info.block_size for worker in self.workers], dtype=np.float64)

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """Coefficients as columns [part of StepCost][worker]."""
        rows = [
            (c.constant_ms, c.prefill_token_ms, c.prefill_context_ms, c.decode_ms, c.decode_token_ms)
            for c in (worker.cost for worker in self.workers)
        ]
        return np.array(rows, dtype=np.float64).T
