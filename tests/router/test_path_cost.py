from __future__ import annotations

from dataclasses import replace

from pools import BLOCK, pool, routed

from baton.actors.messages import Load
from baton.actors.step_cost import StepCost
from baton.router.fleet import RoutedWorker
from baton.router.path_cost import CostPolicy
from baton.router.policy import Ask, Choice

POLICY = CostPolicy()
ASK = Ask(640 * BLOCK)  # 10k tokens: about 260 ms of prefill


def computing(choice: Choice) -> int:
    """Return the decode worker that computes the prompt, for itself or for another."""
    assert choice.prefill is None or choice.is_peer
    return choice.decode if choice.prefill is None else choice.prefill


def test_an_idle_holder_wins_over_an_idle_stranger() -> None:
    assert POLICY(ASK, pool(routed("a"), routed("b"), cached={1: 100}), pool()).decode == 1


def test_a_holder_loses_when_its_queue_is_longer_than_what_the_cache_saves() -> None:
    short, long = routed("b", tokens=8_000), routed("b", tokens=100_000)
    short.num_own_prefills = long.num_own_prefills = 1
    assert computing(POLICY(ASK, pool(routed("a"), short, cached={1: 600}), pool())) == 1
    assert computing(POLICY(ASK, pool(routed("a"), long, cached={1: 100}), pool())) == 0


def test_the_first_block_of_every_prompt_does_not_gather_them_on_one_worker() -> None:
    """One worker holds the block that starts all prompts; a thousand of them still spread."""
    workers = [routed(id) for id in "abcdefgh"]
    for _ in range(1000):
        row = POLICY(ASK, pool(*workers, cached={0: 32}), pool()).decode
        workers[row].charge(ASK.prompt_len, ASK.prompt_len**2 / 2)
    counts = [worker.num_requests for worker in workers]
    assert max(counts) <= 1.2 * sum(counts) / len(counts)


def test_equal_workers_take_turns() -> None:
    workers = [routed(id) for id in "abc"]
    chosen: list[int] = []
    for _ in range(6):
        chosen.append(POLICY(ASK, pool(*workers), pool()).decode)
        workers[chosen[-1]].tokens_dispatched += 100
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_slow_worker_gets_what_a_fast_one_has_no_time_for() -> None:
    slow, fast = routed("slow"), routed("fast", tokens=10_000)
    slow.take_load(Load(cost=StepCost(prefill_token_ms=0.3)))
    assert computing(POLICY(ASK, pool(slow, fast), pool())) == 1
    fast.take_load(Load(waiting_tokens=600_000, waiting_context=600_000 * 300_000))
    assert computing(POLICY(ASK, pool(slow, fast), pool())) == 0


def busy(worker_id: str, num_running: int) -> RoutedWorker:
    return routed(worker_id, requests=num_running, prefill_share=0.9)


def test_on_a_busy_fleet_a_long_prompt_goes_where_few_decode() -> None:
    assert POLICY(ASK, pool(busy("a", 30), busy("b", 2), cached={0: 100}), pool()).decode == 1


def test_a_long_prompt_is_prefilled_apart_where_many_decode() -> None:
    choice = POLICY(ASK, pool(busy("d", 60), busy("e", 50)), pool(routed("p", role="prefill")))
    assert choice == Choice(1, 0, choice.ttft_ms)


def test_a_short_rest_is_prefilled_where_it_decodes() -> None:
    """What P would have to compute is little, and D has all but that little."""
    ask = Ask(640 * BLOCK)
    choice = POLICY(ask, pool(busy("d", 2), cached={0: 639}), pool(routed("p", role="prefill", tokens=50_000)))
    assert choice.prefill is None


def test_an_idle_decoder_prefills_when_the_prefill_worker_is_behind() -> None:
    behind = routed("p", role="prefill", tokens=200_000)
    behind.num_own_prefills = 20
    assert POLICY(ASK, pool(routed("d")), pool(behind)).prefill is None


def test_a_worker_without_room_for_the_context_is_avoided() -> None:
    full = routed("a", blocks_held=49_900)
    assert POLICY(ASK, pool(full, routed("b", requests=40, tokens=4000), cached={0: 600}), pool()).decode == 1


def test_what_would_miss_the_target_goes_elsewhere_even_against_the_cache() -> None:
    holder = routed("a", tokens=16_000)
    holder.num_own_prefills = 4
    workers = pool(holder, routed("b"), cached={0: 350})
    assert computing(POLICY(Ask(ASK.prompt_len, ttft_ms=5000), workers, pool())) == 0
    assert computing(POLICY(Ask(ASK.prompt_len, ttft_ms=300), workers, pool())) == 1


def test_a_holder_that_is_full_of_sequences_computes_the_rest_and_pushes_the_prefix_to_another() -> None:
    holder, idle = routed("a", requests=200, blocks_held=20_000), routed("b")
    choice = POLICY(replace(ASK, itl_ms=40), pool(holder, idle, cached={0: 630}), pool())
    assert choice == Choice(1, 0, choice.ttft_ms, is_peer=True)


def test_what_must_be_computed_where_it_decodes_is_never_handed_over() -> None:
    holder, idle = routed("a", requests=200, blocks_held=20_000), routed("b")
    choice = POLICY(replace(ASK, itl_ms=40, is_whole=True), pool(holder, idle, cached={0: 630}), pool())
    assert choice.prefill is None


def test_workers_that_do_both_part_the_work_when_prompts_would_spoil_the_decoding() -> None:
    """Three are busy with prompts, one decodes: the next prompt goes to one of the three, its decoding to the one."""
    workers = pool(*(routed(id, prefill_share=0.85) for id in "abc"), routed("d", requests=20))
    choice = POLICY(Ask(8192, output_len=16, ttft_ms=1000, itl_ms=20), workers, pool())
    assert choice == Choice(3, 0, choice.ttft_ms, is_peer=True)


def test_the_predicted_time_of_an_idle_worker_is_its_cost_model_s() -> None:
    cost = StepCost()
    choice = POLICY(Ask(1000), pool(routed("a")), pool())
    expected = cost.constant_ms + 1000 * (cost.prefill_token_ms + 500 * cost.prefill_context_ms)
    assert choice.ttft_ms is not None and abs(choice.ttft_ms - expected) < 1e-6
