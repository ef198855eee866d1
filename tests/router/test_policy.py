from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pools import BLOCK, pool, routed

from baton.actors.messages import Load
from baton.router.config import RouterConfig
from baton.router.fleet import Pool, Roster, RoutedWorker
from baton.router.policies import make_policy
from baton.router.policy import (
    Ask,
    Choice,
    cache_aware,
    dynamo,
    first_of,
    least_loaded,
    pairwise,
    power_of_two,
    random,
    round_robin,
    with_affinity,
)

ASK = Ask(10 * BLOCK)


def test_the_longest_match_wins_over_a_shorter_queue() -> None:
    assert cache_aware(ASK, pool(routed("a"), routed("b", requests=60), cached={1: 6})) == 1


def test_a_short_match_is_a_miss_and_goes_to_the_least_loaded() -> None:
    assert cache_aware(ASK, pool(routed("a"), routed("b", requests=5), cached={1: 2})) == 0


def test_a_holder_far_busier_than_the_idlest_is_passed_over() -> None:
    assert cache_aware(ASK, pool(routed("a"), routed("b", requests=64), cached={1: 10})) == 1
    assert cache_aware(ASK, pool(routed("a"), routed("b", requests=65), cached={1: 10})) == 0


def test_being_busier_by_count_alone_is_not_enough() -> None:
    assert cache_aware(ASK, pool(routed("a", requests=200), routed("b", requests=290), cached={1: 10})) == 1


def test_one_hot_worker_elsewhere_does_not_cost_everybody_the_cache() -> None:
    assert cache_aware(ASK, pool(routed("a", requests=500), routed("b"), routed("c", requests=3), cached={2: 10})) == 2


def test_among_equal_matches_the_least_loaded_wins() -> None:
    assert cache_aware(ASK, pool(routed("a", requests=4), routed("b", requests=2), cached={0: 9, 1: 9})) == 1


def test_a_prompt_shorter_than_a_block_goes_by_load() -> None:
    assert cache_aware(Ask(3), pool(routed("a", requests=1), routed("b"))) == 1


def test_ties_go_to_the_one_that_was_given_less_then_to_the_first() -> None:
    workers = pool(routed("a", dispatched=3), routed("b", dispatched=2), routed("c", dispatched=2))
    assert least_loaded(ASK, workers) == 1
    assert least_loaded(ASK, pool(routed("a", tokens=9), routed("b", tokens=8))) == 1


def dispatch(workers: list[RoutedWorker], row: int) -> None:
    workers[row].charge(num_tokens=0, context=0.0)


def test_a_hot_prefix_spills_over() -> None:
    """480 requests of one prefix at once: none of four workers is left idle, and the holder gets its share."""
    workers = [routed(id) for id in "abcd"]
    for _ in range(480):
        dispatch(workers, cache_aware(ASK, pool(*workers, cached={0: 10})))
    counts = [worker.num_requests for worker in workers]
    assert counts[0] == max(counts)
    assert min(counts) > 60


def test_misses_spread_evenly() -> None:
    workers = [routed(id) for id in "abcd"]
    for _ in range(400):
        dispatch(workers, cache_aware(ASK, pool(*workers)))
    assert [worker.num_requests for worker in workers] == [100] * 4


def test_round_robin_takes_turns() -> None:
    workers = [routed("a", requests=9), routed("b")]
    turns: list[int] = []
    for _ in range(4):
        turns.append(round_robin(ASK, pool(*workers)))
        dispatch(workers, turns[-1])
    assert turns == [0, 1, 0, 1]


def test_chance_is_drawn_from_the_number_of_the_decision_and_is_even() -> None:
    workers = pool(*(routed(id) for id in "abcd"))
    drawn = [random(Ask(1, number=number), workers) for number in range(4000)]
    assert drawn == [random(Ask(1, number=number), workers) for number in range(4000)]
    assert all(900 < count < 1100 for count in Counter(drawn).values())


def test_power_of_two_avoids_the_busiest_and_finds_the_idlest_half_the_time() -> None:
    workers = pool(*(routed(id, requests=i) for i, id in enumerate("abcd")))
    drawn = Counter(power_of_two(Ask(1, number=number), workers) for number in range(4000))
    assert drawn[3] == 0
    assert 1800 < drawn[0] < 2200  # in half of all pairs


