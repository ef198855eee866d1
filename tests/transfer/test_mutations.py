"""Each safeguard of the protocol is taken out in turn; the model's schedules must notice."""

from __future__ import annotations

from collections.abc import Callable

import handover_world
import msgspec
import pytest
from handover_schedule import play_seed
from handover_sides import Violation

from baton.transfer import actions as act
from baton.transfer.mover import Arrival, Incarnation
from baton.transfer.source import Export, HandoverSource
from baton.transfer.target import HandoverTarget, Intake
from baton.transfer.wire import Admitted, Attempt, Failed, Message, Prefilled, Stopped, decode_tag, encode_tag

MAX_SCHEDULES = 3000


class NoQuarantine(HandoverTarget):
    """Gives the blocks of an aborted attempt back at once."""

    def _forsake(self, intake: Intake, now: float) -> list[act.TargetAction]:
        kept = super()._forsake(intake, now)
        self._quarantined.clear()
        return [act.Unreserve(a.attempt) if isinstance(a, act.Quarantine) else a for a in kept]


class NoEpochCheck(HandoverTarget):
    """Takes news of any attempt for news of the live attempt with that name."""

    def _current_epoch(self, handover: str, epoch: int) -> int:
        return next((attempt.epoch for attempt in self._intakes if attempt.handover == handover), epoch)

    def on_message(self, peer: Incarnation, message: Message, now: float) -> list[act.TargetAction]:
        if isinstance(message, Admitted | Prefilled | Stopped | Failed):
            epoch = self._current_epoch(message.handover, message.epoch)
            message = msgspec.structs.replace(message, epoch=epoch)
        return super().on_message(peer, message, now)

    def on_arrival(self, arrival: Arrival, now: float) -> list[act.TargetAction]:
        tag = decode_tag(arrival.tag)
        tag = msgspec.structs.replace(tag, epoch=self._current_epoch(tag.handover, tag.epoch))
        return super().on_arrival(Arrival(arrival.peer, encode_tag(tag)), now)


class CountsAhead(HandoverTarget):
    """Lands when Prefilled has come, whatever has arrived."""

    def _land_if_whole(self, intake: Intake) -> list[act.TargetAction]:
        intake.arrived.update(range(intake.num_writes or 0))
        return super()._land_if_whole(intake)


class TrustsAll(HandoverTarget):
    """Takes blocks that do not hold what was sent."""

    def on_arrival(self, arrival: Arrival, now: float) -> list[act.TargetAction]:
        return super().on_arrival(Arrival(arrival.peer, arrival.tag), now)


class NeverStalls(HandoverTarget):
    """Waits for ever for a peer that has gone silent."""

    def tick(self, now: float) -> list[act.TargetAction]:
        self._heard = dict.fromkeys(self._heard, now)
        return super().tick(now)


class IgnoresStrays(HandoverTarget):
    """Does not answer a peer that works for an attempt which has ended."""

    def _on_stray(
        self, attempt: Attempt, message: Admitted | Prefilled | Stopped | Failed, now: float
    ) -> list[act.TargetAction]:
        if isinstance(message, Admitted | Prefilled):
            return []
        return super()._on_stray(attempt, message, now)


class NoLeaseSweep(HandoverSource):
    """Keeps blocks for a decode worker that nobody heard die."""

    def tick(self, now: float) -> list[act.SourceAction]:
        for attempt in self._exports:
            self._leases.renew(attempt.peer, now)
        return super().tick(now)


class StopsEarly(HandoverSource):
    """Says Stopped and releases blocks while writes are still pending."""

    def _settle(self, export: Export) -> list[act.SourceAction]:
        if export.ending:
            export.pending.clear()
        return super()._settle(export)


class WritesAfterAbort(HandoverSource):
    """Does not look whether the attempt is ending before it pushes."""

    def _end(self, export: Export, reply: Message | None) -> list[act.SourceAction]:
        if isinstance(reply, Stopped):
            return [act.Send(export.attempt.peer, reply)]
        return super()._end(export, reply)


def source(kind: type[HandoverSource]) -> Callable[[], HandoverSource]:
    return lambda: kind(lease_s=handover_world.LEASE_S, beat_s=handover_world.BEAT_S, max_write_blocks=2)


def target(kind: type[HandoverTarget]) -> Callable[[], HandoverTarget]:
    return lambda: kind(beat_s=handover_world.BEAT_S, stall_s=handover_world.STALL_S, hold_s=handover_world.HOLD_S)


def is_noticed(
    claim: str,
    *,
    make_source: Callable[[], HandoverSource] | None = None,
    make_target: Callable[[], HandoverTarget] | None = None,
) -> bool:
    """Tell whether some schedule breaks just the invariant that the safeguard is there for."""
    for seed in range(MAX_SCHEDULES):
        try:
            play_seed(seed, make_source=make_source, make_target=make_target)
        except Violation as violation:
            if claim in str(violation):
                return True
    return False


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        (NoQuarantine, "a write lands in another's block"),
        (NoEpochCheck, "a write lands in another's block"),
        (CountsAhead, "landed KV is not what was sent"),
        (TrustsAll, "landed KV is not what was sent"),
        (NeverStalls, "D waits for a frozen prefill worker for ever"),
        (IgnoresStrays, "P holds a hand-over for ever"),
    ],
)
def test_the_model_catches_a_broken_target(kind: type[HandoverTarget], claim: str) -> None:
    assert is_noticed(claim, make_target=target(kind)), kind.__doc__


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        (NoLeaseSweep, "P holds a hand-over for ever"),
        (StopsEarly, "a source block is free while it is read"),
        (WritesAfterAbort, "a write lands in another's block"),
    ],
)
def test_the_model_catches_a_broken_source(kind: type[HandoverSource], claim: str) -> None:
    assert is_noticed(claim, make_source=source(kind)), kind.__doc__
