"""A simulated fleet whose planner switches workers between prefill and decode while it serves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.actors.messages import Role
from baton.actors.step_cost import StepCost
from baton.cluster.planner import Decision, Demand, Goals, Memory, Split, WorkerLimits, plan
from baton.cluster.sim.results import Outcome
from baton.cluster.sim.simulation import Setup, Simulation
from baton.cluster.sim.trace import Arrival

SWITCH_S = 1.0  # in which a worker that changes its role gets no new work


class PlannedSimulation(Simulation):
    """Asks the planner every `interval_s`; `decisions` is what it said, with the time."""

    def __init__(self, setup: Setup, goals: Goals, interval_s: float = 2.0) -> None:
        super().__init__(setup)
        self.decisions: list[tuple[float, Decision]] = []
        profile = setup.profile
        self._limits = WorkerLimits(
            cost=StepCost(**profile.cost_ms),
            kv_tokens=profile.kv_tokens,
            max_sequences=profile.max_num_seqs,
            step_tokens=profile.max_step_tokens,
        )
        self._goals = goals
        self._interval_s = interval_s
        self._memory = Memory()
        self._num_left = 0  # arrivals to come
        self._num_seen = 0

    def run(self, arrivals: Sequence[Arrival]) -> None:
        self._num_left = len(arrivals)
        self.loop.after(self._interval_s, self._tick)
        super().run(arrivals)

    def _tick(self) -> None:
        now = Split(len(self.fleet.prefillers()), len(self.fleet.decoders()))
        if sum(now) == len(self.fleet.by_id):  # else some are still switching
            decision = plan(self._demand(), now, self._limits, self._goals, now_s=self.loop.now, memory=self._memory)
            self.decisions.append((self.loop.now, decision))
            self._memory = decision.memory
            self._move(decision.split.prefill - now.prefill)
            self._num_seen = len(self.outcomes)
        if len(self.outcomes) < self._num_left:
            self.loop.after(self._interval_s, self._tick)

    def _demand(self) -> Demand:
        arrived = [outcome.arrival for outcome in self.outcomes[self._num_seen :]]
        workers = (*self.fleet.decoders(), *self.fleet.prefillers())
        return Demand(
            seconds=self._interval_s,
            num_requests=len(arrived),
            prompt_len=sum(arrival.prompt_len for arrival in arrived) / max(len(arrived), 1),
            output_len=self._output_len(),
            waiting_tokens=sum(worker.num_tokens for worker in workers) + self.num_queued_tokens,
            num_decoding=sum(worker.num_decoding for worker in workers),
        )

    def _output_len(self) -> float:
        """Of those that ended lately; while long ones still run, their length so far says more than the ended ones'."""
        since = self.loop.now - 2 * self._interval_s
        lately: list[Outcome] = [outcome for outcome in self.outcomes if outcome.last_at >= since]
        return sum(outcome.num_tokens for outcome in lately) / max(len(lately), 1)

    def _move(self, num_more_prefill: int) -> None:
        """The least busy go; what runs there ends there."""
        role: Role = "prefill" if num_more_prefill > 0 else "decode"
        source = self.fleet.decoders() if num_more_prefill > 0 else self.fleet.prefillers()
        moving = sorted(source, key=lambda worker: worker.num_requests)[: abs(num_more_prefill)]
        for worker in moving:
            self.fleet.withdraw(worker)
            worker.info = msgspec.structs.replace(worker.info, role=role)
            self.loop.after(SWITCH_S, lambda worker=worker: self.fleet.admit(worker))
