"""How many of the proposed tokens a step verifies: as many as give the most expected tokens per millisecond.

A draft counts only if all before it do, so a sequence's drafts pay less and less. The best m of all sequences' drafts
add up to an expected number of tokens, a step that verifies m takes a time, and m is chosen where their ratio is best:
the time is no straight line, since a GPU runs captured sizes, and drafting itself forbids overlap.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.actors.engine.sequence import Sequence

ON_STEPS = 128  # when drafts pay, after so many steps come
PLAIN_STEPS = 3  # so many without: what those cost must stay known, and the first of them does not overlap
PROBE_STEPS = 64  # when drafts do not pay, one sequence drafts after so many steps, then after twice as many ...
MAX_PROBE_STEPS = 1024
PRIOR = 0.7  # acceptance before anything is known: high enough to find out
PRIOR_WEIGHT = 4.0  # of all sequences' acceptance in a sequence's own, in verified drafts
FORGETTING = 0.9  # of a sequence's own acceptance, with each of its drafted rows
LEARNING = 0.05  # weight of one draft in all sequences' acceptance, once there were some; the first few weigh more
MOST_SURE = 0.99

Drafts = dict[Sequence, Items[int]]
Floats = NDArray[np.float64]


class DecodeCost(Protocol):
    def steps_ms(self, num_decodes: int, context: int, num_drafts: NDArray[np.int64]) -> Floats:
        """How long steps take in which so many sequences decode, with `context` KV tokens in all, for each number of
        drafts verified beside; the drafter's own work included."""
        ...


class Lengths(Protocol):
    @property
    def is_on(self) -> bool:
        """Whether the step after the one that is being planned wants drafts."""
        ...

    def begin_step(self, num_decodes: int) -> bool:
        """Whether this step wants drafts. Called once for each step in which sequences decode."""
        ...

    def cut(self, drafts: Drafts, decodes: list[Sequence], limit: int) -> Drafts:
        """Keep the leading drafts that are to be verified, at most `limit` in all; `decodes` all run in the step."""
        ...

    def learn(self, sequence: Sequence, num_verified: int, num_accepted: int) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...

    def note_cost(self, cost: DecodeCost | None) -> None:
        """What steps cost, as far as it is known."""
        ...


class FixedLengths:
    """All that is proposed: for tests and measurements."""

    is_on = True

    def begin_step(self, num_decodes: int) -> bool:
        return True

    def cut(self, drafts: Drafts, decodes: list[Sequence], limit: int) -> Drafts:
        kept: Drafts = {}
        for sequence, tokens in drafts.items():
            if limit > 0:
                kept[sequence] = tokens[:limit]
                limit -= len(tokens)
        return kept

    def learn(self, sequence: Sequence, num_verified: int, num_accepted: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def note_cost(self, cost: DecodeCost | None) -> None:
        pass


@dataclass(slots=True)
class _Record:
    """How a sequence's drafts fared lately; old ones fade."""

    num_tried: float = 0.0
    num_accepted: float = 0.0


_UNKNOWN = _Record()


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft is accepted if all before it are: by its position, and by its sequence's record."""

    rates: list[float]
    _num_tried: list[int] = field(init=False)
    _records: dict[Sequence, _Record] = field(default_factory=dict[Sequence, _Record])

    def __post_init__(self) -> None:
        self._num_tried = [0] * len(self.rates)

    def reach(self, drafts: Drafts) -> Floats:
        """The chance that each draft counts: [num_sequences, longest]; 0 where a sequence has none."""
        lengths = np.array([len(tokens) for tokens in drafts.values()])
        records = [self._records.get(sequence, _UNKNOWN) for sequence in drafts]
        tried = np.array([[record.num_tried] for record in records])
        accepted = np.array([[record.num_accepted] for record in records])
        rates = np.array(self.rates[: int(lengths.max())])
        chances = np.minimum((accepted + PRIOR_WEIGHT * rates) / (tried + PRIOR_WEIGHT), MOST_SURE)
        return chances.cumprod(axis=1) * (np.arange(len(rates)) < lengths[:, None])

    def learn(self, sequence: Sequence, num_verified: int, num_accepted: int) -> None:
        num_tried = min(num_verified, num_accepted + 1)  # what comes after the first wrong one says nothing
        for position in range(num_tried):
            self._num_tried[position] += 1
            weight = max(LEARNING, 1 / (self._num_tried[position] + 1))
            self.rates[position] += weight * ((position < num_accepted) - self.rates[position])
        record = self._records.setdefault(sequence, _Record())
        record.num_tried = FORGETTING * record.num_tried + num_tried
        record.num_accepted = FORGETTING * record.num_accepted + num_accepted

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence, None)


