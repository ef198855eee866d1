from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from baton.router.admission import Admission, AdmissionLimits, Place
from baton.router.errors import NoWorkers, Overloaded


@dataclass
class Desk:
    """An admission over workers that take `room` more requests."""

    room: int = 0
    has_seat: bool = True
    now: float = 0.0
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    order: list[Place] = field(default_factory=list[Place])

    def __post_init__(self) -> None:
        self.admission = Admission(self.limits, lambda num_tokens: self.room > 0, self.clock, lambda: self.has_seat)

    def clock(self) -> float:
        self.now += 1e-6  # no two readings of a real one are equal
        return self.now

    def serve(self, num: int = 1, *, seconds: float = 0.0, cached: float = 0.0) -> None:
        """Let `num` more requests go; each is charged, and has its first token `seconds` later."""
        for _ in range(num):
            self.room += 1
            self.admission.pump()
            place = next(place for place in self.waiting if place.is_released and place not in self.order)
            self.order.append(place)
            self.room -= 1
            place.charged(round(place.num_tokens * (1 - cached)))
            self.admission.note_progress(round(place.num_tokens * (1 - cached)))
            self.now += seconds
            self.admission.note_progress(0)
            place.leave(has_output=True)

    waiting: list[Place] = field(default_factory=list[Place])

    def enter(
        self, *prompt_lens: int, key: str = "", priority: int = 0, deadline_s: float | None = None
    ) -> list[Place]:
        places = self.admission.enter(prompt_lens, key=key, priority=priority, deadline_s=deadline_s)
        self.waiting += places
        return places


def limited(**limits: int | float) -> Desk:
    return Desk(limits=AdmissionLimits(**limits))  # pyright: ignore[reportArgumentType]


def test_beyond_the_limit_of_requests_it_refuses_with_a_time_to_come_back() -> None:
    desk = limited(max_requests=2, max_tokens=100)
    places = desk.enter(1, 1)
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2") as caught:
        desk.enter(1)
    assert caught.value.retry_after_s == 1
    places[0].leave()
    desk.enter(1)


def test_queued_tokens_are_limited_too() -> None:
    desk = limited(max_requests=10, max_tokens=100)
    desk.enter(60)
    with pytest.raises(Overloaded, match="60 prompt tokens are waiting, the limit is 100"):
        desk.enter(41)
    desk.enter(40)


def test_an_idle_gateway_takes_a_call_of_any_size() -> None:
    assert len(limited(max_requests=2, max_tokens=100).enter(*[5000] * 4)) == 4


def test_leaving_twice_counts_once() -> None:
    desk = Desk()
    place, other = desk.enter(10, 20)
    place.leave()
    place.leave(has_output=True)
    assert (desk.admission.num_requests, desk.admission.num_tokens, desk.admission.num_queued) == (1, 20, 1)
    other.leave()
    assert (desk.admission.num_requests, desk.admission.num_tokens, desk.admission.num_queued) == (0, 0, 0)


def test_the_sequences_of_a_call_enter_all_or_none() -> None:
    desk = limited(max_requests=3)
    desk.enter(1)
    with pytest.raises(Overloaded):
        desk.enter(1, 1, 1)
    assert desk.admission.num_requests == 1
    assert len(desk.enter(1, 1)) == 2


def test_with_room_nobody_waits_and_each_is_judged_after_the_one_before_is_charged() -> None:
    desk = Desk(room=2)
    first, second, third = desk.enter(10), desk.enter(10), desk.enter(10)
    assert first[0].is_released and not second[0].is_released
    desk.room = 1
    first[0].charged(10)
    assert second[0].is_released and not third[0].is_released
    desk.room = 0
    second[0].charged(10)
    second[0].charged(10)
    assert not third[0].is_released
    desk.room = 1
    desk.admission.pump()
    assert third[0].is_released


def test_a_request_that_goes_before_it_is_charged_lets_the_next_one_go() -> None:
    desk = Desk(room=1)
    (first,), (second,) = desk.enter(10), desk.enter(10)
    first.leave()
    assert second.is_released


def test_a_request_that_cannot_be_in_time_is_refused_before_it_waits() -> None:
    desk = Desk()
    desk.enter(*[100] * 20)
    assert desk.admission.expected_wait_s(100) == 0.0  # nothing was measured yet
    desk.serve(10, seconds=0.5)  # 200 tokens a second; 10 of them still wait: 5 s
    assert desk.admission.expected_wait_s(100) == pytest.approx(5.0, rel=0.01)
    with pytest.raises(Overloaded, match=r"a wait of 5\.0 s is expected, more than 1\.5 s is too long") as caught:
        desk.enter(100, deadline_s=3.0)  # 0.5 s of them for its own prompt
    assert caught.value.retry_after_s == 6  # rounded up
    desk.enter(100, deadline_s=9.0)
    desk.enter(100, priority=-1, deadline_s=1.0)  # goes before them


def test_slow_first_tokens_do_not_shut_the_door_for_ever() -> None:
    """What was learnt under load must not refuse everybody when the workers are idle again."""
    desk = limited(max_wait_s=10_000.0)
    desk.enter(*[100] * 20)
    desk.serve(20, seconds=30.0)
    desk.enter(100)
    with pytest.raises(Overloaded):
        desk.enter(100, deadline_s=5.0)
    desk.serve(1, seconds=0.1)
    desk.room = 1
    (place,) = desk.enter(100, deadline_s=5.0)
    assert place.is_released


