"""One gateway and its workers on a fake clock: the real router, prefix index, admission and engines.

Simplified: steps and writes take what the profile says and nothing fails; there is one gateway; a hand-over is not
given up for lack of room. All else is the code that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.actors.engine.block_hash import BlockHash
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.updates import Update
from baton.actors.messages import KVEvents, Role
from baton.cluster.sim.clock import EventLoop
from baton.cluster.sim.handover import Handover
from baton.cluster.sim.results import Outcome, Summary, summarise
from baton.cluster.sim.trace import Arrival, ideal_hit_rate
from baton.cluster.sim.worker import Profile, Report, SimWorker
from baton.router.admission import Admission, AdmissionLimits, Place
from baton.router.config import RouterConfig
from baton.router.errors import Overloaded
from baton.router.fleet import RoutedWorker
from baton.router.policies import make_policy
from baton.router.prefix_index import PrefixIndex
from baton.router.routing import Charge, Router
from baton.router.slo import SloTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`workers` of each role, and how they are run."""

    workers: dict[Role, int]
    router: RouterConfig
    profile: Profile
    targets: SloTargets
    block_size: int = 64
    can_leap: bool = True  # False: every decode step by itself, which takes longer and tells the same
    event_delay_s: float = 0.001  # from a worker's report to the gateway's knowing of it


def simulate(setup: Setup, arrivals: Sequence[Arrival], on_end: Callable[[], None] = lambda: None) -> Summary:
    """Play `arrivals` on `setup`. `on_end` hears of each request that has ended or was refused."""
    simulation = Simulation(setup, on_end)
    simulation.run(arrivals)
    workers = simulation.fleet.by_id.values()
    return summarise(
        setup.router.policy,
        simulation.outcomes,
        [[worker.work_ms for worker in workers if worker.info.role == role] for role in setup.workers],
        setup.targets,
        ideal_hit_rate(arrivals, setup.block_size),
    )


class Fleet:
    """The workers, as the router sees them."""

    def __init__(self, setup: Setup, loop: EventLoop, hashes: Mapping[str, list[BlockHash]]) -> None:
        self.by_id = {
            worker.info.peer.worker_id: worker
            for role, num in setup.workers.items()
            for worker in (
                SimWorker(f"{role}-{i}", role, setup.profile, setup.block_size, loop, hashes) for i in range(num)
            )
        }
        for worker in self.by_id.values():
            worker.can_leap = setup.can_leap
        self._decoders: list[RoutedWorker] = []
        self._prefillers: list[RoutedWorker] = []
        for worker in self.by_id.values():
            self.admit(RoutedWorker(worker.info))

    def decoders(self) -> Sequence[RoutedWorker]:
        return self._decoders

    def prefillers(self) -> Sequence[RoutedWorker]:
        return self._prefillers

    def admit(self, worker: RoutedWorker) -> None:
        """It takes work of its role. Another list, as the router knows a roster by its list."""
        if worker.info.role == "prefill":
            self._prefillers = [*self._prefillers, worker]
        else:
            self._decoders = [*self._decoders, worker]

    def withdraw(self, worker: RoutedWorker) -> None:
        """It takes no new work."""
        self._prefillers = [other for other in self._prefillers if other is not worker]
        self._decoders = [other for other in self._decoders if other is not worker]