def test_dynamo_weighs_blocks_to_prefill_against_blocks_that_decode() -> None:
    held = 100
    holder = routed("a", requests=1, blocks_held=held)
    assert dynamo(Ask(held * 2 * BLOCK), pool(holder, routed("b"), cached={0: held + 1}), pool()).decode == 0
    assert dynamo(Ask(held * 2 * BLOCK), pool(holder, routed("b"), cached={0: held - 1}), pool()).decode == 1


def test_dynamo_decodes_by_load_alone_where_prefill_is_apart() -> None:
    decoders = pool(routed("a", blocks_held=9), routed("b", blocks_held=8), cached={0: 10})
    prefillers = pool(routed("p"), routed("q", tokens=5 * BLOCK), cached={1: 9})
    assert dynamo(ASK, decoders, prefillers) == Choice(decode=1, prefill=1)


def test_each_pool_is_picked_from_by_itself() -> None:
    policy = pairwise(least_loaded)
    decoders, prefillers = pool(routed("a", requests=1), routed("b")), pool(routed("p"))
    assert policy(ASK, decoders, prefillers) == Choice(1, 0)
    assert policy(ASK, decoders, pool()) == Choice(1, None)


def test_a_session_returns_to_its_worker_and_sessions_spread() -> None:
    policy = with_affinity(pairwise(least_loaded), imbalance_requests=64, imbalance_ratio=1.5)
    workers = [routed(id) for id in "abcd"]
    homes = {f"s{i}": policy(Ask(1, session=f"s{i}"), pool(*workers), pool()).decode for i in range(400)}
    assert all(70 < count < 130 for count in Counter(homes.values()).values())
    dispatch(workers, homes["s0"])
    assert policy(Ask(1, session="s0"), pool(*workers), pool()).decode == homes["s0"]


def test_a_session_whose_worker_is_gone_moves_and_no_other_does() -> None:
    policy = with_affinity(pairwise(least_loaded), imbalance_requests=64, imbalance_ratio=1.5)
    before = {f"s{i}": policy(Ask(1, session=f"s{i}"), pool(*map(routed, "abcd")), pool()).decode for i in range(100)}
    after = {f"s{i}": policy(Ask(1, session=f"s{i}"), pool(*map(routed, "abc")), pool()).decode for i in range(100)}
    assert all(after[session] == home for session, home in before.items() if home != 3)


def test_a_session_leaves_a_worker_that_is_far_busier() -> None:
    policy = with_affinity(pairwise(least_loaded), imbalance_requests=64, imbalance_ratio=1.5)
    workers = [routed("a"), routed("b")]
    home = policy(Ask(1, session="s"), pool(*workers), pool()).decode
    for _ in range(65):
        dispatch(workers, home)
    assert policy(Ask(1, session="s"), pool(*workers), pool()).decode == 1 - home


def test_the_configured_policy_gets_its_limits() -> None:
    policy = make_policy(RouterConfig.model_validate({"policy": "cache_aware", "cache_aware": {"min_match": 0.9}}))
    assert policy(ASK, pool(routed("a"), routed("b", requests=1), cached={1: 8}), pool()).decode == 0


@given(st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)))
def test_the_first_is_the_smallest_by_all_keys_in_turn_then_by_row(keys: list[list[int]]) -> None:
    columns = [np.array(key, dtype=np.float64) for key in keys]
    assert first_of(*columns) == min(range(len(keys[0])), key=lambda row: (*(key[row] for key in keys), row))


def test_workers_of_a_pool_share_columns_that_follow_each_of_them() -> None:
    workers = [routed(name, requests=i, tokens=10 * i) for i, name in enumerate("abcd")]
    figures = Roster(workers).figures
    workers[2].take_load(Load(num_running=7, waiting_tokens=70))
    workers[1].charge(num_tokens=5, context=0.0)
    seen = Pool(workers, figures, np.zeros(4))
    assert seen.num_requests.tolist() == [worker.num_requests for worker in workers] == [0, 2, 7, 3]
    assert seen.num_tokens.tolist() == [worker.num_tokens for worker in workers] == [0, 15, 70, 30]
    assert seen.only(2).num_requests.tolist() == [7]
