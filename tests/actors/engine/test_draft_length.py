"""Lengths by cost: drafts are verified where they raise the tokens per millisecond, and nowhere else."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.actors.engine.draft_length import (
    MAX_PROBE_STEPS,
    ON_STEPS,
    PLAIN_STEPS,
    PROBE_STEPS,
    Acceptance,
    CostLengths,
    Drafts,
)
from baton.actors.engine.sequence import Rank, Sequence
from baton.actors.engine.stopping import StopRules
from tests.actors.engine.rig import make_request

K = 4
DRAFTS = (1, 2, 3, 4)


@dataclass
class Cost:
    constant_ms: float = 10.0
    decode_ms: float = 0.1
    draft_ms: float = 0.1

    def steps_ms(self, num_decodes: int, context: int, num_drafts: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.constant_ms + self.decode_ms * num_decodes + self.draft_ms * num_drafts.astype(np.float64)


def sequences(num: int) -> list[Sequence]:
    request = make_request("a", 5)
    stops = StopRules.of(request, frozenset(), 1000)
    return [Sequence(request, Rank(0, i), stops) for i in range(num)]


def taught(rate: float, cost: Cost | None, num: int = 0) -> CostLengths:
    """Lengths that have seen each draft accepted with this chance, and plain steps of `num` sequences."""
    lengths = CostLengths(K, quiet_steps=0)
    lengths._num_plain = num
    lengths.acceptance.rates[:] = [rate] * K
    lengths.note_cost(cost)
    return lengths


def cut(lengths: CostLengths, seqs: list[Sequence], limit: int = 1000) -> list[int]:
    drafts: Drafts = {seq: DRAFTS for seq in seqs} if lengths.begin_step(len(seqs)) else {}
    kept = lengths.cut(drafts, seqs, limit) if drafts else {}
    return [len(kept.get(seq, ())) for seq in seqs]


def chance(acceptance: Acceptance, sequence: Sequence) -> float:
    """That its next draft is accepted."""
    return acceptance.reach({sequence: DRAFTS})[0, 0]


def test_before_costs_are_known_everything_is_tried() -> None:
    seqs = sequences(3)
    assert cut(taught(0.5, None), seqs) == [4, 4, 4]
    assert cut(taught(0.5, None), seqs, limit=5) in ([2, 2, 1], [2, 1, 2], [1, 2, 2])


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("draft_ms", [0.05, 0.5, 2.0, 9.0])
@pytest.mark.parametrize("num", [1, 8])
def test_the_length_is_the_best_of_all(rate: float, draft_ms: float, num: int) -> None:
    """Compared with every equal length: expected tokens over time."""
    seqs, cost = sequences(num), Cost(draft_ms=draft_ms)
    lengths = taught(rate, cost)
    kept = [len(lengths._paying({seq: DRAFTS for seq in seqs}, seqs, 1000).get(seq, ())) for seq in seqs]

    def rate_of(chosen: list[int]) -> float:
        tokens = sum(1 + sum(rate**j for j in range(1, d + 1)) for d in chosen)
        return tokens / (cost.constant_ms + cost.decode_ms * num + draft_ms * sum(chosen))

    best = max(rate_of([d] * num) for d in range(K + 1))
    assert rate_of(kept) >= best - 1e-9


def test_who_is_right_more_often_drafts_more() -> None:
    good, bad = seqs = sequences(2)
    lengths = taught(0.6, Cost(draft_ms=3.0), 2)
    for _ in range(20):
        lengths.learn(good, 4, 4)
        lengths.learn(bad, 4, 0)
    long, short = cut(lengths, seqs)
    assert long == 4 and short == 0
    assert chance(lengths.acceptance, good) > 0.9 and chance(lengths.acceptance, bad) < 0.2


def test_what_does_not_pay_is_off_but_for_a_probe_of_one_sequence_ever_more_rarely() -> None:
    seqs = sequences(8)
    lengths = taught(0.1, Cost(draft_ms=5.0), 8)
    num_drafts = [cut(lengths, seqs) for _ in range(3000)]
    probes = [i for i, chosen in enumerate(num_drafts) if any(chosen)]
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(probes)]
    assert pauses == [PROBE_STEPS, 2 * PROBE_STEPS, 4 * PROBE_STEPS, 8 * PROBE_STEPS, MAX_PROBE_STEPS]
    assert all(sorted(num_drafts[i]) == [0] * 7 + [4] for i in probes)
    assert len({num_drafts[i].index(4) for i in probes}) == len(probes)  # another one each time


def test_a_batch_of_another_size_is_probed_at_once() -> None:
    lengths = taught(0.5, Cost(constant_ms=8.0, draft_ms=1.0), 64)
    assert sum(cut(lengths, sequences(64))) == 4  # a probe: as many as these pay for none of it
    assert not any(cut(lengths, sequences(40)))
    for _ in range(1 + PLAIN_STEPS):  # what such steps take without drafts is seen first
        assert not any(cut(lengths, sequences(2)))
    assert cut(lengths, sequences(2)) == [1, 1]


def test_what_a_captured_size_has_room_for_costs_nothing() -> None:
    """A staircase: single steps do not pay, the whole landing does."""

    class Stairs(Cost):
        def steps_ms(self, num_decodes: int, context: int, num_drafts: NDArray[np.int64]) -> NDArray[np.float64]:
            return 10.0 + 6.0 * -(-num_drafts // 4)

    assert cut(taught(0.8, Stairs(), 1), sequences(1)) == [4]
    assert cut(taught(0.2, Stairs(), 2), sequences(2)) in ([4, 0], [0, 4])  # as a probe


def test_a_probe_that_fares_well_brings_drafts_back() -> None:
    seqs = sequences(2)
    lengths = taught(0.05, Cost(draft_ms=2.0), 2)
    cut(lengths, seqs)
    assert not lengths.is_on
    for _ in range(PROBE_STEPS):
        assert cut(lengths, seqs) == [0, 0]
    assert lengths.is_on  # the step to come wants drafts, and must know the step before
    lengths.note_cost(Cost(draft_ms=0.01))
    assert cut(lengths, seqs) != [0, 0]


def test_while_drafts_pay_a_step_without_any_comes_now_and_then() -> None:
    """Else nobody would know what a plain step costs, at first or any more."""
    seqs = sequences(1)
    lengths = taught(0.9, Cost())
    chosen = [cut(lengths, seqs)[0] for _ in range(2 * (ON_STEPS + PLAIN_STEPS))]
    assert [i for i, num in enumerate(chosen) if num == 0] == [
        turn * (ON_STEPS + PLAIN_STEPS) + i for turn in range(2) for i in range(PLAIN_STEPS)
    ]


def test_what_follows_a_wrong_draft_says_nothing_about_its_own_place() -> None:
    acceptance = Acceptance([0.5] * K)
    [seq] = sequences(1)
    for _ in range(200):
        acceptance.learn(seq, 4, 1)
    assert acceptance.rates[0] > 0.99 and acceptance.rates[1] < 0.01 and acceptance.rates[2:] == [0.5, 0.5]
    acceptance.forget(seq)
    assert not acceptance._records