class CostLengths:
    def __init__(self, max_draft_tokens: int, *, quiet_steps: int) -> None:
        """`quiet_steps`: how long to leave steps alone after one for which nobody had a proposal."""
        self.acceptance = Acceptance([PRIOR] * max_draft_tokens)
        self._cost: DecodeCost | None = None
        self._quiet_steps = quiet_steps
        self._num_skipped = 0  # steps to come without drafts
        self._num_on = 0  # steps with drafts since the last ones without
        self._num_probes = 0
        self._probe_steps = PROBE_STEPS
        self._num_decodes = 1  # in the step that drafts were last considered for
        self._num_plain = 0  # sequences in the last steps without drafts that were taken to see their time

    @property
    def is_on(self) -> bool:
        return self._num_skipped == 0

    def begin_step(self, num_decodes: int) -> bool:
        if not self._num_skipped:
            return True
        self._num_skipped -= 1
        if not _are_near(self._num_decodes, num_decodes):  # what did not pay then may pay now
            self._num_skipped = 0
            self._probe_steps = PROBE_STEPS
        return False

    def cut(self, drafts: Drafts, decodes: list[Sequence], limit: int) -> Drafts:
        if not drafts:
            self._num_skipped = self._quiet_steps
            return {}
        self._num_decodes = len(decodes)
        is_plain_known = self._cost is None or _are_near(self._num_plain, len(decodes))
        if self._num_on >= ON_STEPS or not is_plain_known:
            self._num_plain = len(decodes)
            self._num_on = 0
            self._num_skipped = PLAIN_STEPS - 1
            return {}
        kept = self._paying(drafts, decodes, limit)
        if kept:
            self._num_on += 1
            self._probe_steps = PROBE_STEPS
            return kept
        self._num_on = 0
        self._num_skipped = self._probe_steps
        self._probe_steps = min(2 * self._probe_steps, MAX_PROBE_STEPS)
        return self._probe(drafts, limit)

    def learn(self, sequence: Sequence, num_verified: int, num_accepted: int) -> None:
        self.acceptance.learn(sequence, num_verified, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        self.acceptance.forget(sequence)

    def note_cost(self, cost: DecodeCost | None) -> None:
        self._cost = cost

    def _probe(self, drafts: Drafts, limit: int) -> Drafts:
        """One sequence's drafts, another's each time: what is accepted and what it costs may have changed."""
        self._num_probes += 1
        sequence = list(drafts)[self._num_probes % len(drafts)]
        return {sequence: drafts[sequence][:limit]} if limit > 0 else {}

    def _paying(self, drafts: Drafts, decodes: list[Sequence], limit: int) -> Drafts:
        reach = self.acceptance.reach(drafts)
        best = np.argsort(-reach, axis=None, kind="stable")[: max(0, limit)]  # a sequence's own stay in order
        chances = reach.ravel()[best]
        num = int(np.count_nonzero(chances))
        if self._cost is not None:
            expected = len(decodes) + np.concatenate(([0.0], chances.cumsum()))
            context = sum(sequence.num_scheduled for sequence in decodes)
            times = self._cost.steps_ms(len(decodes), context, np.arange(len(expected)))
            num = int(np.argmax(expected / times))
        lengths = np.bincount(best[:num] // reach.shape[1], minlength=len(drafts)).tolist()
        chosen = zip(drafts.items(), lengths, strict=True)
        return {sequence: tokens[:length] for (sequence, tokens), length in chosen if length}


def _are_near(a: int, b: int) -> bool:
    """As numbers of sequences in a step, whose time they decide."""
    return a / 2 < b < 2 * a
