"""The policy that the configuration names."""

from __future__ import annotations

from functools import partial

from baton.router import policy
from baton.router.config import PolicyName, RouterConfig
from baton.router.path_cost import CostPolicy
from baton.router.policy import Pick, Policy, pairwise, with_affinity

PICKS: dict[PolicyName, Pick] = {
    PolicyName.LEAST_LOADED: policy.least_loaded,
    PolicyName.POWER_OF_TWO: policy.power_of_two,
    PolicyName.ROUND_ROBIN: policy.round_robin,
    PolicyName.RANDOM: policy.random,
}


def make_policy(config: RouterConfig) -> Policy:
    """Make the configured policy; requests that name a session go by affinity first."""
    limits = config.cache_aware
    return with_affinity(
        _named(config), imbalance_requests=limits.imbalance_requests, imbalance_ratio=limits.imbalance_ratio
    )


def _named(config: RouterConfig) -> Policy:
    if config.policy is PolicyName.COST:
        return CostPolicy()
    if config.policy is PolicyName.DYNAMO:
        return policy.dynamo
    if config.policy is PolicyName.CACHE_AWARE:
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
