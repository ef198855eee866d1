"""The `cost` policy: predicts for each path what the request waits and what it makes others wait, in milliseconds.

Paths: prefill and decode on one worker, or prefill on P and decode on D. A path costs the request's own time to first
token, the work that it adds, the prompts that will share its steps, and what it takes from those that decode there.
P's part and D's part add up, so that the cheapest pair is found without trying all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from baton.router.fleet import Column, Pool
from baton.router.policy import Ask, Choice

HAND_OVER_MS = 2.0  # messages between P and D until D's first own step
MAX_SHARE = 0.97  # of prefill that a worker's decode steps can live beside
UNSURE = 0.15  # standard deviation of a predicted time, as a share of it
FULL = 0.9  # share of its time that a worker spends in prefill, if it is there for that
PUSH_TOKEN_MS = 0.0008  # of KV on its way, a token: an 8B model over NVLink
TIE_MS = 0.5  # costs closer than this are equal


@dataclass(frozen=True, slots=True)
class Weights:
    """How much a millisecond of each kind counts beside one of the request's own time to first token."""

    work: float = 3.0  # of prefill, on an idle fleet: capacity that later requests will lack; more as it gets scarce
    scarcest: float = 4.0
    overtaken: float = 1.0  # of prompts that wait there and are longer: others', for all that is known
    received: float = 1.0  # of prompts in the step that gives the second token, where the first came from a peer
    held_up: float = 0.05  # by which a running sequence is held up
    decode: float = 0.15  # of the request's own decode steps, and of others' by its being there
    miss_ms: float = 10_000.0  # what a missed target costs


@dataclass(frozen=True, slots=True)
class CostPolicy:
    weights: Weights = Weights()

    def __call__(self, ask: Ask, decoders: Pool, prefillers: Pool) -> Choice:
        expected = _expected(decoders)
        decode = self._decode(ask, decoders, expected)
        here = self._prefill(ask, decoders, expected)
        row = _cheapest(decode + here.cost, decoders)
        options = [(float(decode[row] + here.cost[row]), Choice(row, None, float(here.ttft_ms[row])))]
        # Handed over, the second token comes with a step of the decode worker's, whatever is in it.
        received = decode + self.weights.received * self._step_ms(decoders) + self._push_ms(ask, decoders)
        if len(prefillers):
            alone = _Expected(prefillers.prefill_share, np.zeros(len(prefillers)))
            apart = self._prefill(ask, prefillers, alone)
            options.append(_pair(apart, prefillers, received, decoders))
        if len(decoders) > 1 and not ask.is_whole:
            prefill = _cheapest(here.cost, decoders)
            received[prefill] = np.inf  # hands over to another
            cost, choice = _pair(here, decoders, received, decoders)
            options.append((cost, choice._replace(is_peer=True)))
        return min(options, key=lambda option: option[0])[1]

    def _step_ms(self, pool: Pool) -> Column:
        """Predict how long prompts hold up the next step."""
        return np.minimum(pool.prefill_ms, pool.costs[1] * pool.step_tokens)

    def _push_ms(self, ask: Ask, pool: Pool) -> Column:
        """Predict how long the KV that each lacks is on its way, of which computing the prompt hides the most part."""
        return HAND_OVER_MS + PUSH_TOKEN_MS * np.maximum(ask.prompt_len - pool.cached, 0.0)

    def _prefill(self, ask: Ask, pool: Pool, expected: _Expected) -> _Prefill:
        """Predict what prefilling on each worker takes, and costs."""
        weights = self.weights
        constant, token, context, decode, decode_token = pool.costs
        cached = np.minimum(pool.cached, ask.prompt_len - 1)
        uncached = ask.prompt_len - cached
        own_ms = (token + context * (cached + 0.5 * uncached)) * uncached
        num_running = pool.num_decoding
        step_ms = constant + decode * num_running + decode_token * pool.kv_tokens
        # Shorter prompts overtake longer ones: nobody waits for much more than its own time for each who is there.
        queue_ms = np.minimum(pool.prefill_ms, pool.num_prefills * own_ms)
        num_steps = np.ceil(uncached / pool.step_tokens) + queue_ms / np.maximum(token, 1e-9) / pool.step_tokens
        ttft_ms = queue_ms + own_ms + num_steps * step_ms
        harm = late = 0.0
        if ask.itl_ms < inf:
            held_up = self._held_up(ask, pool, expected, step_ms, own_ms)
            harm = held_up.missed(own_ms) - held_up.missed(0.0)
        if ask.ttft_ms < inf:
            late = _above(ttft_ms - ask.ttft_ms, UNSURE * ttft_ms)
        scarcity = 1 / (1 - np.minimum(pool.prefill_share.mean(), 1 - 1 / weights.scarcest))
        cost = (
            ttft_ms
            + weights.work * scarcity * own_ms
            + weights.overtaken * (pool.prefill_ms - queue_ms)
            + np.maximum(num_running, expected.num_running) * (weights.held_up * own_ms + weights.miss_ms * harm)
            + weights.miss_ms * late
        )
        return _Prefill(ttft_ms, cost)

    def _held_up(self, ask: Ask, pool: Pool, expected: _Expected, step_ms: Column, own_ms: Column) -> _HeldUp:
        """Predict it, where the time between tokens has a target."""
        decode_ms = step_ms * ask.output_len
        prefill_ms = _beside(decode_ms, expected, pool)
        deviation = np.sqrt(prefill_ms * own_ms + (UNSURE * decode_ms) ** 2)
        return _HeldUp(prefill_ms, ask.itl_ms * ask.output_len - decode_ms, deviation)

    def _decode(self, ask: Ask, pool: Pool, expected: _Expected) -> Column:
        """Predict what decoding on each worker costs: the request's own steps, and the others' being longer."""
        weights = self.weights
        constant, token, context, decode, decode_token = pool.costs
        added_ms = decode + decode_token * (ask.prompt_len + 0.5 * ask.output_len)
        step_ms = constant + decode * pool.num_decodes + decode_token * pool.kv_tokens
        lost = 0.0
        if ask.itl_ms < inf:
            own_ms = (token + context * 0.5 * ask.prompt_len) * ask.prompt_len
            before = self._held_up(ask, pool, expected, step_ms, own_ms)
            missed = self._held_up(ask, pool, expected, step_ms + added_ms, own_ms).missed(0.0)
            lost = missed + pool.num_decodes * (missed - before.missed(0.0))
        prefill_ms = _beside((step_ms + added_ms) * ask.output_len, expected, pool)
        slower_ms = ask.output_len * (step_ms + (1 + pool.num_decodes) * added_ms) + prefill_ms
        is_full = pool.kv_tokens + ask.prompt_len + ask.output_len > pool.capacity
        return weights.decode * slower_ms + weights.miss_ms * (lost + is_full)


