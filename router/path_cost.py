"""The `cost` policy: predicts for each path what the request waits and what it makes others wait, in milliseconds.

Paths: prefill and decode on one worker, or prefill on P and decode on D. A path costs the request's own time to first
token, the time that its prefill takes from those that decode or wait there, and what it adds to the decode steps.
P's part and D's part add up, so that the cheapest pair is found without trying all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baton.router.fleet import Column, Pool
from baton.router.policy import Ask, Choice, first_of

HAND_OVER_MS = 2.0  # messages between P and D until D's first own step
NEAR = 0.6  # share of a target that a prediction may reach before it counts as a risk
MAX_SHARE = 0.97  # of prefill; decodes always get their steps
TIE_MS = 0.5  # costs closer than this are equal: the workers take turns


@dataclass(frozen=True, slots=True)
class Weights:
    """How much a millisecond of each kind counts beside one of the request's own time to first token."""

    work: float = 1.0  # of prefill: capacity that later requests will lack
    running: float = 0.3  # by which a running sequence is held up
    decode: float = 1.0  # of the request's own decode steps, and of others' by its being there
    miss_ms: float = 10_000.0  # what a missed target costs
    share: float = 0.0
    power: float = 2.0


@dataclass(frozen=True, slots=True)
class CostPolicy:
    weights: Weights = Weights()

    def __call__(self, ask: Ask, decoders: Pool, prefillers: Pool) -> Choice:
        itl_ms = _itl_ms(ask, decoders, self.weights.share)
        decode = self._decode(ask, decoders, itl_ms)
        alone = self._prefill(ask, decoders, itl_ms)
        cost = decode + alone.cost
        row = _cheapest(cost, decoders)
        local = Choice(row, None, float(alone.ttft_ms[row]))
        if not len(prefillers):
            return local
        apart = self._prefill(ask, prefillers, np.zeros(len(prefillers)))
        prefill_row, decode_row = _cheapest(apart.cost, prefillers), _cheapest(decode, decoders)
        if cost[row] <= apart.cost[prefill_row] + decode[decode_row] + HAND_OVER_MS:
            return local
        return Choice(decode_row, prefill_row, float(apart.ttft_ms[prefill_row]))

    def _prefill(self, ask: Ask, pool: Pool, itl_ms: Column) -> _Prefill:
        """Predict what prefilling on each worker takes, and costs."""
        constant, token, context, decode, decode_token = pool.costs
        cached = np.minimum(pool.cached, ask.prompt_len - 1)
        uncached = ask.prompt_len - cached
        own_ms = (token + context * (cached + 0.5 * uncached)) * uncached
        num_running = np.maximum(pool.num_requests - pool.num_prefills, 0)
        step_ms = constant + decode * num_running + decode_token * pool.kv_tokens
        # Shorter prompts overtake longer ones: nobody waits for much more than its own time for each who is there.
        queue_ms = np.minimum(pool.prefill_ms, pool.num_prefills * own_ms)
        steps = np.ceil(uncached / pool.step_tokens) + queue_ms / np.maximum(token, 1e-9) / pool.step_tokens
        ttft_ms = queue_ms + own_ms + steps * step_ms
        weights = self.weights
        running = weights.running * (
            min(float(pool.prefill_share.mean()), 1.0) ** weights.power if weights.power else 1.0
        )
        cost = (
            ttft_ms
            + weights.work * own_ms
            + running * num_running * own_ms
            + weights.miss_ms * (ttft_ms > ask.ttft_ms)
            + weights.miss_ms * num_running * (_missed(itl_ms + own_ms / ask.output_len, ask) - _missed(itl_ms, ask))
        )
        return _Prefill(ttft_ms, cost)

    def _decode(self, ask: Ask, pool: Pool, itl_ms: Column) -> Column:
        """Predict what decoding on each worker costs: the request's own steps, and the others' being longer."""
        _, _, _, decode, decode_token = pool.costs
        added_ms = decode + decode_token * (ask.prompt_len + 0.5 * ask.output_len)
        slower_ms = ask.output_len * (itl_ms + pool.num_requests * added_ms)
        is_full = pool.kv_tokens + ask.prompt_len + ask.output_len > pool.capacity
        return self.weights.decode * slower_ms + self.weights.miss_ms * (_missed(itl_ms, ask) + is_full)


def _itl_ms(ask: Ask, pool: Pool, sh: float) -> Column:
    """Predict the mean time between tokens on each worker, with the request there."""
    constant, _, _, decode, decode_token = pool.costs
    num_kv = pool.kv_tokens + ask.prompt_len + 0.5 * ask.output_len
    step_ms = constant + decode * (pool.num_requests + 1) + decode_token * num_kv
    share = np.where(pool.num_requests > 0, sh * pool.prefill_share, 0.0)
    return step_ms / (1 - np.minimum(share, MAX_SHARE))


def _missed(itl_ms: Column, ask: Ask) -> Column:
    """How sure it is that the target is missed, from 0 to 1."""
    return np.clip((itl_ms / ask.itl_ms - NEAR) / (1 - NEAR), 0.0, 1.0)


class _Prefill(NamedTuple):
    ttft_ms: Column
    cost: Column


def _cheapest(cost: Column, pool: Pool) -> int:
    return first_of(cost > cost.min() + TIE_MS, pool.num_dispatched)
