"""The policy that the configuration names."""

from __future__ import annotations

from functools import partial

from baton.router import policy
from baton.router.config import RouterConfig
from baton.router.path_cost import CostPolicy
from baton.router.policy import Pick, Policy, pairwise, with_affinity

PICKS: dict[str, Pick] = {
    "least_loaded": policy.least_loaded,
    "power_of_two": policy.power_of_two,
    "round_robin": policy.round_robin,
    "random": policy.random,
}


def make_policy(config: RouterConfig) -> Policy:
    """Make the configured policy; requests that name a session go by affinity first."""
    limits = config.cache_aware
    return with_affinity(
        _named(config), imbalance_requests=limits.imbalance_requests, imbalance_ratio=limits.imbalance_ratio
    )


def _named(config: RouterConfig) -> Policy:
    if config.policy == "cost":
        return CostPolicy()
    if config.policy == "dynamo":
        return policy.dynamo
    if config.policy == "cache_aware":
        limits = config.cache_aware
        return pairwise(
            partial(
                policy.cache_aware,
                min_match=limits.min_match,
                imbalance_requests=limits.imbalance_requests,
                imbalance_ratio=limits.imbalance_ratio,
            )
        )
    return pairwise(PICKS[config.policy])
