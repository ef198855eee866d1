"""The decode side of every hand-over of one worker, as a state machine: events in, actions out.

It names destination blocks late, counts the writes that arrived in them, and never gives a named block to anybody else
before the peer has said that it stopped, or is known dead. It hands every attempt exactly one end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from baton.transfer.actions import (
    Deliver,
    Disconnect,
    Drop,
    Fallback,
    Land,
    Quarantine,
    Reserve,
    Send,
    TargetAction,
    Unquarantine,
    Unreserve,
)
from baton.transfer.mover import Arrival, Incarnation
from baton.transfer.wire import (
    Abort,
    Admitted,
    Attempt,
    Beat,
    Failed,
    Hold,
    Landed,
    Message,
    Open,
    Place,
    Prefilled,
    Stopped,
    decode_tag,
)


class Opened(NamedTuple):
    attempt: Attempt
    actions: list[TargetAction]


@dataclass(slots=True, kw_only=True)
class Intake:
    """One live attempt."""

    attempt: Attempt
    skip_blocks: int
    num_blocks: int
    progress_at: float
    admitted: bool = False
    reserving: bool = False  # a Reserve is unanswered
    waiting: bool = False  # the engine had no room when last asked
    placed: bool = False
    delivered: bool = False
    num_writes: int | None = None
    arrived: set[int] = field(default_factory=set[int])  # numbers of distinct writes


class HandoverTarget:
    """Not thread-safe: one caller, in order. `now` is any clock that only this process reads."""

    def __init__(self, *, beat_s: float, stall_s: float, hold_s: float) -> None:
        self._beat_s = beat_s
        self._stall_s = stall_s
        self._hold_s = hold_s
        self._epochs = itertools.count(1)
        self._intakes: dict[Attempt, Intake] = {}
        self._quarantined: dict[Attempt, float] = {}  # when its Abort was last sent
        self._lives: dict[str, Incarnation] = {}  # by address
        self._heard: dict[Incarnation, float] = {}
        self._next_beat = 0.0

    def __len__(self) -> int:
        """Count the live attempts."""
        return len(self._intakes)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def has_quarantined(self, peer: Incarnation) -> bool:
        return any(attempt.peer == peer for attempt in self._quarantined)

    @property
    def is_receiving(self) -> bool:
        """Tell whether writes may be on their way: the mover should be polled eagerly."""
        return any(intake.placed for intake in self._intakes.values())

    @property
    def is_landing(self) -> bool:
        """Tell whether a prompt is computed and only its last writes are missing: every moment counts."""
        return any(intake.num_writes is not None for intake in self._intakes.values())

    # What our worker and engine say.

    def open(
        self, handover: str, peer: Incarnation, *, skip_blocks: int, num_blocks: int, request: msgspec.Raw, now: float
    ) -> Opened:
        """Ask a connected peer for the KV of a prompt's blocks skip_blocks..num_blocks."""
        if not any(other.peer == peer for other in self._intakes):
            self._heard[peer] = now  # until now it owed us no sign of life
        attempt = Attempt(peer, handover, next(self._epochs))
        self._intakes[attempt] = Intake(
            attempt=attempt, skip_blocks=skip_blocks, num_blocks=num_blocks, progress_at=now
        )
        message = Open(
            handover=handover, epoch=attempt.epoch, skip_blocks=skip_blocks, num_blocks=num_blocks, request=request
        )
        return Opened(attempt, [Send(peer, message)])

    def placed(self, attempt: Attempt, blocks: tuple[int, ...], now: float) -> list[TargetAction]:
        """Name the blocks that the engine reserved, in token order."""
        intake = self._intakes.get(attempt)
        if intake is None:
            return [Unreserve(attempt)]
        intake.reserving, intake.waiting, intake.placed, intake.progress_at = False, False, True, now
        peer, handover, epoch = attempt
        return [Send(peer, Place(handover=handover, epoch=epoch, blocks=blocks))]

    def no_room(self, attempt: Attempt) -> list[TargetAction]:
        """Tell the peer to hold; the engine is asked again at the next tick, or when `on_room` is called."""
        intake = self._intakes.get(attempt)
        if intake is None:
            return []
        first = not intake.waiting
        intake.reserving, intake.waiting = False, True
        return [Send(attempt.peer, Hold(handover=attempt.handover, epoch=attempt.epoch))] if first else []

    def on_room(self) -> list[TargetAction]:
        """Ask again for every attempt that waits for room, oldest first."""
        return [action for intake in self._intakes.values() if intake.waiting for action in self._reserve(intake)]

    def abort(self, attempt: Attempt, now: float) -> list[TargetAction]:
        """End an attempt whose client is gone; fine when it has already ended."""
        intake = self._intakes.get(attempt)
        return [*self._forsake(intake, now), Drop(attempt)] if intake else []

    # What the peer and the mover say.

    def on_peer_connected(self, address: str, peer: Incarnation, now: float) -> list[TargetAction]:
        """Begin a new stream to `peer`, found at `address`. Call it before `open`.

        A new life at a known address proves the old one dead. The same life is told again of all that it must stop.
        """
        actions: list[TargetAction] = []
        previous = self._lives.get(address, peer)
        if previous != peer:
            actions += self.on_peer_dead(previous, now)
        self._lives[address] = peer
        self._heard[peer] = now
        actions += self.on_peer_lost(peer, now)
        return actions + [self._abort(attempt, now) for attempt in self._quarantined if attempt.peer == peer]

    def on_peer_lost(self, peer: Incarnation, now: float) -> list[TargetAction]:
        """Fail the attempts of a broken stream. Blocks that were named to the peer stay in quarantine: it may live."""
        return self._fail_all(peer, "the hand-over stream was lost", now)

    def on_peer_dead(self, peer: Incarnation, now: float) -> list[TargetAction]:
        """End everything of a peer whose process is known to be dead; beyond a lost stream, this frees its blocks."""
        actions = self._fail_all(peer, "the prefill worker died", now)
        over = [attempt for attempt in self._quarantined if attempt.peer == peer]
        actions.append(Disconnect(peer))
        for attempt in over:
            del self._quarantined[attempt]
            actions.append(Unquarantine(attempt))
        self._heard.pop(peer, None)
        return actions

    def on_message(self, peer: Incarnation, message: Message, now: float) -> list[TargetAction]:
        self._heard[peer] = now
        match message:
            case Admitted() | Prefilled() | Stopped() | Failed():
                attempt = Attempt(peer, message.handover, message.epoch)
                intake = self._intakes.get(attempt)
                if intake is None:
                    return self._on_stray(attempt, message, now)
                intake.progress_at = now
                return self._on_message(intake, message)
            case _:
                return []

    def on_arrival(self, arrival: Arrival, now: float) -> list[TargetAction]:
        tag = decode_tag(arrival.tag)
        intake = self._intakes.get(Attempt(arrival.peer, tag.handover, tag.epoch))
        if intake is None:
            return []
        if arrival.error is not None:
            return self._fail(intake, arrival.error, now)
        intake.arrived.add(tag.number)
        intake.progress_at = now
        return self._land_if_whole(intake)

    def tick(self, now: float) -> list[TargetAction]:
        """Fail what stalls, retry what waits, show that we live; call it several times per beat."""
        actions: list[TargetAction] = []
        for intake in list(self._intakes.values()):
            if now - self._heard[intake.attempt.peer] > self._stall_s:
                actions += self._fail(intake, f"no sign of the prefill worker for {self._stall_s} s", now)
            elif intake.placed and intake.delivered and now - intake.progress_at > self._stall_s:
                actions += self._fail(intake, f"the prompt is computed, but no KV arrived for {self._stall_s} s", now)
            elif intake.waiting and now - intake.progress_at > self._hold_s:
                actions += self._fail(intake, f"no room for its KV for {self._hold_s} s", now)
        actions += self.on_room()
        for attempt, aborted_at in self._quarantined.items():
            if now - aborted_at > self._stall_s:
                actions.append(self._abort(attempt, now))
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            actions += [Send(peer, Beat()) for peer in dict.fromkeys(attempt.peer for attempt in self._intakes)]
        return actions

    # Below, `intake` is live.

    def _on_stray(
        self, attempt: Attempt, message: Admitted | Prefilled | Stopped | Failed, now: float
    ) -> list[TargetAction]:
        """Answer a peer that speaks of an attempt which has ended here."""
        if isinstance(message, Admitted | Prefilled):
            return [self._abort(attempt, now)]
        return [Unquarantine(attempt)] if self._quarantined.pop(attempt, None) is not None else []

    def _on_message(self, intake: Intake, message: Admitted | Prefilled | Stopped | Failed) -> list[TargetAction]:
        match message:
            case Admitted():
                if intake.admitted:
                    return []
                intake.admitted = True
                return self._reserve(intake)
            case Prefilled():
                actions: list[TargetAction] = [] if intake.delivered else [Deliver(intake.attempt, message.result)]
                intake.delivered = True
                if message.num_writes is not None:
                    intake.num_writes = message.num_writes
                return actions + self._land_if_whole(intake)
            case Stopped():
                return self._over(intake, "the prefill worker stopped unasked")
            case Failed():
                return self._over(intake, message.error)

    def _reserve(self, intake: Intake) -> list[TargetAction]:
        if intake.reserving:
            return []
        intake.reserving = True
        return [Reserve(intake.attempt, intake.skip_blocks, intake.num_blocks)]

    def _land_if_whole(self, intake: Intake) -> list[TargetAction]:
        if not intake.placed or intake.num_writes is None or len(intake.arrived) < intake.num_writes:
            return []
        peer, handover, epoch = intake.attempt
        del self._intakes[intake.attempt]
        return [Land(intake.attempt), Send(peer, Landed(handover=handover, epoch=epoch))]

    def _over(self, intake: Intake, reason: str) -> list[TargetAction]:
        """Fail an attempt whose peer has promised to write no more: no quarantine."""
        del self._intakes[intake.attempt]
        freed: list[TargetAction] = [Unreserve(intake.attempt)] if intake.placed else []
        return [*freed, Fallback(intake.attempt, reason)]

    def _fail_all(self, peer: Incarnation, reason: str, now: float) -> list[TargetAction]:
        lost = [intake for intake in self._intakes.values() if intake.attempt.peer == peer]
        return [action for intake in lost for action in self._fail(intake, reason, now)]

    def _fail(self, intake: Intake, reason: str, now: float) -> list[TargetAction]:
        return [*self._forsake(intake, now), Fallback(intake.attempt, reason)]

    def _forsake(self, intake: Intake, now: float) -> list[TargetAction]:
        """Forget the attempt, tell its peer, and quarantine the blocks that the peer knows."""
        del self._intakes[intake.attempt]
        if not intake.placed:
            return [self._abort(intake.attempt, now)]
        self._quarantined[intake.attempt] = now
        return [self._abort(intake.attempt, now), Quarantine(intake.attempt)]

    def _abort(self, attempt: Attempt, now: float) -> Send:
        if attempt in self._quarantined:
            self._quarantined[attempt] = now
        return Send(attempt.peer, Abort(handover=attempt.handover, epoch=attempt.epoch))
