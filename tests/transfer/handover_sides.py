"""The two workers of a hand-over world: fake engines with real pools, real memories and the real state machines."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from baton.transfer import actions as act
from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Arrival, Completion, Incarnation, TransferError
from baton.transfer.wire import Attempt, Open, decode_tag

if TYPE_CHECKING:
    from handover_world import World

NUM_BLOCKS = 12
RESULT = msgspec.Raw(msgspec.msgpack.encode("first token"))


class Violation(AssertionError):
    """An invariant of the protocol is broken."""


def ensure(condition: bool, claim: str) -> None:
    if not condition:
        raise Violation(claim)


def content(handover: str, index: int) -> int:
    """What block `index` of a prompt must hold: any two requests differ everywhere."""
    return int.from_bytes(handover.encode(), "little") * 1000 + index + 1


class Pool:
    """Blocks of one life of one worker, each free or owned; writing its KV needs no engine."""

    def __init__(self, fabric: LocalFabric, incarnation: Incarnation) -> None:
        self.kv = torch.zeros(NUM_BLOCKS, 1, dtype=torch.int64)
        self.mover = LocalMover(fabric, self.kv, incarnation)
        self.free = list(range(NUM_BLOCKS))
        self.owned: dict[object, tuple[int, ...]] = {}

    def take(self, owner: object, num_blocks: int) -> tuple[int, ...] | None:
        if num_blocks > len(self.free):
            return None
        ensure(owner not in self.owned, f"{owner} takes blocks twice")
        self.owned[owner], self.free = tuple(self.free[:num_blocks]), self.free[num_blocks:]
        return self.owned[owner]

    def give_back(self, owner: object) -> None:
        ensure(owner in self.owned, f"{owner} gives back blocks that it does not own")
        self.free += self.owned.pop(owner)
        ensure(len(set(self.free)) == len(self.free), "a block is free twice")


@dataclass
class Prompt:
    """One prefill in the fake engine of P."""

    open: Open
    computed: int = 0
    admitted: bool = False
    cancelled: bool = False


class PrefillSide:
    def __init__(self, world: World, incarnation: Incarnation) -> None:
        self.life = incarnation
        self.world = world
        self.pool = Pool(world.fabric, incarnation)
        self.machine = world.make_source()
        self.prompts: dict[Attempt, Prompt] = {}

    def perform(self, actions: list[act.SourceAction]) -> None:
        for action in actions:
            match action:
                case act.Send():
                    self.world.send(self.life, action.peer, action.message)
                case act.Prefill():
                    ensure(action.attempt not in self.prompts, "one attempt is prefilled twice at once")
                    self.prompts[action.attempt] = Prompt(action.open)
                case act.CancelPrefill():
                    self.prompts[action.attempt].cancelled = True
                case act.Release():
                    prompt = self.prompts.pop(action.attempt)
                    if prompt.admitted:
                        self.pool.give_back(action.attempt)
                case act.Write():
                    self.write(action)

    def write(self, write: act.Write) -> None:
        source, target = np.array(write.source_blocks), np.array(write.target_blocks)
        try:
            self.pool.mover.write(write.attempt.peer, source, target, write.tag)
        except TransferError as error:
            failed = Completion(0, write.attempt.peer, write.tag, 0, 0.0, str(error))
            self.perform(self.machine.on_completion(failed))

    def compute(self, attempt: Attempt, num_blocks: int) -> None:
        """Run one chunk: admit at first, then fill blocks, then finish."""
        prompt = self.prompts[attempt]
        if self.world.frozen or prompt.cancelled or prompt.computed == prompt.open.num_blocks:
            return
        if not prompt.admitted:
            if self.pool.take(attempt, prompt.open.num_blocks) is None:
                return
            prompt.admitted = True
            self.perform(self.machine.on_admitted(attempt))
            return
        blocks = self.pool.owned[attempt]
        end = min(prompt.computed + num_blocks, prompt.open.num_blocks)
        for index in range(prompt.computed, end):
            self.pool.kv[blocks[index], 0] = content(attempt.handover, index)
        prompt.computed = end
        if end == prompt.open.num_blocks:
            self.perform(self.machine.on_prefilled(attempt, blocks, RESULT))
        else:
            self.perform(self.machine.on_progress(attempt, end, blocks[: end + 1]))

    def break_down(self, attempt: Attempt) -> None:
        prompt = self.prompts[attempt]
        if not prompt.cancelled and prompt.computed < prompt.open.num_blocks:
            prompt.cancelled = True
            self.perform(self.machine.on_failed(attempt, "the engine failed"))

    def poll(self) -> None:
        if self.world.frozen:
            return
        for completion in self.pool.mover.poll().completions:
            self.perform(self.machine.on_completion(completion))


class DecodeSide:
    def __init__(self, world: World, incarnation: Incarnation) -> None:
        self.life = incarnation
        self.world = world
        self.pool = Pool(world.fabric, incarnation)
        self.machine = world.make_target()
        self.opens: dict[Attempt, int] = {}  # skip_blocks
        self.ends: Counter[Attempt] = Counter()
        self.delivered: Counter[Attempt] = Counter()
        self.asked: deque[act.Reserve] = deque()  # the engine answers later
        self.running: list[object] = []  # owners of blocks that only this engine uses
        self.quarantined: set[Attempt] = set()

    def open(self, handover: str, peer: Incarnation, skip_blocks: int, num_blocks: int) -> None:
        opened = self.machine.open(
            handover, peer, skip_blocks=skip_blocks, num_blocks=num_blocks, request=RESULT, now=self.world.now
        )
        self.opens[opened.attempt] = skip_blocks
        self.perform(opened.actions)

    def perform(self, actions: list[act.TargetAction]) -> None:
        for action in actions:
            self.world.seen[type(action).__name__] += 1
            match action:
                case act.Send():
                    self.world.send(self.life, action.peer, action.message)
                case act.Reserve():
                    self.asked.append(action)
                case act.Quarantine():
                    self.quarantined.add(action.attempt)
                case act.Unquarantine():
                    self.quarantined.remove(action.attempt)
                    self.pool.give_back(action.attempt)
                case act.Unreserve():
                    self.pool.give_back(action.attempt)
                case act.Deliver():
                    self.delivered[action.attempt] += 1
                    ensure(not self.ends[action.attempt], "a first token after the end")
                case act.Disconnect():
                    self.pool.mover.disconnect(action.peer)
                case act.Land() | act.Drop() | act.Fallback():
                    self.end(action)

    def end(self, action: act.Land | act.Drop | act.Fallback) -> None:
        attempt = action.attempt
        self.ends[attempt] += 1
        ensure(self.ends[attempt] == 1, f"{attempt} ended twice")
        if isinstance(action, act.Land):
            ensure(self.delivered[attempt] == 1, "landed without a first token")
            self.adopt(attempt)

    def adopt(self, attempt: Attempt) -> None:
        skip_blocks = self.opens[attempt]
        for index, block in enumerate(self.pool.owned[attempt], start=skip_blocks):
            ensure(int(self.pool.kv[block, 0]) == content(attempt.handover, index), "landed KV is not what was sent")
        self.running.append(attempt)

    def answer_reserve(self) -> None:
        if not self.asked:
            return
        asked = self.asked.popleft()
        blocks = self.pool.take(asked.attempt, asked.num_blocks - asked.skip_blocks)
        if blocks is None:
            self.perform(self.machine.no_room(asked.attempt))
        else:
            self.perform(self.machine.placed(asked.attempt, blocks, self.world.now))

    def run_local(self, name: str, num_blocks: int) -> None:
        if self.pool.take(name, num_blocks) is not None:
            self.running.append(name)

    def finish_one(self, index: int) -> None:
        if self.running:
            self.pool.give_back(self.running.pop(index % len(self.running)))
            self.perform(self.machine.on_room())

    def poll(self, *, lose: bool = False, spoil: bool = False) -> None:
        for arrival in self.pool.mover.poll().arrivals[lose:]:
            told = self.spoilt(arrival) if spoil else arrival
            self.perform(self.machine.on_arrival(told, self.world.now))

    def spoilt(self, arrival: Arrival) -> Arrival:
        """Let a bit fall over in what arrived, and a mover that verifies notice it."""
        tag = decode_tag(arrival.tag)
        for block in self.pool.owned.get(Attempt(arrival.peer, tag.handover, tag.epoch), ()):
            self.pool.kv[block, 0] ^= 1
        return Arrival(arrival.peer, arrival.tag, "spoilt")
