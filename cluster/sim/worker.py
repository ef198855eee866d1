"""A simulated worker: the real engine, whose steps take the time that the profile's cost model says.

Like a worker's engine thread it takes what others ask of it between two steps only, and reports after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.actors.engine.batch import Batch, StepOutput
from baton.actors.engine.block_hash import BlockHash
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.prefix_cache import CacheEvents
from baton.actors.engine.updates import Update
from baton.actors.messages import Load, PeerAddress, Role, WorkerInfo
from baton.actors.step_cost import StepCost, StepShape
from baton.actors.step_meter import PrefillShare
from baton.cluster.sim.clock import EventLoop
from baton.cluster.sim.leap import LeapingEngine, Stretch

OUTPUT_TOKEN = 0  # what every step samples: in no prompt of a trace


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the simulated workers and the wires between them can do, and where these figures are from."""

    name: str
    source: str
    cost_ms: dict[str, float]  # fields of StepCost
    kv_tokens: int  # that one worker's KV cache holds
    kv_bytes_per_token: int
    link_bytes_s: float  # of KV from one worker to another; a worker sends one write at a time
    hop_s: float  # for a message between two processes
    max_num_seqs: int
    max_step_tokens: int

    @classmethod
    def load(cls, path: Path | None = None) -> Profile:
        """Read a profile; the default is an 8B model on H200s."""
        default = Path(__file__).with_name("h200-llama-3.1-8b.json")
        return msgspec.json.decode((path or default).read_bytes(), type=cls)


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says after a step."""

    load: Load
    events: CacheEvents


class SimWorker:
    """`on_update` hears of each request's news, `on_report` of each step's end, both at the time they happen."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        profile: Profile,
        block_size: int,
        loop: EventLoop,
        hashes: Mapping[str, list[BlockHash]],
    ) -> None:
        num_blocks = profile.kv_tokens // block_size
        config = EngineConfig(
            block_size=block_size,
            max_num_seqs=profile.max_num_seqs,
            max_step_tokens=profile.max_step_tokens,
            overlap=False,  # a step's results are there when it ends; the cost model's steps hide the planning
        )
        self.info = WorkerInfo(
            peer=PeerAddress(worker_id, "", worker_id),
            role=role,
            model="",
            block_size=block_size,
            num_blocks=num_blocks,
            max_context=profile.kv_tokens,
            max_sequences=profile.max_num_seqs,
            step_tokens=profile.max_step_tokens,
            mover="sim",
            metrics_address="",
            pid=0,
        )
        self.on_update: dict[str, Callable[[Update], None]] = {}  # by the request's id in this engine
        self.on_report: Callable[[Report], None] | None = None
        self.on_step: dict[str, Callable[[], None]] = {}  # asked after each step, until taken out
        self.work_ms = 0.0  # of all steps, without the constant that each takes
        self.num_steps = 0
        self.num_importing = 0
        self.link_free_at = 0.0
        self._runner = _Runner()
        self._engine = LeapingEngine(
            config, self._runner, num_blocks=num_blocks, max_context=profile.kv_tokens, eos_token_ids=frozenset()
        )
        self._engine.hashes = hashes
        self._cost = StepCost(**profile.cost_ms)
        self.can_leap = True
        self._loop = loop
        self._inbox: list[Callable[[Engine], None]] = []
        self._is_busy = False
        self._leap: _Leap | None = None  # under way
        self._share = PrefillShare()

    def post(self, ask: Callable[[Engine], None]) -> None:
        """Run `ask` on the engine before the next step."""
        self._inbox.append(ask)
        if not self._is_busy:
            self._is_busy = True
            self._loop.at(self._loop.now, self._turn)
        elif self._leap is not None and len(self._inbox) == 1:
            self._end_leap_early(self._leap)

    def check_idle(self) -> None:
        """Raise unless every block is accounted for and none is held."""
        self._engine.check_integrity()
        assert self._engine.counts().held == 0, f"{self.info.peer.worker_id} still holds blocks"

    def _turn(self) -> None:
        inbox, self._inbox = self._inbox, []
        engine = self._engine
        for ask in inbox:
            ask(engine)
        if not engine.has_work:
            self._is_busy = False
            self._report()
            return
        stretch = engine.stretch(self._cost) if self.can_leap else None
        if stretch is not None:
            self._leap = _Leap(self._loop.now, stretch)
            self._leap_to(self._leap, stretch.num_steps)
        else:
            self._step()

    def _step(self) -> None:
        for update in self._engine.plan():
            self.on_update[update.request_id](update)
        self._runner.shape = StepShape()
        updates = self._engine.run()  # nobody looks at the engine before the step's time is over
        shape = self._runner.shape
        step_ms = self._cost.step_ms(shape) if shape != StepShape() else 0.0
        self._count(1, step_ms)
        self._share.add(self._cost.prefill_part_ms(shape), self._loop.now)
        self._loop.after(step_ms / 1e3, lambda: self._end(updates))

    def _end_leap_early(self, leap: _Leap) -> None:
        """Somebody asks something: end with the step that runs now."""
        num_steps = leap.stretch.steps_until(1e3 * (self._loop.now - leap.started))
        if num_steps < leap.stretch.num_steps:
            self._leap = _Leap(leap.started, leap.stretch)  # so that the end planned before is none
            self._leap_to(self._leap, num_steps)

    def _leap_to(self, leap: _Leap, num_steps: int) -> None:
        step_ms = leap.stretch.total_ms(num_steps)

        def land() -> None:
            if self._leap is leap:
                self._leap = None
                self._count(num_steps, step_ms)
                self._end(self._engine.leap(num_steps, OUTPUT_TOKEN))

        self._loop.at(max(leap.started + step_ms / 1e3, self._loop.now), land)

    def _count(self, num_steps: int, total_ms: float) -> None:
        self.work_ms += max(total_ms - num_steps * self._cost.constant_ms, 0.0)
        self.num_steps += num_steps

    def _end(self, updates: list[Update]) -> None:
        on_update = self.on_update
        for update in updates:
            on_update[update.request_id](update)
        self._report()
        for ask in list(self.on_step.values()):
            ask()
        self._turn()

    def _report(self) -> None:
        if self.on_report is None:
            return
        engine = self._engine
        counts = engine.counts()
        load = Load(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_importing=self.num_importing,
            waiting_tokens=engine.waiting_tokens,
            waiting_context=engine.waiting_context,
            prefill_share=self._share.at(self._loop.now),
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_held=counts.held,
            cost=self._cost,
        )
        self.on_report(Report(load, engine.take_events()))


class _Runner:
    """Computes nothing; notes the shape of the step."""

    def __init__(self) -> None:
        self.shape = StepShape()

    def launch(self, batch: Batch) -> _Step:
        self.shape = StepShape.of(batch.rows)
        sampled = (OUTPUT_TOKEN,)
        tokens = tuple(sampled if row.sample else () for row in batch.rows)
        return _Step(StepOutput(tokens, (None,) * len(tokens)))


@dataclass(frozen=True, slots=True, eq=False)
class _Leap:
    started: float
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class _Step:
    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output
