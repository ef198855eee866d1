"""A deterministic world for hand-overs: one prefill and one decode worker, their engines' pools, a hostile network.

`choose(n)` picks every move, so a schedule is a list of numbers: from hypothesis, or from a seeded generator. The
network keeps the order of a stream, but streams break, are noticed late or never, and leave stragglers behind;
messages are duplicated; transfers finish in any order, and their notices get lost; prefill freezes; either side crashes
and comes back with a new incarnation.
Every move checks the invariants; `finish` lets the faults end and checks that everything comes to an end.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from handover_sides import NUM_BLOCKS, DecodeSide, Pool, PrefillSide, ensure

from baton.transfer.local_mover import LocalFabric, LocalTransfer
from baton.transfer.mover import Incarnation
from baton.transfer.source import HandoverSource
from baton.transfer.target import HandoverTarget
from baton.transfer.wire import Attempt, Beat, Message

LEASE_S, BEAT_S, STALL_S, HOLD_S = 8.0, 1.0, 8.0, 10.0
GRANULE_S = 0.5


@dataclass
class Stream:
    """One gRPC stream between a life of D and a life of P; each queue keeps its order."""

    decode: Incarnation
    prefill: Incarnation
    queues: dict[Incarnation, deque[Message]] = field(default_factory=dict[Incarnation, deque[Message]])  # by receiver
    broken: bool = False


class World:
    def __init__(
        self,
        choose: Callable[[int], int],
        *,
        make_source: Callable[[], HandoverSource] | None = None,
        make_target: Callable[[], HandoverTarget] | None = None,
    ) -> None:
        self.choose = choose
        self.make_source = make_source or new_source
        self.make_target = make_target or new_target
        self.now = 0.0
        self.seen: Counter[str] = Counter()  # kinds of actions and messages, to show that schedules reach them
        self.fabric = LocalFabric(hold=True)
        self.names = itertools.count()
        self.stragglers: list[tuple[Incarnation, Incarnation, Message]] = []  # receiver, sender, message
        self.unnoticed: list[tuple[Incarnation, Incarnation, Stream]] = []  # who has yet to notice whose loss
        self.prefill = PrefillSide(self, self.new_life("p"))
        self.decode = DecodeSide(self, self.new_life("d"))
        self.stream: Stream | None = None
        self.frozen = False  # P neither computes nor hears, ticks or polls, but its streams and memory stay
        self.connect()

    def new_life(self, kind: str) -> Incarnation:
        return Incarnation(f"{kind}{next(self.names)}")

    # The network.

    def connect(self) -> None:
        if self.frozen or (self.stream is not None and not self.stream.broken):
            return
        p, d = self.prefill, self.decode
        self.stream = Stream(d.life, p.life, {d.life: deque(), p.life: deque()})
        p.pool.mover.connect(d.life, d.pool.mover.describe())
        d.pool.mover.connect(p.life, p.pool.mover.describe())
        p.perform(p.machine.on_peer_connected(d.life))
        d.perform(d.machine.on_peer_connected("10.0.0.1:7000", p.life, self.now))

    def send(self, sender: Incarnation, receiver: Incarnation, message: Message) -> None:
        self.seen[type(message).__name__] += 1
        stream = self.stream
        if stream is None or stream.broken or {sender, receiver} != {stream.decode, stream.prefill}:
            return
        stream.queues[receiver].append(message)

    def receive(self, receiver: Incarnation, sender: Incarnation, message: Message) -> None:
        if receiver == self.prefill.life:
            self.prefill.perform(self.prefill.machine.on_message(sender, message, self.now))
        elif receiver == self.decode.life:
            self.decode.perform(self.decode.machine.on_message(sender, message, self.now))

    def deliver_message(self, to_decode: bool, twice: bool) -> None:
        stream = self.stream
        if stream is None or stream.broken or (self.frozen and not to_decode):
            return
        receiver, sender = (stream.decode, stream.prefill) if to_decode else (stream.prefill, stream.decode)
        if stream.queues[receiver]:
            message = stream.queues[receiver].popleft()
            for _ in range(1 + twice):
                self.receive(receiver, sender, message)

    def break_stream(self, *, keep: bool, silent: bool) -> None:
        """Lose the stream. With `keep`, what was in flight may still be read late; with `silent`, P never notices."""
        stream = self.stream
        if stream is None or stream.broken:
            return
        stream.broken = True
        sides = [(stream.decode, stream.prefill), (stream.prefill, stream.decode)]
        for receiver, sender in sides:
            if keep:
                self.stragglers += [(receiver, sender, message) for message in stream.queues[receiver]]
            if not (silent and receiver == stream.prefill):
                self.unnoticed.append((receiver, sender, stream))

    def deliver_straggler(self, index: int) -> None:
        """Read a message of a broken stream late. Those between the same two keep their order."""
        if not self.stragglers or self.frozen:
            return
        receiver, sender, _ = self.stragglers[index % len(self.stragglers)]
        first = next(i for i, entry in enumerate(self.stragglers) if entry[:2] == (receiver, sender))
        self.receive(*self.stragglers.pop(first))

    def notice_loss(self, index: int) -> None:
        if not self.unnoticed or self.frozen:
            return
        noticer, lost, stream = self.unnoticed.pop(index % len(self.unnoticed))
        if stream is not self.stream:
            return  # the worker knows that this was not the current stream
        if noticer == self.prefill.life:
            self.prefill.perform(self.prefill.machine.on_peer_lost(lost))
        elif noticer == self.decode.life:
            self.decode.perform(self.decode.machine.on_peer_lost(lost, self.now))

    # Crashes.

    def crash_prefill(self) -> None:
        self.frozen = False
        self.break_stream(keep=True, silent=False)
        self.fabric.kill(self.prefill.life)
        self.prefill = PrefillSide(self, self.new_life("p"))

    def crash_decode(self, *, silent: bool) -> None:
        self.break_stream(keep=True, silent=silent)
        self.fabric.kill(self.decode.life)
        self.decode = DecodeSide(self, self.new_life("d"))

    # The mover.

    def deliver_transfer(self, index: int, *, fail: bool) -> None:
        if not self.fabric.pending:
            return
        transfer = self.fabric.pending[index % len(self.fabric.pending)]
        if fail:
            self.fabric.fail(transfer, "injected")
        else:
            self.check_transfer(transfer)
            self.fabric.deliver(transfer)

    def check_transfer(self, transfer: LocalTransfer) -> None:
        """A write may land only in blocks that its own attempt owns, live or in quarantine; likewise its source."""
        sources = _owners(self.prefill.pool, transfer.source)
        ensure(all(isinstance(owner, Attempt) for owner in sources), "a source block is free while it is read")
        targets = _owners(self.decode.pool, transfer.target)
        names = {(owner.handover, owner.epoch) for owner in sources if isinstance(owner, Attempt)}
        ensure(len(names) == 1, "source blocks of two attempts in one write")
        owned = all(isinstance(o, Attempt) and (o.handover, o.epoch) in names for o in targets)
        ensure(owned and not any(o in self.decode.running for o in targets), "a write lands in another's block")

    def tick(self, steps: int) -> None:
        self.now += GRANULE_S * steps
        if not self.frozen:
            self.prefill.perform(self.prefill.machine.tick(self.now))
        self.decode.perform(self.decode.machine.tick(self.now))

    # Invariants.

    def check(self) -> None:
        for transfer in self.fabric.pending:
            self.check_transfer(transfer)
        for pool in (self.prefill.pool, self.decode.pool):
            held = sum(len(blocks) for blocks in pool.owned.values())
            ensure(held + len(pool.free) == NUM_BLOCKS, "blocks were lost")

    def finish(self) -> None:
        """No more faults: within bounded time everything must end and every pool be whole."""
        if self.frozen:
            self.let_go_on()
            ensure(len(self.decode.machine) == 0, "D waits for a frozen prefill worker for ever")
        self.frozen = False
        self.let_go_on()
        ensure(len(self.prefill.machine) == 0, "P holds a hand-over for ever")
        ensure(len(self.decode.machine) == 0, "D waits for a hand-over for ever")
        ensure(self.decode.machine.num_quarantined == 0, "D quarantines blocks for ever")
        ensure(set(self.decode.ends) == set(self.decode.opens), "an attempt never ended")
        ensure(not self.prefill.pool.owned, "P's pool is not whole")
        ensure(not self.decode.pool.owned, "D's pool is not whole")

    def let_go_on(self) -> None:
        for _ in range(60):
            while self.unnoticed and not self.frozen:
                self.notice_loss(0)
            self.connect()
            self.settle()
            self.tick(steps=2)
            self.beat()
            self.check()

    def beat(self) -> None:
        """Other hand-overs of the same two workers keep their stream busy: a lease must not be what ends these."""
        if self.stream is not None and not self.stream.broken and not self.frozen:
            self.receive(self.stream.prefill, self.stream.decode, Beat())
            self.receive(self.stream.decode, self.stream.prefill, Beat())

    def settle(self) -> None:
        while self.stragglers and not self.frozen:
            self.deliver_straggler(0)
        while self.fabric.pending:
            self.deliver_transfer(0, fail=False)
        self.prefill.poll()
        self.decode.poll()
        for _ in range(40):
            self.deliver_message(to_decode=True, twice=False)
            self.deliver_message(to_decode=False, twice=False)
        for attempt in list(self.prefill.prompts):
            self.prefill.compute(attempt, 4)
        while self.decode.running:
            self.decode.finish_one(0)
        while self.decode.asked:
            self.decode.answer_reserve()


def _owners(pool: Pool, blocks: np.ndarray) -> list[object]:
    owner_of = {block: owner for owner, owned in pool.owned.items() for block in owned}
    return [owner_of.get(int(block)) for block in blocks]


def new_source() -> HandoverSource:
    return HandoverSource(lease_s=LEASE_S, beat_s=BEAT_S, max_write_blocks=2)


def new_target() -> HandoverTarget:
    return HandoverTarget(beat_s=BEAT_S, stall_s=STALL_S, hold_s=HOLD_S)
