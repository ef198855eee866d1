"""Which worker a request goes to: pure functions over what the gateway knows of the candidates.

All of them are deterministic: ties go to the worker that was given less so far, then to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class Candidate:
    index: int  # position in the caller's list of workers
    matched: int  # leading blocks of the prompt that it holds
    num_requests: int  # there now, running and waiting
    num_tokens: int  # uncached prompt tokens that it has yet to compute
    num_dispatched: int  # requests ever sent there


Policy = Callable[[Sequence[Candidate], int], Candidate]  # candidates, blocks of the prompt -> the chosen one


def make_policy(config: RouterConfig) -> Policy:
    limits = config.cache_aware
    by_cache = partial(
        cache_aware,
        min_match=limits.min_match,
        imbalance_requests=limits.imbalance_requests,
        imbalance_ratio=limits.imbalance_ratio,
    )
    return {"cache_aware": by_cache, "round_robin": round_robin, "least_loaded": least_loaded}[config.policy]


def cache_aware(
    candidates: Sequence[Candidate],
    num_blocks: int,
    *,
    min_match: float = 0.3,
    imbalance_requests: int = 64,
    imbalance_ratio: float = 1.5,
) -> Candidate:
    """Choose the longest match, unless it is short or its worker far busier than the idlest: then the least loaded.

    The imbalance is judged for the worker that would win, not for the fleet: one hot worker elsewhere must not cost
    everybody the cache.
    """
    idlest = least_loaded(candidates, num_blocks)
    longest = max(candidate.matched for candidate in candidates)
    if longest == 0 or longest < min_match * num_blocks:
        return idlest
    best = least_loaded([candidate for candidate in candidates if candidate.matched == longest], num_blocks)
    is_far_busier = (
        best.num_requests - idlest.num_requests > imbalance_requests
        and best.num_requests > imbalance_ratio * idlest.num_requests
    )
    return idlest if is_far_busier else best


def least_loaded(candidates: Sequence[Candidate], num_blocks: int) -> Candidate:
    return min(candidates, key=lambda c: (c.num_requests, c.num_tokens, c.num_dispatched, c.index))


def round_robin(candidates: Sequence[Candidate], num_blocks: int) -> Candidate:
    return min(candidates, key=lambda c: (c.num_dispatched, c.index))
