"""What steps of decodes take is learned by size, with drafts and without."""

from __future__ import annotations

import numpy as np
import pytest

from baton.actors.decode_times import DecodeTimes
from baton.actors.engine.batch import Batch, Row
from baton.actors.step_cost import StepCost, StepShape
from baton.actors.step_meter import StepMeter

LINE = StepCost(constant_ms=4.0, decode_ms=0.01, decode_token_ms=0.0, draft_ms=0.0)


def true_ms(num_rows: int) -> float:
    """Flat while the weights are what takes time, then as the rows."""
    return max(4.0, 0.03 * num_rows)


def times(num_decodes: int, *num_drafts: int) -> list[float]:
    learned = DecodeTimes()
    for _ in range(3):
        for drafts in (0, 64, 192, 448):
            shape = StepShape(num_decodes=64, num_drafts=drafts)
            learned.add(shape, LINE, true_ms(64 + drafts), is_overlapped=drafts == 0)
    return learned.steps_ms(num_decodes, 0, np.array(num_drafts)).tolist()


def test_sizes_that_were_seen_are_known_and_others_are_as_the_line_says() -> None:
    assert times(64, 0, 64, 192, 448) == pytest.approx([4.0, 4.0, 7.68, 15.36], rel=0.03)
    assert times(4, 0, 4) == pytest.approx([4.04, 4.04], rel=0.01)


def test_what_lies_beside_one_that_was_seen_is_taken_to_be_like_it() -> None:
    assert times(64, 160, 380) == pytest.approx([6.72, 13.3], rel=0.2)


def test_when_the_line_moves_what_was_seen_stays() -> None:
    learned, plain = DecodeTimes(), StepShape(num_decodes=64)
    for _ in range(10):
        learned.add(plain, LINE, 5.0, is_overlapped=True)
    learned.add(plain._replace(num_drafts=100), StepCost(constant_ms=9.0, draft_ms=0.1), 20.0, is_overlapped=False)
    assert learned.steps_ms(64, 0, np.array([0]))[0] == pytest.approx(5.0, rel=0.05)


def test_a_step_that_did_not_overlap_says_nothing_about_plain_ones() -> None:
    learned = DecodeTimes()
    plain, none = StepShape(num_decodes=8), np.array([0])
    learned.add(plain, LINE, 9.0, is_overlapped=False)
    assert learned.steps_ms(8, 0, none)[0] == pytest.approx(9.0, rel=0.05)  # nothing has overlapped yet: so it is
    for _ in range(30):
        learned.add(plain, LINE, 5.0, is_overlapped=True)
    learned.add(plain, LINE, 9.0, is_overlapped=False)
    assert learned.steps_ms(8, 0, none)[0] == pytest.approx(5.0, rel=0.01)
    learned.add(plain._replace(prefill_tokens=500), LINE, 50.0, is_overlapped=True)
    assert learned.steps_ms(8, 0, none)[0] == pytest.approx(5.0, rel=0.01)


def test_what_was_seen_long_ago_is_tried_again() -> None:
    learned, one = DecodeTimes(), StepShape(num_decodes=1)
    learned.add(one._replace(num_drafts=7), LINE, 40.0, is_overlapped=False)
    for _ in range(30_000):
        learned.add(one, LINE, 4.01, is_overlapped=True)
    assert learned.steps_ms(1, 0, np.array([7]))[0] < 4.3


def test_the_meter_times_steps_from_the_last_ones_end_unless_the_engine_was_idle() -> None:
    meter, now = StepMeter(), 100.0
    for i in range(40):  # every second step goes on with a sequence, after what the host needs before a launch
        slot, pause_s = i // 2, 0.020 if i % 2 else 10.0
        meter.launched(Batch((Row(slot, 5, 1, (1,), (0,), True),)), now + pause_s)
        now += pause_s + 0.006
        meter.ended(0, now)
    assert meter.decodes is not None
    assert meter.decodes.steps_ms(1, 5, np.array([0]))[0] == pytest.approx(26.0, rel=0.05)
