"""The planner beside a supervisor of fakes: what it goes by, and that it acts only where it may."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_fakes import FakeClock, FakeLauncher

from baton.actors.messages import Role
from baton.actors.step_cost import StepCost
from baton.cluster.config import ClusterConfig
from baton.cluster.desired import Desired
from baton.cluster.planner import Split
from baton.cluster.planning import Plan, Planning, demand_of, limits_of
from baton.cluster.supervisor import Supervisor
from baton.router.usage import Usage, WorkerUsage


def worker(worker_id: str, role: Role, *, running: int = 0, cost: StepCost | None = None) -> WorkerUsage:
    return WorkerUsage(
        worker_id=worker_id, role=role, num_running=running, waiting_tokens=10, cost=cost,
        kv_tokens=800_000, max_sequences=256, step_tokens=4096,
    )  # fmt: skip


WORKERS = (
    worker("decode-0", "decode", running=9),
    worker("decode-1", "decode", running=2),
    worker("decode-2", "decode", running=9),
    worker("prefill-0", "prefill"),
)
BUSY_PREFILL = Usage(
    num_prompts=200, prompt_tokens=1_600_000, num_ended=200, output_tokens=2_000, queued_tokens=40_000, workers=WORKERS
)


class Planned:
    def __init__(self, **planner: Any) -> None:
        config = ClusterConfig.model_validate(
            {
                "worker": {"model": "m.gguf", "served_name": "m"},
                "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 3}},
                "health": {"poll_s": 0.01, "silence_s": 5, "stop_timeout_s": 0.05},
                "planner": {"interval_s": 5, **planner},
            }
        )
        self.clock, self.launcher = FakeClock(), FakeLauncher()
        self.supervisor = Supervisor(Desired.of(config), self.launcher, clock=self.clock)
        self.told: list[Plan] = []
        self.planning = Planning(config.planner, self.supervisor, self.launcher, self.clock, self.told.append)

    async def serve(self, usage: Usage) -> None:
        """Let five seconds pass in which so much was served."""
        self.launcher.gateway.served = usage
        self.clock.time_s += 5
        await self.planning.step()
        for _ in range(3):
            await self.supervisor.tick()
            await asyncio.sleep(0)

    @property
    def roles(self) -> dict[str, Role | None]:
        return {status.name: status.role for status in self.supervisor.statuses() if status.kind == "worker"}


async def planned(**planner: Any) -> Planned:
    made = Planned(**planner)
    await made.supervisor.start()
    await made.serve(Usage(workers=WORKERS))
    return made


async def test_a_dry_run_explains_and_moves_nobody() -> None:
    cluster = await planned()
    assert cluster.planning.last.idle == "no gateway has said twice what it serves"
    await cluster.serve(BUSY_PREFILL)
    plan = cluster.planning.last
    assert plan.decision is not None and plan.decision.split.prefill > 1
    assert plan.decision.reasons[-1].what == "move"
    assert list(cluster.roles.values()).count("decode") == 3
    assert cluster.told[-1] is plan and plan.num_moved == Split(0, 0)


async def test_it_switches_the_least_busy_worker_and_restarts_nobody() -> None:
    cluster = await planned(mode="act", min_decode=2)
    await cluster.serve(BUSY_PREFILL)
    assert cluster.roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill", "decode-2": "decode"}
    assert cluster.told[-1].num_moved == Split(1, 0)
    assert len(cluster.launcher.launched) == 4 + 1


async def test_it_grows_at_once_and_shrinks_late() -> None:
    cluster = await planned(mode="act", min_decode=3, max_workers=6, shrink_after_s=60)
    await cluster.serve(BUSY_PREFILL)
    assert list(cluster.roles.values()).count("prefill") == 3
    assert cluster.launcher.requested == ["prefill-0", "decode-0", "decode-1", "decode-2", "prefill-1", "prefill-2"]
    for worker in cluster.launcher.workers.values():
        worker.may_drain.set()
    for _ in range(40):
        await cluster.serve(BUSY_PREFILL if cluster.clock.time_s < 0 else Usage(workers=WORKERS))
    assert 4 <= len(cluster.roles) < 6


async def test_without_both_pools_it_says_so() -> None:
    cluster = await planned()
    cluster.supervisor.desired = Desired.of(
        ClusterConfig.model_validate({"worker": {"model": "m.gguf", "served_name": "m"}, "pools": {"both": {}}})
    )
    await cluster.planning.step()
    assert "a pool named prefill" in cluster.planning.last.idle


def test_demand_is_what_all_gateways_served_in_between() -> None:
    first = Usage(num_prompts=10, prompt_tokens=1000, cached_tokens=500, num_ended=10, output_tokens=100)
    later = Usage(num_prompts=30, prompt_tokens=5000, cached_tokens=1500, num_ended=20, output_tokens=400)
    demand = demand_of({"a": first, "b": later}, {"a": later, "b": first}, 5, WORKERS)  # b began anew
    assert (demand.num_requests, demand.rate) == (30, 6)
    assert demand.prompt_len == pytest.approx(5000 / 30)
    assert demand.hit_rate == pytest.approx(1500 / 5000)
    assert (demand.waiting_tokens, demand.num_decoding) == (40, 20)


def test_costs_come_from_those_who_do_the_work() -> None:
    quick, slow = StepCost(prefill_token_ms=1, decode_ms=9), StepCost(prefill_token_ms=7, decode_ms=2)
    fitted = limits_of([worker("d", "decode", cost=slow), worker("p", "prefill", cost=quick)]).cost
    assert (fitted.prefill_token_ms, fitted.decode_ms) == (1, 2)
    assert limits_of([worker("d", "decode"), worker("p", "prefill")]).cost == StepCost()