class Simulation:
    """Run it once. `on_end` hears of each request that has ended or was refused."""

    def __init__(self, setup: Setup, on_end: Callable[[], None] = lambda: None) -> None:
        config = setup.router
        self.loop = EventLoop()
        self.hashes: dict[str, list[BlockHash]] = {}  # of the prompts that are there, by request: made once
        self.fleet = Fleet(setup, self.loop, self.hashes)
        self.outcomes: list[Outcome] = []
        self._setup = setup
        self._on_end = on_end
        self._index = PrefixIndex(predicted_s=config.predicted_prefix_s, clock=self.loop.time)
        limits = AdmissionLimits(
            max_requests=config.max_queued_requests,
            max_tokens=config.max_queued_tokens,
            max_wait_s=config.max_queue_s,
        )
        self._router = Router(self.fleet, self._index, make_policy(config), lambda request, _: self.hashes[request.id])
        self._admission = Admission(limits, self._router.has_room, clock=self.loop.time)
        for routed in (*self.fleet.decoders(), *self.fleet.prefillers()):
            self._index.add(routed.incarnation, routed.info.num_blocks)
            self._index.apply(routed.incarnation, KVEvents(snapshot=True))
            self.fleet.by_id[routed.incarnation].on_report = partial(self._on_report, routed)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Play all arrivals, in order of time, and let every request end."""
        self._arrive(arrivals, 0)
        self.loop.run()
        for worker in self.fleet.by_id.values():
            worker.check_idle()

    @property
    def num_queued_tokens(self) -> int:
        return self._admission.num_queued_tokens

    def _arrive(self, arrivals: Sequence[Arrival], number: int) -> None:
        """Take in one arrival, and plan for the next: so no more than one prompt waits as tokens."""
        if number:
            arrival = arrivals[number - 1]
            outcome = Outcome(arrival)
            self.outcomes.append(outcome)
            sampling = SamplingParams(max_tokens=arrival.output_len, seed=0, temperature=0.0, ignore_eos=True)
            self.hashes[str(number)] = arrival.hashes(self._setup.block_size)
            self._enter(Request(id=str(number), tokens=arrival.tokens(), sampling=sampling), outcome)
        if number < len(arrivals):
            self.loop.at(arrivals[number].time_s, lambda: self._arrive(arrivals, number + 1))

    def _enter(self, request: Request, outcome: Outcome) -> None:
        try:
            (place,) = self._admission.enter([len(request.tokens)], deadline_s=self._setup.targets.ttft_s)
        except Overloaded:
            self.end(request.id)
            return
        place.listen(lambda: self.loop.after(0.0, lambda: self._dispatch(request, outcome, place)))

    def _dispatch(self, request: Request, outcome: Outcome, place: Place) -> None:
        if place.refusal is not None:
            place.leave()
            self.end(request.id)
            return
        route = self._router.route(request, targets=self._setup.targets)
        charge = self._router.charge(route)
        outcome.predicted_ttft_s = (
            None if route.ttft_ms is None else self.loop.now + route.ttft_ms / 1e3 - outcome.arrival.time_s
        )
        decode = self.fleet.by_id[route.decode.worker.incarnation]
        answer = _Answer(self, request.id, outcome, charge, place, decode)
        decode.on_update[request.id] = answer.on_update
        if route.prefill is None:
            self.loop.after(self._setup.profile.hop_s, lambda: decode.post(lambda engine: engine.submit(request)))
        else:
            prefill = self.fleet.by_id[route.prefill.worker.incarnation]
            handover = Handover(request, prefill, decode, self._setup.profile, self.loop, answer.on_first_token)
            self.loop.after(self._setup.profile.hop_s, handover.start)
        place.charged(sum(leg.uncached for leg in route.legs))

    def note_output(self, num_tokens: int) -> None:
        self._router.note_end(num_tokens)

    def end(self, request_id: str) -> None:
        del self.hashes[request_id]
        self._on_end()

    @property
    def hop_s(self) -> float:
        return self._setup.profile.hop_s

    def _on_report(self, routed: RoutedWorker, report: Report) -> None:
        self.loop.after(self._setup.event_delay_s, lambda: self._hear(routed, report))

    def _hear(self, routed: RoutedWorker, report: Report) -> None:
        routed.take_load(report.load)
        stored, removed = report.events
        if stored or removed:
            self._index.apply(routed.incarnation, KVEvents(stored=tuple(stored), removed=tuple(removed)))
        if self._admission.wants_progress():
            self._admission.note_progress(sum(w.num_tokens for w in (*self.fleet.decoders(), *self.fleet.prefillers())))
        if self._admission.num_queued and routed.has_room:
            self._admission.pump()


class _Answer:
    """One request's tokens on their way back to the client."""

    def __init__(
        self, simulation: Simulation, id: str, outcome: Outcome, charge: Charge, place: Place, decode: SimWorker
    ) -> None:
        self._simulation = simulation
        self._id = id
        self._outcome = outcome
        self._charge = charge
        self._place = place
        self._decode = decode

    def on_first_token(self, cached_tokens: int) -> None:
        """A token sampled by the prefill worker has reached the decode worker."""
        self._take(1, cached_tokens)

    def on_update(self, update: Update) -> None:
        if update.tokens:
            self._take(len(update.tokens), update.cached_tokens)
        if update.finish is not None:
            del self._decode.on_update[self._id]
            self._outcome.is_complete = update.finish == "length"
            self._charge.release()
            self._place.leave()
            self._simulation.note_output(self._outcome.num_tokens)
            self._simulation.end(self._id)

    def _take(self, num_tokens: int, cached_tokens: int) -> None:
        outcome, simulation = self._outcome, self._simulation
        if outcome.num_tokens == 0:
            outcome.cached_tokens = cached_tokens
            self._charge.on_first_token()
            self._place.leave(has_output=True)
        outcome.take(simulation.loop.now + simulation.hop_s, num_tokens)
