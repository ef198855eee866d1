"""Which workers a request goes to: pure functions over what the gateway knows of the candidates.

All of them are deterministic: ties go to the worker that was given less so far, then to the first. `path_cost` has
the one that predicts times; those here look at counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import NamedTuple

import numpy as np

from baton.router.fleet import Column, Pool

EXPECTED_OUTPUT = 256.0  # tokens, until some requests have ended


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as far as the choice depends on it."""

    prompt_len: int
    number: int = 0  # decisions of this router so far: what chance is drawn from
    session: str = ""  # requests of one session like to meet again
    is_whole: bool = False  # the worker that decodes must compute the prompt
    output_len: float = EXPECTED_OUTPUT  # expected
    ttft_ms: float = inf  # targets
    itl_ms: float = inf


class Choice(NamedTuple):
    """Rows of the pools: who decodes, and who prefills for it; None = the same worker does both."""

    decode: int
    prefill: int | None
    ttft_ms: float | None = None  # predicted, by policies that predict
    is_peer: bool = False  # `prefill` is a row of the decoders


Policy = Callable[[Ask, Pool, Pool], Choice]  # decoders; prefillers, if there are any
Pick = Callable[[Ask, Pool], int]


def pairwise(pick: Pick) -> Policy:
    """Pick in each pool by itself; prompts are always prefilled apart where there are prefill workers."""

    def choose(ask: Ask, decoders: Pool, prefillers: Pool) -> Choice:
        return Choice(pick(ask, decoders), pick(ask, prefillers) if len(prefillers) else None)

    return choose


def first_of(*keys: Column) -> int:
    """Return the row that is smallest by the first key, among equals by the next, and so on; then the first."""
    first, *others = keys
    rows = np.flatnonzero(first == first.min())
    for key in others:
        if len(rows) == 1:
            break
        values = key[rows]
        rows = rows[values == values.min()]
    return int(rows[0])


def cache_aware(
    ask: Ask, pool: Pool, *, min_match: float = 0.3, imbalance_requests: int = 64, imbalance_ratio: float = 1.5
) -> int:
    """Pick the longest match, unless it is short or its worker far busier than the idlest: then the least loaded.

    The imbalance is judged for the worker that would win, not for the fleet: one hot worker elsewhere must not cost
    everybody the cache.
    """
    idlest = least_loaded(ask, pool)
    longest = pool.cached.max()
    if longest == 0 or longest < min_match * ask.prompt_len:
        return idlest
    best = first_of(-pool.cached, pool.num_requests, pool.num_tokens, pool.num_dispatched)
    busy, idle = pool.num_requests[best], pool.num_requests[idlest]
    return idlest if busy - idle > imbalance_requests and busy > imbalance_ratio * idle else best


def least_loaded(ask: Ask, pool: Pool) -> int:
    return first_of(pool.num_requests, pool.num_tokens, pool.num_dispatched)


def power_of_two(ask: Ask, pool: Pool) -> int:
    """Pick the less loaded of two that chance names."""
    if len(pool) == 1:
        return 0
    draw = _draw(ask.number)
    first = draw % len(pool)
    second = (first + 1 + (draw >> 32) % (len(pool) - 1)) % len(pool)
    pair = np.array(sorted((first, second)))
    return int(pair[first_of(pool.num_requests[pair], pool.num_tokens[pair], pool.num_dispatched[pair])])


def round_robin(ask: Ask, pool: Pool) -> int:
    return first_of(pool.num_dispatched)


def random(ask: Ask, pool: Pool) -> int:
    return _draw(ask.number) % len(pool)


def dynamo(ask: Ask, decoders: Pool, prefillers: Pool) -> Choice:
    """Choose by NVIDIA Dynamo's published cost, for comparison: blocks to prefill plus blocks that decode.

    Source: ai-dynamo/dynamo docs/components/router/{router-concepts, router-disaggregated-serving}.md, defaults; in
    tokens instead of blocks. With prefill workers, these go by prefill alone, and decode workers by load alone.
    """
    if not len(prefillers):
        to_prefill = np.maximum(decoders.num_tokens + ask.prompt_len - decoders.cached, 0)
        return Choice(first_of(to_prefill + decoders.kv_tokens + ask.prompt_len, decoders.num_dispatched), None)
    to_prefill = np.maximum(prefillers.num_tokens + ask.prompt_len - prefillers.cached, 0)
    return Choice(
        first_of(decoders.kv_tokens, decoders.num_dispatched), first_of(to_prefill, prefillers.num_dispatched)
    )


def with_affinity(policy: Policy, *, imbalance_requests: int, imbalance_ratio: float) -> Policy:
    """Send a session's requests to one decode worker, by rendezvous hashing, unless that is far busier than the idlest.

    `policy` chooses the rest, and for requests of no session everything.
    """

    def choose(ask: Ask, decoders: Pool, prefillers: Pool) -> Choice:
        if not ask.session:
            return policy(ask, decoders, prefillers)
        ids = [worker.info.peer.worker_id for worker in decoders.workers]
        home = max(range(len(ids)), key=lambda row: _affinity(ask.session, ids[row]))
        busy, idle = decoders.num_requests[home], decoders.num_requests.min()
        if busy - idle > imbalance_requests and busy > imbalance_ratio * idle:
            return policy(ask, decoders, prefillers)
        return policy(ask, decoders.only(home), prefillers)._replace(decode=home)

    return choose


def _affinity(session: str, worker_id: str) -> bytes:
    return blake2b(f"{session}\0{worker_id}".encode(), digest_size=8).digest()


def _draw(number: int) -> int:
    """Return 64 bits that look random and follow from `number`."""
    return int.from_bytes(blake2b(number.to_bytes(8, "little"), digest_size=8).digest(), "little")
