"""The decode side, one rule a test; schedules that mix them are in test_protocol_model."""

from __future__ import annotations

import msgspec
import pytest

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
from baton.transfer.target import HandoverTarget
from baton.transfer.wire import (
    Abort,
    Admitted,
    Attempt,
    Beat,
    Failed,
    Hold,
    Landed,
    Open,
    Place,
    Prefilled,
    Stopped,
    WriteTag,
    encode_tag,
)

P = Incarnation("p1")
ADDRESS = "10.0.0.1:7000"
RAW = msgspec.Raw(b"\x01")


class Side:
    """A target with one attempt open, and short words for what happens to it."""

    def __init__(self) -> None:
        self.target = HandoverTarget(beat_s=1.0, stall_s=10.0, hold_s=30.0)
        self.target.on_peer_connected(ADDRESS, P, 0.0)
        opened = self.target.open("r1", P, skip_blocks=1, num_blocks=4, request=RAW, now=0.0)
        self.attempt, self.opening = opened
        self.epoch = self.attempt.epoch

    def admitted(self) -> list[TargetAction]:
        return self.target.on_message(P, Admitted(handover="r1", epoch=self.epoch), 0.0)

    def place(self, now: float = 0.0) -> list[TargetAction]:
        self.admitted()
        return self.target.placed(self.attempt, (7, 8, 9), now)

    def prefilled(self, num_writes: int | None, now: float = 0.0) -> list[TargetAction]:
        return self.target.on_message(
            P, Prefilled(handover="r1", epoch=self.epoch, num_writes=num_writes, result=RAW), now
        )

    def arrive(self, number: int, now: float = 0.0, epoch: int | None = None) -> list[TargetAction]:
        tag = encode_tag(WriteTag("r1", self.epoch if epoch is None else epoch, number))
        return self.target.on_arrival(Arrival(P, tag), now)

    def stopped(self) -> list[TargetAction]:
        return self.target.on_message(P, Stopped(handover="r1", epoch=self.epoch), 0.0)

    @property
    def abort(self) -> Send:
        return Send(P, Abort(handover="r1", epoch=self.epoch))

    @property
    def landing(self) -> list[TargetAction]:
        return [Land(self.attempt), Send(P, Landed(handover="r1", epoch=self.epoch))]


@pytest.fixture
def side() -> Side:
    return Side()


def test_an_attempt_that_finds_no_room_for_long_is_given_up() -> None:
    side = Side()
    side.admitted()
    assert side.target.no_room(side.attempt) == [Send(P, Hold(handover="r1", epoch=side.epoch))]
    for now in range(1, 30):
        side.target.on_message(P, Beat(), float(now))
        assert not any(isinstance(action, Fallback) for action in side.target.tick(float(now)))
        side.target.no_room(side.attempt)
    side.target.on_message(P, Beat(), 31.0)
    assert [type(action) for action in side.target.tick(31.0)] == [Send, Fallback]


def test_a_peer_that_had_nothing_to_say_for_long_is_not_taken_for_silent() -> None:
    target = HandoverTarget(beat_s=1.0, stall_s=10.0, hold_s=30.0)
    target.on_peer_connected(ADDRESS, P, 0.0)
    target.open("r1", P, skip_blocks=0, num_blocks=4, request=RAW, now=1000.0)
    assert not any(isinstance(action, Fallback) for action in target.tick(1009.0))
    target.open("r2", P, skip_blocks=0, num_blocks=4, request=RAW, now=1009.0)
    ends = [action for action in target.tick(1010.5) if isinstance(action, Fallback)]
    assert len(ends) == 2, "opening more must not hide that a peer owes a sign of life"


def test_blocks_are_named_only_after_prefill_admits(side: Side) -> None:
    opening = Open(handover="r1", epoch=side.epoch, skip_blocks=1, num_blocks=4, request=RAW)
    assert side.opening == [Send(P, opening)]
    assert side.admitted() == [Reserve(side.attempt, 1, 4)]
    assert side.admitted() == [], "a duplicate asks for nothing"
    named = side.target.placed(side.attempt, (7, 8, 9), 0.0)
    assert named == [Send(P, Place(handover="r1", epoch=side.epoch, blocks=(7, 8, 9)))]


