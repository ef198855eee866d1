from __future__ import annotations

import pytest

from baton.router.admission import Admission
from baton.router.errors import Overloaded


def test_beyond_the_limit_of_requests_it_refuses_with_a_time_to_come_back() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    places = admission.enter([1, 1])
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2") as caught:
        admission.enter([1])
    assert caught.value.retry_after_s == 1
    places[0].leave()
    admission.enter([1])


def test_queued_tokens_are_limited_too() -> None:
    admission = Admission(max_requests=10, max_tokens=100)
    admission.enter([60])
    with pytest.raises(Overloaded, match="60 prompt tokens are waiting, the limit is 100"):
        admission.enter([41])
    admission.enter([40])


def test_an_empty_queue_takes_a_call_of_any_size() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    assert len(admission.enter([5000] * 4)) == 4


def test_leaving_twice_counts_once() -> None:
    admission = Admission(max_requests=10, max_tokens=100)
    place, other = admission.enter([10, 20])
    place.leave()
    place.leave()
    assert (admission.num_requests, admission.num_tokens) == (1, 20)
    other.leave()
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_the_time_to_come_back_follows_the_waiting_time_within_bounds() -> None:
    admission = Admission(max_requests=1, max_tokens=1)
    admission.enter([1])
    for seconds, expected in ((9.0, 9), (1e6, 60), (0.0, 1)):
        for _ in range(400):
            admission.note_wait(seconds)
        with pytest.raises(Overloaded) as caught:
            admission.enter([1])
        assert caught.value.retry_after_s == expected


def test_the_sequences_of_a_call_enter_all_or_none() -> None:
    admission = Admission(max_requests=3, max_tokens=100)
    admission.enter([1])
    with pytest.raises(Overloaded):
        admission.enter([1, 1, 1])
    assert admission.num_requests == 1
    assert len(admission.enter([1, 1])) == 2
