"""What the router knows of the workers: one by one, and as columns for the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.actors.messages import Load, WorkerInfo
from baton.actors.step_cost import StepCost

Column = NDArray[np.float64]


NUM_FIGURES = 19
SPARE_SEQUENCES = 1  # that may wait on a worker for a seat
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
        self.num_own_decodes = 0  # those of them that decode here, or will
        self.num_own_decoding = 0  # ... and have their first token
        self.own_kv_tokens = 0  # of those that decode here, or will
        self.num_dispatched = 0
        self.tokens_dispatched = 0
        # Charged after the last report, and between the last two. A worker counts what it had when a step began, and
        # a request for a prefill worker comes by way of another: only the second report after it surely counts it.
        self._fresh = Tally()
        self._recent = Tally()
        self.incarnation = info.peer.incarnation
        self.figures: Column = np.empty(NUM_FIGURES)  # what policies look at; see `refresh`
        self.refresh()

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
    def num_decoding(self) -> int:
        """Sequences that decode there now: what a prompt's chunks hold up."""
        return max(self.num_own_decoding, self.load.num_running - self.num_own_prefills)

    @property
    def num_decodes(self) -> int:
        """Those, and the ones whose prompts are still computed, there or elsewhere."""
        return max(self.num_own_decodes, self.num_decoding + self.load.num_importing)

    @property
    def kv_tokens(self) -> int:
        return max(self.own_kv_tokens, self.load.blocks_held * self.info.block_size)

    @property
    def has_room(self) -> bool:
        """Whether another request would start soon, so that it need not wait where its turn can still be decided.

        A worker always has work for two steps, and a sequence for the next seat that comes free.
        """
        return self.num_requests == 0 or (self.num_tokens < 2 * self.info.step_tokens and self.has_seat)

    @property
    def has_seat(self) -> bool:
        """Whether one more sequence could run, or nearly."""
        info, load = self.info, self.load
        num_available = load.blocks_free + load.blocks_cached
        return (
            self.num_requests < info.max_sequences + SPARE_SEQUENCES
            and load.num_waiting < SPARE_SEQUENCES
            and (num_available + load.blocks_held == 0 or num_available > MIN_AVAILABLE * info.num_blocks)
        )

    def take_load(self, load: Load) -> None:
        self.load = load
        if load.cost is not None:
            self.cost = load.cost
        self._recent, self._fresh = self._fresh, Tally()
        self.refresh()

    def charge(self, num_tokens: int, context: float) -> Tally:
        """Count one request more. What is released before a report can count it must come off the returned tally.

        Whoever does that calls `refresh` then.
        """
        self.num_own_requests += 1
        self.num_own_tokens += num_tokens
        self.num_own_prefills += num_tokens > 0
        self.num_dispatched += 1
        self.tokens_dispatched += max(num_tokens, 1)
        self._fresh.num_requests += 1
        self._fresh.num_tokens += num_tokens
        self._fresh.context += context
        self.refresh()
        return self._fresh

    def refresh(self) -> None:
        """Bring `figures` up to date: decisions read them far more often than they change."""
        info, load, cost = self.info, self.load, self.cost
        self.figures[:] = (
            self.num_requests,
            self.num_tokens,
            self.num_dispatched,
            self.num_own_prefills,
            self.prefill_ms,
            load.prefill_share,
            self.kv_tokens,
            info.num_blocks * info.block_size,
            info.step_tokens,
            cost.constant_ms,
            cost.prefill_token_ms,
            cost.prefill_context_ms,
            cost.decode_ms,
            cost.decode_token_ms,
            self.num_decoding,
            self.num_decodes,
            self.has_room,
            self.has_seat,
            self.tokens_dispatched,
        )


W = TypeVar("W", bound=RoutedWorker)


class Roster(Generic[W]):
    """A fixed list of workers whose figures lie side by side. Of the rosters that name a worker the newest is true."""

    def __init__(self, workers: Sequence[W]) -> None:
        self.workers = workers
        self.incarnations = tuple(worker.incarnation for worker in workers)
        self.block_sizes = np.array([worker.info.block_size for worker in workers])
        self.distinct_sizes = tuple({worker.info.block_size for worker in workers})
        self.figures = np.array([worker.figures for worker in workers]).reshape(-1, NUM_FIGURES).T.copy()
        for worker, column in zip(workers, self.figures.T, strict=True):
            worker.figures = column


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers that may take one part of one request, as columns: row i is worker i."""

    workers: Sequence[RoutedWorker]
    figures: NDArray[np.float64]  # as `RoutedWorker.refresh` notes them, [figure][worker]
    cached: Column  # leading tokens of the prompt that each holds

    def __len__(self) -> int:
        return len(self.workers)

    def only(self, row: int) -> Pool:
        return Pool(self.workers[row : row + 1], self.figures[:, row : row + 1], self.cached[row : row + 1])

    @property
    def num_requests(self) -> Column:
        """There now, running and waiting."""
        return self.figures[0]

    @property
    def num_tokens(self) -> Column:
        """Uncached prompt tokens that each has yet to compute."""
        return self.figures[1]

    @property
    def num_dispatched(self) -> Column:
        """Requests ever sent there: what breaks ties."""
        return self.figures[2]

    @property
    def tokens_dispatched(self) -> Column:
        """Prompt tokens ever sent there to be computed."""
        return self.figures[18]

    @property
    def num_prefills(self) -> Column:
        """Own requests there that have no first token yet."""
        return self.figures[3]

    @property
    def prefill_ms(self) -> Column:
        return self.figures[4]

    @property
    def prefill_share(self) -> Column:
        return self.figures[5]

    @property
    def kv_tokens(self) -> Column:
        return self.figures[6]

    @property
    def capacity(self) -> Column:
        """KV tokens that fit."""
        return self.figures[7]

    @property
    def step_tokens(self) -> Column:
        """Tokens that one step computes at most."""
        return self.figures[8]

    @property
    def costs(self) -> NDArray[np.float64]:
        """Coefficients as columns [part of StepCost][worker]."""
        return self.figures[9:14]

    @property
    def num_decoding(self) -> Column:
        """Sequences that decode there now."""
        return self.figures[14]

    @property
    def num_decodes(self) -> Column:
        """Those, and the ones that will."""
        return self.figures[15]

    @property
    def has_room(self) -> NDArray[np.bool_]:
        return self.figures[16] > 0

    @property
    def has_seat(self) -> NDArray[np.bool_]:
        return self.figures[17] > 0
