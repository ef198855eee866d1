"""How many of the proposed tokens a step verifies: as many as raise the expected tokens per millisecond.

With E tokens expected of a step of T ms, one more draft that counts with probability p and costs c ms pays if
(E + p) / (T + c) > E / T, that is if p * T > c * E. A draft counts only if all before it do, so a sequence's drafts
pay less and less; taking the best of all sequences first, until one does not pay, gives the best total.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from baton.actors.engine.sequence import Sequence

PROBE_STEPS = 64  # when drafts do not pay, one sequence drafts so often; when they do, nobody does so often
PRIOR = 0.7  # acceptance before anything is known: high enough to find out
PRIOR_WEIGHT = 4.0  # of all sequences' acceptance in a sequence's own, in verified drafts
FORGETTING = 0.9  # of a sequence's own acceptance, with each of its drafted rows
LEARNING = 0.05  # weight of one draft in all sequences' acceptance, once there were some; the first few weigh more
MOST_SURE = 0.99

Drafts = dict[Sequence, Items[int]]


class DecodeCost(Protocol):
    """What a step costs, in ms."""

    @property
    def constant_ms(self) -> float: ...
    @property
    def decode_ms(self) -> float: ...  # for each decoding sequence
    @property
    def decode_token_ms(self) -> float: ...  # for each of their KV tokens
    @property
    def draft_ms(self) -> float: ...  # for each drafted token, the drafter's own work included


class Lengths(Protocol):
    @property
    def is_on(self) -> bool:
        """Whether the step after the one that is being planned wants drafts."""
        ...

    def begin_step(self) -> bool:
        """Whether this step wants drafts. Called once a step."""
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

    def begin_step(self) -> bool:
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


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft is accepted if all before it are: by its position, and by its sequence's record."""

    rates: list[float]
    _num_tried: list[int] = field(init=False)
    _records: dict[Sequence, _Record] = field(default_factory=dict[Sequence, _Record])

    def __post_init__(self) -> None:
        self._num_tried = [0] * len(self.rates)

    def chance(self, sequence: Sequence, position: int) -> float:
        record = self._records.get(sequence)
        if record is None:
            return min(self.rates[position], MOST_SURE)
        accepted = record.num_accepted + PRIOR_WEIGHT * self.rates[position]
        return min(accepted / (record.num_tried + PRIOR_WEIGHT), MOST_SURE)

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
        self._num_on = 0  # steps with drafts since the last one without
        self._num_probes = 0

    @property
    def is_on(self) -> bool:
        return self._num_skipped == 0

    def begin_step(self) -> bool:
        if self._num_skipped:
            self._num_skipped -= 1
            return False
        return True

    def cut(self, drafts: Drafts, decodes: list[Sequence], limit: int) -> Drafts:
        if not drafts:
            self._num_skipped = self._quiet_steps
            return {}
        if self._num_on >= PROBE_STEPS:  # what a step costs without drafts must stay known
            self._num_on = 0
            return {}
        kept = self._paying(drafts, decodes, limit)
        self._num_on += 1
        if kept:
            return kept
        self._num_on = 0
        self._num_skipped = PROBE_STEPS
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
        expected, time_ms, draft_ms = float(len(decodes)), 0.0, 0.0
        if self._cost is not None:
            context = sum(sequence.num_scheduled for sequence in decodes)
            time_ms = (
                self._cost.constant_ms + self._cost.decode_ms * len(decodes) + self._cost.decode_token_ms * context
            )
            draft_ms = self._cost.draft_ms
        lengths: dict[Sequence, int] = {}
        for chance, sequence in self._ranked(drafts)[: max(0, limit)]:
            if draft_ms > 0 and chance * time_ms <= draft_ms * expected:
                break
            lengths[sequence] = lengths.get(sequence, 0) + 1
            expected += chance
            time_ms += draft_ms
        return {sequence: drafts[sequence][:length] for sequence, length in lengths.items()}

    def _ranked(self, drafts: Drafts) -> list[tuple[float, Sequence]]:
        """Every draft as the chance that it counts and its sequence, the best first; a sequence's own in order."""
        ranked: list[tuple[float, Sequence]] = []
        for sequence, tokens in drafts.items():
            reach = 1.0
            for position in range(len(tokens)):
                reach *= self.acceptance.chance(sequence, position)
                ranked.append((reach, sequence))
        ranked.sort(key=lambda draft: draft[0], reverse=True)  # stable: equals keep their order
        return ranked