def test_the_first_token_goes_on_before_the_kv_has_landed(side: Side) -> None:
    side.place()
    assert side.target.is_receiving and not side.target.is_landing
    assert side.arrive(0) == []
    assert side.prefilled(2) == [Deliver(side.attempt, RAW)]
    assert side.target.is_landing
    assert side.arrive(0) == [], "the same write does not count twice"
    assert side.arrive(1) == side.landing
    assert not side.target.is_receiving and len(side.target) == 0


def test_the_whole_may_arrive_before_the_message(side: Side) -> None:
    side.place()
    side.arrive(1)
    side.arrive(0)
    assert side.prefilled(2) == [Deliver(side.attempt, RAW), *side.landing]


def test_the_first_token_is_delivered_once_when_the_count_comes_later(side: Side) -> None:
    side.admitted()
    assert side.target.no_room(side.attempt) == [Send(P, Hold(handover="r1", epoch=side.epoch))]
    assert side.prefilled(None) == [Deliver(side.attempt, RAW)]
    side.target.placed(side.attempt, (7, 8, 9), 0.0)
    assert side.prefilled(1) == []
    assert side.arrive(0) == side.landing


def test_want_of_room_is_told_once_and_retried(side: Side) -> None:
    side.admitted()
    side.target.no_room(side.attempt)
    assert side.target.on_room() == [Reserve(side.attempt, 1, 4)]
    assert side.target.on_room() == [], "one question at a time"
    assert side.target.no_room(side.attempt) == []
    assert Reserve(side.attempt, 1, 4) in side.target.tick(0.5)


def test_an_abort_before_blocks_were_named_needs_no_quarantine(side: Side) -> None:
    side.admitted()
    assert side.target.abort(side.attempt, 0.0) == [side.abort, Drop(side.attempt)]
    assert side.target.abort(side.attempt, 0.0) == []
    assert side.target.placed(side.attempt, (7, 8, 9), 0.0) == [Unreserve(side.attempt)], "the answer came too late"


@pytest.mark.parametrize("end", [Stopped, Failed])
def test_named_blocks_of_an_aborted_attempt_wait_for_the_peers_word(side: Side, end: type[Stopped | Failed]) -> None:
    side.place()
    assert side.target.abort(side.attempt, 0.0) == [side.abort, Quarantine(side.attempt), Drop(side.attempt)]
    assert side.arrive(0) == []
    error = {"error": "x"} if end is Failed else {}
    message = end(handover="r1", epoch=side.epoch, **error)
    assert side.target.on_message(P, message, 0.0) == [Unquarantine(side.attempt)]
    assert side.target.on_message(P, message, 0.0) == []


def test_a_lost_stream_fails_the_attempt_but_does_not_end_quarantine(side: Side) -> None:
    side.place()
    lost = side.target.on_peer_lost(P, 0.0)
    assert lost == [side.abort, Quarantine(side.attempt), Fallback(side.attempt, "the hand-over stream was lost")]
    assert side.target.on_peer_connected(ADDRESS, P, 1.0) == [side.abort], "the same life is told again"
    assert side.target.num_quarantined == 1
    assert side.stopped() == [Unquarantine(side.attempt)]


def test_a_new_life_at_the_same_address_ends_quarantine_after_the_teardown(side: Side) -> None:
    side.place()
    side.target.on_peer_lost(P, 0.0)
    reborn = side.target.on_peer_connected(ADDRESS, Incarnation("p2"), 1.0)
    assert reborn == [Disconnect(P), Unquarantine(side.attempt)]


def test_another_workers_connection_ends_nobodys_quarantine(side: Side) -> None:
    side.place()
    side.target.on_peer_lost(P, 0.0)
    assert side.target.on_peer_connected("10.0.0.2:7000", Incarnation("p2"), 1.0) == []
    assert side.target.num_quarantined == 1


