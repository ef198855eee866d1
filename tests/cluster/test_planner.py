from __future__ import annotations

from dataclasses import replace

import pytest

from baton.cluster.planner import Decision, Demand, Goals, Memory, Split, WorkerLimits, plan

CODE = Demand(seconds=5, num_requests=200, prompt_len=2000, output_len=30)  # long prompts, hardly any output
CHAT = Demand(seconds=5, num_requests=400, prompt_len=1000, output_len=250)
GOALS = Goals(ttft_ms=2000, itl_ms=50)


EVEN = Split(4, 4)
NEW = Memory()


def decide(
    demand: Demand, now: Split = EVEN, *, goals: Goals = GOALS, now_s: float = 100.0, memory: Memory = NEW
) -> Decision:
    return plan(demand, now, WorkerLimits(), goals, now_s=now_s, memory=memory)


def test_long_prompts_want_prefill_workers_and_long_outputs_decode_workers() -> None:
    assert decide(CODE).split.prefill > decide(CHAT).split.prefill >= 1
    assert sum(decide(CODE).split) == 8


def test_cached_prompts_and_accepted_drafts_need_fewer_workers() -> None:
    cached, drafted = replace(CODE, hit_rate=0.5), replace(CHAT, acceptance=2.5)
    assert decide(cached).load.prefill < decide(CODE).load.prefill
    assert decide(drafted).load.decode < decide(CHAT).load.decode


def test_tighter_targets_need_more_workers() -> None:
    assert decide(CHAT, goals=Goals(itl_ms=12)).load.decode > decide(CHAT).load.decode
    assert decide(CODE, goals=Goals(ttft_ms=100)).load.prefill > decide(CODE).load.prefill


def test_what_waits_already_counts() -> None:
    assert decide(replace(CODE, waiting_tokens=1_000_000)).load.prefill > decide(CODE).load.prefill
    assert decide(replace(CHAT, num_decoding=2000)).load.decode > decide(CHAT).load.decode


def test_nothing_moves_while_the_last_move_settles_nor_for_little() -> None:
    first = decide(CODE, Split(1, 7))
    assert first.split != Split(1, 7)
    assert decide(CODE, Split(1, 7), now_s=105, memory=first.memory).split == Split(1, 7)
    assert decide(CODE, Split(1, 7), now_s=111, memory=first.memory).split == first.split
    assert decide(CODE, Split(1, 7), goals=replace(GOALS, min_gain=0.9)).split == Split(1, 7)


def test_a_fall_must_last_and_a_rise_counts_at_once() -> None:
    busy = decide(CODE)
    calm = decide(replace(CODE, num_requests=20), memory=busy.memory)
    assert calm.load.prefill > decide(replace(CODE, num_requests=20)).load.prefill
    for _ in range(20):
        calm = decide(replace(CODE, num_requests=20), memory=calm.memory)
    assert calm.load.prefill == pytest.approx(decide(replace(CODE, num_requests=20)).load.prefill, rel=0.01)
    assert decide(CODE, memory=calm.memory).load.prefill >= busy.load.prefill


def test_an_idle_fleet_stays_as_it_is_and_keeps_the_least_of_each_role() -> None:
    idle = Demand(seconds=5, num_requests=0)
    decision = decide(idle, Split(3, 1))
    assert (decision.split, decision.wanted) == (Split(3, 1), Split(1, 1))


def test_a_target_that_nothing_meets_is_said_so() -> None:
    reasons = decide(CODE, goals=Goals(ttft_ms=10)).reasons
    assert any("no number of workers" in reason.because for reason in reasons)


def test_the_reasons_end_with_the_verdict() -> None:
    assert decide(CODE, Split(1, 7)).reasons[-1].what == "move"
    assert decide(CODE, decide(CODE).split).reasons[-1].what == "stay"


def test_one_worker_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="have at least 2"):
        decide(CODE, Split(0, 1))
