from __future__ import annotations

from dataclasses import replace

from baton.router.config import RouterConfig
from baton.router.policy import Candidate, cache_aware, least_loaded, make_policy, round_robin


def worker(index: int, *, matched: int = 0, requests: int = 0, tokens: int = 0, dispatched: int = 0) -> Candidate:
    return Candidate(index, matched, requests, tokens, dispatched)


def test_the_longest_match_wins_over_a_shorter_queue() -> None:
    assert cache_aware([worker(0), worker(1, matched=6, requests=60)], 10).index == 1


def test_a_short_match_is_a_miss_and_goes_to_the_least_loaded() -> None:
    assert cache_aware([worker(0), worker(1, matched=2, requests=5)], 10).index == 0


def test_a_holder_far_busier_than_the_idlest_is_passed_over() -> None:
    assert cache_aware([worker(0), worker(1, matched=10, requests=64)], 10).index == 1
    assert cache_aware([worker(0), worker(1, matched=10, requests=65)], 10).index == 0


def test_being_busier_by_count_alone_is_not_enough() -> None:
    assert cache_aware([worker(0, requests=200), worker(1, matched=10, requests=290)], 10).index == 1


def test_one_hot_worker_elsewhere_does_not_cost_everybody_the_cache() -> None:
    candidates = [worker(0, requests=500), worker(1), worker(2, matched=10, requests=3)]
    assert cache_aware(candidates, 10).index == 2


def test_among_equal_matches_the_least_loaded_wins() -> None:
    assert cache_aware([worker(0, matched=9, requests=4), worker(1, matched=9, requests=2)], 10).index == 1


def test_a_prompt_shorter_than_a_block_goes_by_load() -> None:
    assert cache_aware([worker(0, requests=1), worker(1)], 0).index == 1


def test_ties_go_to_the_one_that_was_given_less_then_to_the_first() -> None:
    assert least_loaded([worker(0, dispatched=3), worker(1, dispatched=2), worker(2, dispatched=2)], 0).index == 1
    assert least_loaded([worker(0, tokens=9), worker(1, tokens=8)], 0).index == 1


def test_a_hot_prefix_spills_over() -> None:
    """480 requests of one prefix at once: none of four workers is left idle, and the holder gets its share."""
    candidates = [worker(0, matched=10), worker(1), worker(2), worker(3)]
    for _ in range(480):
        chosen = cache_aware(candidates, 10)
        candidates[chosen.index] = replace(chosen, num_requests=chosen.num_requests + 1)
    assert candidates[0].num_requests == max(c.num_requests for c in candidates)
    assert min(c.num_requests for c in candidates) > 60


def test_misses_spread_evenly() -> None:
    candidates = [worker(i) for i in range(4)]
    for _ in range(400):
        chosen = cache_aware(candidates, 10)
        candidates[chosen.index] = replace(chosen, num_requests=chosen.num_requests + 1)
    assert [c.num_requests for c in candidates] == [100] * 4


def test_round_robin_takes_turns() -> None:
    candidates = [worker(0, requests=9), worker(1)]
    turns: list[int] = []
    for _ in range(4):
        chosen = round_robin(candidates, 0)
        turns.append(chosen.index)
        candidates[chosen.index] = replace(chosen, num_dispatched=chosen.num_dispatched + 1)
    assert turns == [0, 1, 0, 1]


def test_the_configured_policy_gets_its_limits() -> None:
    policy = make_policy(RouterConfig.model_validate({"cache_aware": {"min_match": 0.9}}))
    assert policy([worker(0), worker(1, matched=8, requests=1)], 10).index == 0
    assert make_policy(RouterConfig(policy="round_robin")) is round_robin