def test_a_peer_known_dead_frees_its_live_and_quarantined_blocks(side: Side) -> None:
    side.place()
    actions = side.target.on_peer_dead(P, 0.0)
    assert actions[1:] == [
        Quarantine(side.attempt),
        Fallback(side.attempt, "the prefill worker died"),
        Disconnect(P),
        Unquarantine(side.attempt),
    ]


def test_a_failed_prefill_frees_at_once_and_falls_back_with_its_reason(side: Side) -> None:
    side.place()
    failed = side.target.on_message(P, Failed(handover="r1", epoch=side.epoch, error="out of memory"), 0.0)
    assert failed == [Unreserve(side.attempt), Fallback(side.attempt, "out of memory")]


def test_a_retry_has_a_new_epoch_and_is_deaf_to_the_old_one(side: Side) -> None:
    side.place()
    side.target.on_peer_lost(P, 0.0)
    retry = side.target.open("r1", P, skip_blocks=1, num_blocks=4, request=RAW, now=0.0).attempt
    assert retry.epoch > side.epoch
    side.target.on_message(P, Admitted(handover="r1", epoch=retry.epoch), 0.0)
    side.target.placed(retry, (17, 18, 19), 0.0)
    assert side.arrive(0) == [] and side.arrive(1) == []
    assert side.prefilled(2) == [side.abort], "a peer that works for a dead attempt is told to stop"
    fresh = Prefilled(handover="r1", epoch=retry.epoch, num_writes=1, result=RAW)
    assert side.target.on_message(P, fresh, 0.0) == [Deliver(retry, RAW)]
    assert Land(retry) in side.arrive(0, epoch=retry.epoch)


def test_news_of_another_peer_is_not_taken_for_ours(side: Side) -> None:
    side.place()
    liar = Incarnation("p9")
    assert side.target.on_arrival(Arrival(liar, encode_tag(WriteTag("r1", side.epoch, 0))), 0.0) == []
    assert side.target.on_message(liar, Stopped(handover="r1", epoch=side.epoch), 0.0) == []
    assert len(side.target) == 1


def test_a_silent_peer_is_given_up_and_beats_keep_it(side: Side) -> None:
    side.place()
    side.target.on_message(P, Beat(), 9.0)
    assert Fallback(side.attempt, "no sign of the prefill worker for 10.0 s") not in side.target.tick(19.0)
    given_up = side.target.tick(19.1)
    assert given_up[:3] == [
        side.abort,
        Quarantine(side.attempt),
        Fallback(side.attempt, "no sign of the prefill worker for 10.0 s"),
    ]


def test_kv_that_stops_arriving_is_given_up_although_the_peer_beats(side: Side) -> None:
    side.place()
    side.prefilled(3)
    side.arrive(0, now=8.0)
    side.target.on_message(P, Beat(), 17.0)
    assert not any(isinstance(action, Fallback) for action in side.target.tick(18.0))
    assert any(isinstance(action, Fallback) for action in side.target.tick(18.1))


def test_an_unanswered_abort_is_repeated(side: Side) -> None:
    side.place()
    side.target.abort(side.attempt, 0.0)
    assert side.abort not in side.target.tick(10.0)
    assert side.abort in side.target.tick(10.1)
    assert side.abort not in side.target.tick(11.0)


def test_beats_go_only_where_attempts_live(side: Side) -> None:
    assert side.target.tick(0.0) == [Send(P, Beat())]
    side.target.abort(side.attempt, 0.0)
    assert side.target.tick(2.0) == []


def test_attempts_are_named_with_the_peers_life(side: Side) -> None:
    assert side.attempt == Attempt(P, "r1", side.epoch)


def test_blocks_that_do_not_hold_what_was_sent_fail_the_attempt_and_stay_in_quarantine() -> None:
    side = Side()
    side.place()
    side.prefilled(2)
    side.arrive(0)
    tag = encode_tag(WriteTag("r1", side.epoch, 1))
    actions = side.target.on_arrival(Arrival(P, tag, "blocks [8] do not hold what was sent"), 0.0)
    assert actions == [
        Send(P, Abort(handover="r1", epoch=side.epoch)),
        Quarantine(side.attempt),
        Fallback(side.attempt, "blocks [8] do not hold what was sent"),
    ]
    assert side.arrive(1) == []
