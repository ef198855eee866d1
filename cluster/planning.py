"""Runs the planner: gathers what it goes by from the gateways, and does or only tells what it says.

What it does is a change of what is wanted, like an operator's: `baton status` and the supervisor know no difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from baton.actors.messages import Role
from baton.actors.step_cost import StepCost
from baton.cluster.config import PlannerConfig
from baton.cluster.desired import Desired
from baton.cluster.planner import Decision, Demand, Goals, Memory, Split, WorkerLimits, plan
from baton.cluster.processes import Launcher
from baton.cluster.supervisor import Clock, Supervisor
from baton.router.usage import Usage, WorkerUsage

ROLES: tuple[Role, Role] = ("prefill", "decode")

logger = logging.getLogger(__name__)


NONE = Split(0, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The last decision, for people: `idle` says why there is none."""

    mode: str
    now: Split
    decision: Decision | None = None
    idle: str = ""
    num_moved: Split = NONE  # workers that were switched just now, by the role that they joined


class Planning:
    """`run` it while the supervisor runs. `last` is what `baton plan` shows; `on_plan` hears of each."""

    def __init__(
        self,
        config: PlannerConfig,
        supervisor: Supervisor,
        launcher: Launcher,
        clock: Clock,
        on_plan: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._launcher = launcher
        self._clock = clock
        self._on_plan = on_plan
        self._goals = Goals(**config.model_dump(include=set(Goals.__dataclass_fields__)))
        self._memory = Memory()
        self._before: Mapping[str, Usage] = {}
        self._asked_at_s = clock.now_s()
        self._small_since_s: float | None = None  # since when fewer workers would do
        self.last = Plan(config.mode, NONE, idle="it has not run yet")

    async def run(self) -> None:
        """Plan until cancelled."""
        while True:
            await self._clock.sleep(self._config.interval_s)
            try:
                await self.step()
            except Exception:  # the task's root: a plan that fails must not end the planning
                logger.exception("planning failed; the next round tries again")

    async def step(self) -> None:
        self.last = await self._planned()
        self._on_plan(self.last)

    async def _planned(self) -> Plan:
        usages = await self._supervisor.usages()
        now_s, desired = self._clock.now_s(), self._supervisor.desired
        now = Split(len(desired.of_role("prefill")), len(desired.of_role("decode")))
        workers = next((usage.workers for usage in usages.values() if usage.workers), ())
        before, self._before = self._before, usages
        seconds, self._asked_at_s = now_s - self._asked_at_s, now_s
        if 0 in now or sum(now) < 2:
            return Plan(self._config.mode, now, idle="it needs a pool named prefill and one named decode")
        if not usages or not before or not workers:
            return Plan(self._config.mode, now, idle="no gateway has said twice what it serves")
        demand = demand_of(before, usages, seconds, workers)
        decision = plan(demand, now, limits_of(workers), self._goals, now_s=now_s, memory=self._memory)
        self._memory = decision.memory
        moved = NONE
        if self._config.mode == "act" and self._supervisor.is_settled():
            wanted = self._supervisor.desired = self._improved(decision, now, workers, now_s)
            moved = Split(*(max(0, len(wanted.of_role(role)) - count) for role, count in zip(ROLES, now, strict=True)))
        return Plan(self._config.mode, now, decision, num_moved=moved if decision.split != now else NONE)

    def _improved(self, decision: Decision, now: Split, workers: Sequence[WorkerUsage], now_s: float) -> Desired:
        desired = self._supervisor.desired
        if decision.split != now:
            logger.info("the planner moves workers: %s", decision.reasons[-1].because)
            return _moved(desired, decision.split.prefill - now.prefill, workers)
        return desired if self._config.max_workers is None else self._sized(desired, decision, now, now_s)

    def _sized(self, desired: Desired, decision: Decision, now: Split, now_s: float) -> Desired:
        """Let the cluster grow at once to what is wanted, and shrink by one when that was enough for long."""
        assert self._config.max_workers is not None
        missing = min(sum(decision.wanted), self._config.max_workers) - sum(now)
        if missing >= 0:
            self._small_since_s = None
        elif self._small_since_s is None:
            self._small_since_s = now_s
        if missing > 0:
            role: Role = "prefill" if decision.wanted.prefill > now.prefill else "decode"
            desired = desired.scaled(role, len(desired.of_role(role)) + missing)
        elif self._small_since_s is not None and now_s - self._small_since_s >= self._config.shrink_after_s:
            self._small_since_s = now_s
            role = "prefill" if decision.wanted.prefill < now.prefill else "decode"
            desired = desired.scaled(role, len(desired.of_role(role)) - 1)
        if desired != self._supervisor.desired:
            self._launcher.request(desired.workers)
        return desired


def _moved(desired: Desired, num_to_prefill: int, workers: Sequence[WorkerUsage]) -> Desired:
    """Switch the least busy workers of the pool that gives."""
    giver, taker = reversed(ROLES) if num_to_prefill > 0 else ROLES
    busy = {worker.worker_id: (worker.num_running, worker.waiting_tokens) for worker in workers}
    givers = sorted(desired.of_role(giver), key=lambda spec: busy.get(spec.worker_id, (0, 0)))
    for spec in givers[: abs(num_to_prefill)]:
        desired = desired.with_role(spec.worker_id, taker)
    return desired


def demand_of(
    before: Mapping[str, Usage], after: Mapping[str, Usage], seconds: float, workers: Collection[WorkerUsage]
) -> Demand:
    """Add up what all gateways served in between. One that began anew counts from its start."""
    grown = [_grown(before.get(name, Usage()), usage) for name, usage in after.items()]
    num_prompts, prompt_tokens, cached, num_ended, output_tokens = (sum(column) for column in zip(*grown, strict=True))
    return Demand(
        seconds=max(seconds, 1e-3),
        num_requests=num_prompts,
        prompt_len=prompt_tokens / max(num_prompts, 1),
        output_len=output_tokens / max(num_ended, num_prompts, 1),
        hit_rate=cached / max(prompt_tokens, 1),
        waiting_tokens=sum(worker.waiting_tokens for worker in workers) + sum(u.queued_tokens for u in after.values()),
        num_decoding=sum(worker.num_running for worker in workers if worker.role != "prefill"),
    )


def _grown(before: Usage, after: Usage) -> tuple[int, ...]:
    fields = ("num_prompts", "prompt_tokens", "cached_tokens", "num_ended", "output_tokens")
    since = Usage() if after.num_prompts < before.num_prompts else before
    return tuple(getattr(after, name) - getattr(since, name) for name in fields)


def limits_of(workers: Sequence[WorkerUsage]) -> WorkerLimits:
    """Take each kind of work's cost from a worker that does it; all are alike otherwise."""
    decode = _cost(workers, "decode")
    prefill = _cost(workers, "prefill")
    smallest = min(workers, key=lambda worker: worker.kv_tokens)
    return WorkerLimits(
        cost=msgspec.structs.replace(
            decode, prefill_token_ms=prefill.prefill_token_ms, prefill_context_ms=prefill.prefill_context_ms
        ),
        kv_tokens=smallest.kv_tokens,
        max_sequences=smallest.max_sequences,
        step_tokens=smallest.step_tokens,
    )


def _cost(workers: Sequence[WorkerUsage], role: Role) -> StepCost:
    fitted = [worker.cost for worker in workers if worker.cost is not None and worker.role == role]
    others = [worker.cost for worker in workers if worker.cost is not None]
    return (fitted or others or [StepCost()])[0]