def test_nobody_waits_longer_than_the_limit() -> None:
    desk = limited(max_wait_s=6.0)
    desk.enter(*[100] * 20)
    desk.serve(10, seconds=0.25)
    desk.enter(100)  # 2.5 s
    desk.enter(*[100] * 6)
    with pytest.raises(Overloaded, match="a wait"):
        desk.enter(100)


def test_a_request_whose_time_has_passed_is_refused_at_its_turn() -> None:
    desk = Desk()
    (late,) = desk.enter(10, deadline_s=1.0)
    (patient,) = desk.enter(10)
    desk.now, desk.room = 2.0, 1
    desk.admission.pump()
    assert patient.is_released and not late.is_released


async def test_the_time_to_wait_ends_by_itself() -> None:
    admission = Admission(AdmissionLimits(max_wait_s=0.01), lambda num_tokens: False)
    (place,) = admission.enter([10])
    with pytest.raises(Overloaded, match="too long for its turn"):
        await place.wait()
    place.leave()
    assert admission.num_queued == admission.num_requests == 0


async def test_when_nobody_can_serve_all_who_wait_are_told() -> None:
    desk = Desk()
    places = desk.enter(10, 10)
    tasks = [asyncio.create_task(place.wait()) for place in places]
    await asyncio.sleep(0)
    desk.admission.refuse_all(NoWorkers("none", retry_after_s=1))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [NoWorkers, NoWorkers]


def test_a_long_prompt_counts_while_it_runs() -> None:
    desk = Desk(room=1)
    (long,) = desk.enter(100_000)
    desk.room = 0
    long.charged(100_000)
    desk.enter(1000)
    for second in range(11):
        desk.now = float(second)
        desk.admission.note_progress(100_000 - 5000 * second)
    assert desk.admission.expected_wait_s(1000) == pytest.approx(0.2, rel=0.01)  # no first token in all that time


def test_where_seats_are_what_lacks_the_wait_goes_by_how_fast_they_come_free() -> None:
    desk = Desk()
    running = desk.enter(*[10_000] * 9)
    desk.room = 1
    for place in running:
        desk.admission.pump()
        place.charged(10_000)
        place.leave(has_output=True)
    desk.room = 0
    desk.enter(*[100] * 6)
    desk.has_seat = False
    for second in range(8):  # all prompts were computed in the first of them; one request ends a second
        desk.now = float(second)
        desk.admission.note_progress(90_000 if second == 0 else 0)
        desk.admission.note_end(running[second], 50)
    assert desk.admission.expected_wait_s(100) == pytest.approx(6.0, rel=0.2)
    desk.has_seat = True
    desk.admission.note_progress(0)
    assert desk.admission.expected_wait_s(100) < 1.0


def test_cached_prompts_take_less_time() -> None:
    desk = Desk()
    desk.enter(*[100] * 60)
    desk.serve(40, seconds=0.25, cached=0.5)  # 200 uncached tokens a second, 400 in all
    assert desk.admission.expected_wait_s(100) == pytest.approx(5.0, rel=0.05)


def test_the_pace_counts_only_time_in_which_somebody_waited() -> None:
    desk = Desk()
    desk.enter(*[100] * 4)
    desk.serve(4, seconds=1.0)
    desk.now += 1000.0
    desk.enter(*[100] * 4)
    desk.serve(1, seconds=1.0)
    assert desk.admission.expected_wait_s(100) == pytest.approx(3.0, rel=0.3)


def test_where_seats_are_what_lacks_the_first_in_the_queue_is_judged_by_how_long_requests_run() -> None:
    """No pace is measured before somebody waits, and a refusal after the wait comes too late."""
    desk = limited(max_wait_s=6.0)
    desk.room = 1
    for _ in range(2):
        running = [*desk.enter(10), *desk.enter(10)]
        for place in running:
            place.charged(10)
            place.leave(has_output=True)
        desk.now += 20.0
        if not desk.order:
            for place in running:
                desk.admission.note_end(place, 50)
            desk.order += running
    desk.room, desk.has_seat = 0, False
    with pytest.raises(Overloaded, match=r"a wait of 10\.0 s is expected"):
        desk.enter(10)


async def test_a_request_that_waited_in_vain_makes_the_next_ones_hear_it_at_once_for_a_while() -> None:
    desk = limited(max_wait_s=6.0)
    desk.room = 1
    (place,) = desk.enter(10)
    place.charged(10)
    place.leave(has_output=True)
    desk.now += 3.0
    desk.admission.note_end(place, 50)
    (running,) = desk.enter(10)
    running.charged(10)
    desk.room, desk.has_seat = 0, False
    (waiting,) = desk.enter(10)
    desk.now += 7.0
    desk.room = 1
    desk.admission.pump()
    assert isinstance(waiting.refusal, Overloaded)
    waiting.leave()
    desk.room = 0
    with pytest.raises(Overloaded, match="a wait"):
        desk.enter(10)
    desk.now += 300.0
    desk.enter(10)


def test_where_no_worker_is_there_yet_nobody_is_refused_for_those_that_were() -> None:
    desk = Desk(room=1)
    for _ in range(3):
        (place,) = desk.enter(10)
        place.charged(10)
        place.leave(has_output=True)
        desk.now += 60.0
        desk.admission.note_end(place, 50)
    desk.room, desk.has_seat = 0, False
    assert len(desk.enter(*[10] * 20)) == 20
