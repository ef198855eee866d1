"""The `cost` policy: predicts for each path what the request waits and what it makes others wait, in milliseconds.

Paths: prefill and decode on one worker, or prefill on P and decode on D. A path costs the request's own time to first
token, the work that it adds, the prompts that will share its steps, and what it takes from those that decode there.
P's part and D's part add up, so that the cheapest pair is found without trying all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baton.router.fleet import Column, Pool
from baton.router.policy import Ask, Choice

HAND_OVER_MS = 2.0  # messages between P and D until D's first own step
MAX_SHARE = 0.97  # of prefill that a worker's decode steps can live beside
NEAR = 0.6  # share of a target from which on a prediction is a risk
TIE_MS = 0.5  # costs closer than this are equal: the workers take turns


@dataclass(frozen=True, slots=True)
class Weights:
    """How much a millisecond of each kind counts beside one of the request's own time to first token.

    Found by tests/bench/routing_sim.py's traces. What holds up running sequences counts only as far as the fleet is
    busy with prefill: then it gathers long prompts on few workers, and the others stay quick for the rest.
    """

    work: float = 3.0  # of prefill: capacity that later requests will lack
    beside: float = 1.0  # of other prompts, whose chunks will share the request's decode steps
    running: float = 1.0  # by which a running sequence is held up, on a fleet that is busy
    held_up: float = 0.3  # by which it is held up, where prefill could be apart
    decode: float = 0.15  # of the request's own decode steps, and of others' by its being there
    idle_share: float = 0.55  # of the fleet's time in prefill, up to which it is not busy at all
    busy_share: float = 0.85  # ... and from which it is
    miss_ms: float = 10_000.0  # what a missed target costs


@dataclass(frozen=True, slots=True)
class CostPolicy:
    weights: Weights = Weights()

    def __call__(self, ask: Ask, decoders: Pool, prefillers: Pool) -> Choice:
        weights = self.weights
        decode = self._decode(ask, decoders)
        alone = self._prefill(ask, decoders)
        if not len(prefillers):
            row = _cheapest(decode + alone.cost, decoders)
            return Choice(row, None, float(alone.ttft_ms[row]))
        apart = self._prefill(ask, prefillers)
        prefill_row, decode_row = _cheapest(apart.cost, prefillers), _cheapest(decode, decoders)
        # Prefill apart holds up nobody who decodes: against that, every millisecond of it counts.
        alone_cost = (
            decode
            + alone.cost
            + weights.held_up * alone.held_up_ms
            + weights.miss_ms * self._missed(ask, decoders, alone)
        )
        row = _cheapest(alone_cost, decoders)
        if alone_cost[row] <= apart.cost[prefill_row] + decode[decode_row] + HAND_OVER_MS:
            return Choice(row, None, float(alone.ttft_ms[row]))
        return Choice(decode_row, prefill_row, float(apart.ttft_ms[prefill_row]))

    def _prefill(self, ask: Ask, pool: Pool) -> _Prefill:
        """Predict what prefilling on each worker takes, and costs."""
        constant, token, context, decode, decode_token = pool.costs
        cached = np.minimum(pool.cached, ask.prompt_len - 1)
        uncached = ask.prompt_len - cached
        own_ms = (token + context * (cached + 0.5 * uncached)) * uncached
        num_running = np.maximum(pool.num_requests - pool.num_prefills, 0)
        step_ms = constant + decode * num_running + decode_token * pool.kv_tokens
        # Shorter prompts overtake longer ones: nobody waits for much more than its own time for each who is there.
        queue_ms = np.minimum(pool.prefill_ms, pool.num_prefills * own_ms)
        num_steps = np.ceil(uncached / pool.step_tokens) + queue_ms / np.maximum(token, 1e-9) / pool.step_tokens
        ttft_ms = queue_ms + own_ms + num_steps * step_ms
        weights = self.weights
        cost = (
            ttft_ms
            + weights.work * own_ms
            + weights.beside * (pool.prefill_ms - queue_ms)
            + weights.running * self._busy(pool) * num_running * own_ms
            + weights.miss_ms * (ttft_ms > ask.ttft_ms)
        )
        return _Prefill(ttft_ms, cost, num_running * own_ms)

    def _decode(self, ask: Ask, pool: Pool) -> Column:
        """Predict what decoding on each worker costs: the request's own steps, and the others' being longer."""
        constant, _, _, decode, decode_token = pool.costs
        added_ms = decode + decode_token * (ask.prompt_len + 0.5 * ask.output_len)
        step_ms = constant + decode * pool.num_requests + decode_token * pool.kv_tokens + added_ms
        slower_ms = ask.output_len * (step_ms + pool.num_requests * added_ms)
        is_full = pool.kv_tokens + ask.prompt_len + ask.output_len > pool.capacity
        return self.weights.decode * slower_ms + self.weights.miss_ms * ((step_ms > ask.itl_ms) + 1.0 * is_full)

    def _missed(self, ask: Ask, pool: Pool, alone: _Prefill) -> Column:
        """Whether sequences that decode on a worker would miss their target if it prefilled this one too."""
        constant, _, _, decode, decode_token = pool.costs
        step_ms = constant + decode * pool.num_requests + decode_token * pool.kv_tokens
        own_ms = alone.held_up_ms / np.maximum(pool.num_requests - pool.num_prefills, 1)
        itl_ms = step_ms / (1 - np.minimum(pool.prefill_share, MAX_SHARE)) + own_ms / ask.output_len
        return _risk(itl_ms / ask.itl_ms)

    def _busy(self, pool: Pool) -> float:
        idle, busy = self.weights.idle_share, self.weights.busy_share
        return min(max((float(pool.prefill_share.mean()) - idle) / (busy - idle), 0.0), 1.0)


class _Prefill(NamedTuple):
    ttft_ms: Column
    cost: Column
    held_up_ms: Column  # of all who decode there, together


def _risk(ratio: Column) -> Column:
    """How likely a target is missed that is predicted to be met by so much, from 0 to 1."""
    return np.clip((ratio - NEAR) / (1 - NEAR), 0.0, 1.0)


def _cheapest(cost: Column, pool: Pool) -> int:
    """Return the row that was given least so far among those that cost next to nothing more than the cheapest."""
    rows = np.flatnonzero(cost <= cost.min() + TIE_MS)
    return int(rows[pool.num_dispatched[rows].argmin()])