class _Prefill(NamedTuple):
    ttft_ms: Column
    cost: Column


class _Expected(NamedTuple):
    prefill_share: Column
    num_running: Column


def _expected(pool: Pool) -> _Expected:
    """Divide the work of workers that do both: as many of them as that keeps busy prefill, the others decode."""
    share = pool.prefill_share
    num_running = pool.num_decoding
    busy = float(share.sum())
    num = min(round(busy / FULL), len(pool) - 1)
    if not num:
        return _Expected(share, num_running)
    is_prefill = np.arange(len(pool)) < num
    return _Expected(
        np.where(is_prefill, np.maximum(share, min(busy / num, MAX_SHARE)), share),
        np.where(is_prefill, num_running, np.maximum(num_running, num_running.sum() / (len(pool) - num))),
    )


class _HeldUp(NamedTuple):
    """What prompts take from a sequence in its life, in ms: expected, allowed by its target, and how uncertain."""

    prefill_ms: Column
    allowed_ms: Column
    deviation: Column

    def missed(self, more_ms: Column | float) -> Column:
        """How likely the target between tokens is missed if prompts take so much more."""
        return _above(self.prefill_ms + more_ms - self.allowed_ms, self.deviation)


def _beside(decode_ms: Column, expected: _Expected, pool: Pool) -> Column:
    """Predict how long prompts hold up a sequence whose own steps take so long together."""
    share = np.minimum(expected.prefill_share, MAX_SHARE)
    return np.maximum(decode_ms * share / (1 - share), pool.prefill_ms)


def _above(excess: Column, deviation: Column) -> Column:
    """How likely a figure is above 0 whose mean and standard deviation these are: near enough to the normal law."""
    return 0.5 + 0.5 * np.tanh(0.85 * excess / np.maximum(deviation, 1e-9))


def _pair(prefill: _Prefill, prefillers: Pool, received: Column, decoders: Pool) -> tuple[float, Choice]:
    """P's part and D's part add up, so the cheapest pair is found without trying all."""
    row, decode = _cheapest(prefill.cost, prefillers), _cheapest(received, decoders)
    return float(prefill.cost[row] + received[decode]), Choice(decode, row, float(prefill.ttft_ms[row]))


def _cheapest(cost: Column, pool: Pool) -> int:
    """Return the row that was given least to compute so far among those that cost hardly more than the cheapest."""
    rows = np.flatnonzero(cost <= cost.min() + TIE_MS)
    return int(rows[pool.tokens_dispatched[rows].argmin()])
