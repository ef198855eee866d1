"""The prefill side, one rule a test; schedules that mix them are in test_protocol_model."""

from __future__ import annotations

import msgspec
import pytest

from baton.transfer.actions import CancelPrefill, Prefill, Release, Send, SourceAction, Write
from baton.transfer.mover import Completion, Incarnation
from baton.transfer.source import HandoverSource
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
    decode_tag,
    encode_tag,
)

D = Incarnation("d1")
RESULT = msgspec.Raw(b"\x01")
A = Attempt(D, "r1", 5)
OPEN = Open(handover="r1", epoch=5, skip_blocks=1, num_blocks=6, request=RESULT)
PLACE = Place(handover="r1", epoch=5, blocks=(70, 71, 72, 73, 74))
ABORT = Abort(handover="r1", epoch=5)
OURS = (10, 11, 12, 13, 14, 15)


@pytest.fixture
def source() -> HandoverSource:
    return HandoverSource(lease_s=10.0, beat_s=1.0, max_write_blocks=64)


def writes(actions: list[SourceAction]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    return [(w.source_blocks, w.target_blocks, decode_tag(w.tag).number) for w in actions if isinstance(w, Write)]


def completion(number: int, error: str | None = None) -> Completion:
    return Completion(0, D, encode_tag(WriteTag("r1", 5, number)), 0, 0.0, error)


def say_failed(error: str) -> Send:
    return Send(D, Failed(handover="r1", epoch=5, error=error))


STOPPED = Send(D, Stopped(handover="r1", epoch=5))


def test_chunks_are_pushed_while_the_next_computes_and_the_partial_block_last(source: HandoverSource) -> None:
    assert source.on_message(D, OPEN, 0.0) == [Prefill(A, OPEN)]
    assert source.on_admitted(A) == [Send(D, Admitted(handover="r1", epoch=5))]
    assert source.on_message(D, PLACE, 0.0) == []
    assert writes(source.on_progress(A, 3, OURS)) == [((11, 12), (70, 71), 0)]
    assert writes(source.on_progress(A, 5, OURS)) == [((13, 14), (72, 73), 1)]
    last = source.on_prefilled(A, OURS, RESULT)
    assert writes(last) == [((15,), (74,), 2)]
    assert last[-1] == Send(D, Prefilled(handover="r1", epoch=5, num_writes=3, result=RESULT))


def test_nothing_is_written_before_a_place_and_the_count_follows_it(source: HandoverSource) -> None:
    source.on_message(D, OPEN, 0.0)
    source.on_progress(A, 3, OURS)
    assert source.on_message(D, Hold(handover="r1", epoch=5), 0.0) == []
    done = source.on_prefilled(A, OURS, RESULT)
    assert done == [Send(D, Prefilled(handover="r1", epoch=5, num_writes=None, result=RESULT))]
    late = source.on_message(D, PLACE, 0.0)
    assert writes(late) == [(OURS[1:], PLACE.blocks, 0)]
    assert late[-1] == Send(D, Prefilled(handover="r1", epoch=5, num_writes=1, result=RESULT))


def test_progress_without_on_admitted_admits_by_itself_once(source: HandoverSource) -> None:
    source.on_message(D, OPEN, 0.0)
    assert source.on_progress(A, 1, OURS) == [Send(D, Admitted(handover="r1", epoch=5))]
    assert source.on_progress(A, 2, OURS) == []


def test_a_large_push_is_split() -> None:
    source = HandoverSource(lease_s=10.0, beat_s=1.0, max_write_blocks=2)
    source.on_message(D, OPEN, 0.0)
    source.on_message(D, PLACE, 0.0)
    pushed = writes(source.on_prefilled(A, OURS, RESULT))
    assert pushed == [((11, 12), (70, 71), 0), ((13, 14), (72, 73), 1), ((15,), (74,), 2)]


def test_a_prompt_that_decode_has_whole_needs_no_write(source: HandoverSource) -> None:
    source.on_message(D, msgspec.structs.replace(OPEN, skip_blocks=6), 0.0)
    source.on_message(D, msgspec.structs.replace(PLACE, blocks=()), 0.0)
    done = source.on_prefilled(A, OURS, RESULT)
    assert done[-1] == Send(D, Prefilled(handover="r1", epoch=5, num_writes=0, result=RESULT))


def prefill_and_push(source: HandoverSource) -> None:
    source.on_message(D, OPEN, 0.0)
    source.on_message(D, PLACE, 0.0)
    source.on_progress(A, 3, OURS)
    source.on_progress(A, 5, OURS)


def test_abort_is_answered_only_after_every_pending_write_has_ended(source: HandoverSource) -> None:
    prefill_and_push(source)
    assert source.on_message(D, ABORT, 0.0) == [CancelPrefill(A)]
    assert source.on_progress(A, 6, OURS) == []
    assert source.on_completion(completion(1)) == []
    assert source.on_completion(completion(1)) == [], "a duplicate counts for nothing"
    assert source.on_completion(completion(0)) == [Release(A), STOPPED]
    assert source.on_message(D, ABORT, 0.0) == [STOPPED], "an Abort of what is over is answered again"
    assert len(source) == 0


def test_landed_releases_after_the_completions_that_it_overtook(source: HandoverSource) -> None:
    prefill_and_push(source)
    source.on_prefilled(A, OURS, RESULT)
    source.on_completion(completion(0))
    source.on_completion(completion(2))
    assert source.on_message(D, Landed(handover="r1", epoch=5), 0.0) == []
    assert source.on_completion(completion(1)) == [Release(A)]


def test_a_failed_write_fails_the_attempt_once_the_others_have_ended(source: HandoverSource) -> None:
    prefill_and_push(source)
    assert source.on_completion(completion(0, "cable cut")) == [CancelPrefill(A)]
    assert source.on_completion(completion(1, "also cut")) == [Release(A), say_failed("cable cut")]


def test_an_engine_failure_reaches_decode(source: HandoverSource) -> None:
    source.on_message(D, OPEN, 0.0)
    assert source.on_failed(A, "out of memory") == [Release(A), say_failed("out of memory")]
    assert source.on_failed(A, "out of memory") == []


def test_an_open_that_its_abort_overtook_is_never_begun(source: HandoverSource) -> None:
    assert source.on_message(D, ABORT, 0.0) == [STOPPED]
    assert source.on_message(D, OPEN, 1e6) == [say_failed("this attempt is over")]
    newer = msgspec.structs.replace(OPEN, epoch=6)
    assert source.on_message(D, newer, 0.0) == [Prefill(Attempt(D, "r1", 6), newer)]


def test_messages_of_another_epoch_change_nothing(source: HandoverSource) -> None:
    source.on_message(D, OPEN, 0.0)
    assert source.on_message(D, msgspec.structs.replace(PLACE, epoch=4), 0.0) == []
    assert source.on_message(D, Landed(handover="r1", epoch=6), 0.0) == []
    assert source.on_message(D, Abort(handover="r1", epoch=4), 0.0) == [Send(D, Stopped(handover="r1", epoch=4))]
    assert len(source) == 1


def test_duplicates_of_open_and_place_do_nothing(source: HandoverSource) -> None:
    prefill_and_push(source)
    assert source.on_message(D, OPEN, 0.0) == []
    assert source.on_message(D, PLACE, 0.0) == []


def test_two_peers_may_use_the_same_name_and_epoch(source: HandoverSource) -> None:
    other = Incarnation("d2")
    source.on_message(D, OPEN, 0.0)
    assert source.on_message(other, OPEN, 0.0) == [Prefill(Attempt(other, "r1", 5), OPEN)]
    released = source.on_peer_lost(other)
    assert Release(Attempt(other, "r1", 5)) in released
    assert len(source) == 1
    assert Attempt(other, "r1", 5).name != A.name


def test_a_place_of_the_wrong_length_fails_the_attempt_with_both_numbers(source: HandoverSource) -> None:
    source.on_message(D, OPEN, 0.0)
    actions = source.on_message(D, msgspec.structs.replace(PLACE, blocks=(1, 2)), 0.0)
    assert actions[-1] == say_failed("Place.blocks names 2 blocks, Open asked for 5")


def test_any_message_of_the_stream_renews_all_its_leases_and_silence_ends_them(source: HandoverSource) -> None:
    other = Attempt(D, "r2", 6)
    source.on_message(D, OPEN, 0.0)
    source.on_message(D, msgspec.structs.replace(OPEN, handover="r2", epoch=6), 1.0)
    source.on_message(D, Beat(), 9.0)
    assert [a for a in source.tick(18.9) if not isinstance(a, Send)] == []
    ended = source.tick(19.0)
    assert [a.attempt for a in ended if isinstance(a, Release)] == [A, other]
    assert [a.message.handover for a in ended if isinstance(a, Send) and isinstance(a.message, Failed)] == ["r1", "r2"]


def test_beats_go_to_every_peer_that_has_an_attempt(source: HandoverSource) -> None:
    assert source.tick(0.0) == []
    source.on_message(D, OPEN, 0.0)
    assert source.tick(1.0) == [Send(D, Beat())]
    assert source.tick(1.5) == []
    assert source.tick(2.0) == [Send(D, Beat())]
