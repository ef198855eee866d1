from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from baton.actors.messages import Role
from baton.actors.step_cost import StepCost, StepShape
from baton.cluster.cli import app
from baton.cluster.sim.simulation import Setup, Simulation, simulate
from baton.cluster.sim.trace import Arrival, read_trace, scaled, spread
from baton.cluster.sim.worker import Profile
from baton.router.config import PolicyName, RouterConfig
from baton.router.slo import SloTargets

TRACE = Path(__file__).parents[2] / "data" / "mooncake_conversation.first120.jsonl"
PROFILE = Profile.load()
COST = StepCost(**PROFILE.cost_ms)


def setup(
    policy: PolicyName = PolicyName.COST, *, can_leap: bool = True, kv_tokens: int = 800_000, **workers: int
) -> Setup:
    roles: dict[str, Role] = {"both": "both", "prefill": "prefill", "decode": "decode"}
    return Setup(
        workers={roles[role]: num for role, num in (workers or {"both": 4}).items()},
        router=RouterConfig(policy=policy),
        profile=msgspec.structs.replace(PROFILE, kv_tokens=kv_tokens),
        targets=SloTargets("sim", 30.0, 0.1),
        block_size=128,
        can_leap=can_leap,
    )


def conversation(speed: float = 4.0) -> list[Arrival]:
    return scaled(spread(read_trace(TRACE)), speed)


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    simulation = Simulation(setup(both=1))
    simulation.run([Arrival(0.0, 1000, 11, (1, 2))])
    (outcome,) = simulation.outcomes
    prefill_ms = COST.step_ms(StepShape(1000, 1000 * 500.0))
    decode_ms = sum(COST.step_ms(StepShape(0, 0.0, 1, 1000 + i)) for i in range(10))
    assert outcome.ttft_s == pytest.approx(prefill_ms / 1e3 + 2 * PROFILE.hop_s, abs=1e-6)
    assert outcome.itl_s * 10 == pytest.approx(decode_ms / 1e3, rel=1e-6)


def test_a_hand_over_costs_its_messages_and_the_last_chunk_s_way() -> None:
    simulation = Simulation(setup(PolicyName.ROUND_ROBIN, prefill=1, decode=1))
    simulation.run([Arrival(0.0, 8192, 3, tuple(range(1, 17)))])
    (outcome,) = simulation.outcomes
    chunk_s = 512 * PROFILE.kv_bytes_per_token / PROFILE.link_bytes_s
    step_s = COST.step_ms(StepShape(0, 0.0, 1, 8192)) / 1e3
    assert outcome.num_tokens == 3
    assert 0 < outcome.max_gap_s - step_s - chunk_s < 3 * PROFILE.hop_s


@pytest.mark.parametrize("workers", [{"both": 4}, {"prefill": 2, "decode": 2}])
def test_leaping_over_decode_steps_tells_the_same_as_taking_each(workers: dict[str, int]) -> None:
    leaping, stepping = Simulation(setup(**workers)), Simulation(setup(can_leap=False, **workers))
    arrivals = conversation(speed=0.7)[:60]
    leaping.run(arrivals)
    stepping.run(arrivals)
    assert leaping.loop.num_events < stepping.loop.num_events / 2
    a, b = leaping.outcomes, stepping.outcomes
    assert sum(outcome.ttft_s for outcome in a) == pytest.approx(sum(outcome.ttft_s for outcome in b), rel=0.05)
    assert sum(outcome.last_at for outcome in a) == pytest.approx(sum(outcome.last_at for outcome in b), rel=0.01)


@pytest.mark.parametrize("policy", list(PolicyName))
@pytest.mark.parametrize("workers", [{"both": 3}, {"prefill": 1, "decode": 2}])
def test_every_policy_serves_a_trace_and_leaves_no_block_held(policy: PolicyName, workers: dict[str, int]) -> None:
    arrivals = [arrival for arrival in conversation(speed=0.7) if arrival.prompt_len < 30_000][:40]
    summary = simulate(setup(policy, **workers), arrivals)
    assert (summary.requests, summary.refused) == (40, 0)
    assert summary == simulate(setup(policy, **workers), arrivals)


def test_little_memory_means_preemption_and_fewer_hits_never_a_lost_request() -> None:
    simulation = Simulation(setup(both=2, kv_tokens=128 * 1024))
    simulation.run([arrival for arrival in conversation(speed=1.0) if arrival.prompt_len < 60_000][:60])
    assert all(outcome.is_complete for outcome in simulation.outcomes)


def test_a_prompt_that_no_worker_can_hold_is_refused() -> None:
    summary = simulate(setup(both=1, kv_tokens=4096), [Arrival(0.0, 5000, 1, tuple(range(10)))])
    assert (summary.refused, summary.goodput) == (1, 0.0)


def test_the_cost_policy_finds_nearly_every_prefix_and_spreads_the_load() -> None:
    """The trap: all prompts start with one block."""
    summary = simulate(setup(both=4), conversation(speed=1.0))
    assert summary.hit_rate > 0.9 * summary.ideal_hit_rate > 0
    assert summary.load_spread < 1.6  # of 120 requests, some of them very long
    assert summary.ttft_error.p50 < 0.2


def test_the_command_ends_with_one_json_line() -> None:
    result = CliRunner().invoke(
        app, ["sim", "--trace", str(TRACE), "--requests", "30", "--workers", "2", "--policy", "least_loaded", "--json"]
    )
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["policy"] == "least_loaded"
    assert {"hit_rate", "ideal_hit_rate", "goodput", "ttft_s", "itl_s", "load_spread"} <= line.keys()


def test_the_command_compares_all_policies_and_draws_them(tmp_path: Path) -> None:
    path = tmp_path / "policies.png"
    arguments = ["sim", "--trace", str(TRACE), "--requests", "10", "--prefill", "1", "--decode", "1"]
    result = CliRunner().invoke(app, [*arguments, "--compare", "--plot", str(path), "--json"])
    assert result.exit_code == 0, result.output
    policies = json.loads(result.stdout.splitlines()[-1])["policies"]
    assert [summary["policy"] for summary in policies] == list(list(PolicyName))
    assert path.stat().st_size > 10_000


def test_a_fleet_that_cannot_decode_is_refused() -> None:
    result = CliRunner().invoke(app, ["sim", "--trace", str(TRACE), "--prefill", "2"])
    assert result.exit_code == 2
    assert "nobody decodes" in result.output
