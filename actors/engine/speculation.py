"""What speculation does to the engine's steps: which drafts a step verifies, and what is left of them afterwards.

A drafting sequence knows all its tokens, so the step before must have been waited for. Steps in which nobody drafts
overlap as ever: `needs_result` tells when the next one wants drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from baton.actors.engine.batch import Row, StepOutput
from baton.actors.engine.draft_length import DecodeCost, Lengths
from baton.actors.engine.drafters.drafter import Drafter
from baton.actors.engine.sequence import Sequence, Status

Drafts = dict[Sequence, Items[int]]


@dataclass(slots=True)
class DraftCounts:
    """Totals since the start, by a draft's position in its row. Written by the engine's thread."""

    verified: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])

    def add(self, num_verified: int, num_accepted: int) -> None:
        missing = num_verified - len(self.verified)
        self.verified += [0] * missing
        self.accepted += [0] * missing
        for position in range(num_verified):
            self.verified[position] += 1
            self.accepted[position] += position < num_accepted


class Speculation(Protocol):
    """Owned by the engine's thread."""

    num_ahead: int  # positions behind a step's last draft for which the draft module wants blocks too
    counts: DraftCounts
    num_recomputed: int  # cached blocks at the end of a matched prefix that are computed anew all the same

    @property
    def draft_next(self) -> int:
        """How many tokens a draft module is to propose with the step that is being planned."""
        ...

    @property
    def needs_result(self) -> bool:
        """Whether the step that was planned last must be waited for before the next one is planned."""
        ...

    def draft(self, decodes: list[Sequence], limit: int) -> Drafts:
        """Propose tokens to verify in this step, at most `limit` in all; none for most, perhaps."""
        ...

    def settle(self, rows: tuple[Row, ...], sequences: list[Sequence], output: StepOutput) -> tuple[Row, ...]:
        """Learn from a step that has ended. Returns its rows without the drafts that were rejected."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...

    def note_cost(self, cost: DecodeCost | None) -> None:
        """What steps cost, as far as it is known."""
        ...


class NoSpeculation:
    """One token a step."""

    num_ahead = num_recomputed = draft_next = 0
    needs_result = False

    def __init__(self) -> None:
        self.counts = DraftCounts()

    def draft(self, decodes: list[Sequence], limit: int) -> Drafts:
        return {}

    def settle(self, rows: tuple[Row, ...], sequences: list[Sequence], output: StepOutput) -> tuple[Row, ...]:
        return rows

    def forget(self, sequence: Sequence) -> None:
        pass

    def note_cost(self, cost: DecodeCost | None) -> None:
        pass


class DraftSpeculation:
    def __init__(
        self,
        drafter: Drafter,
        lengths: Lengths,
        max_draft_tokens: int,
        *,
        module_layers: int | None = None,
    ) -> None:
        """`module_layers`: KV layers of the runner's draft module; None = it has no such module."""
        self.num_ahead = max_draft_tokens if module_layers is not None else 0
        self.num_recomputed = 1 if module_layers else 0
        self.counts = DraftCounts()
        self._drafter = drafter
        self._lengths = lengths
        self._most = max_draft_tokens
        self._has_module = module_layers is not None
        self._is_drafted = False  # the step that was planned last
        self._has_decodes = False  # likewise

    @property
    def draft_next(self) -> int:
        return self._most if self._has_module and self._lengths.is_on else 0

    @property
    def needs_result(self) -> bool:
        return self._is_drafted or (self._has_decodes and self._lengths.is_on)

    def draft(self, decodes: list[Sequence], limit: int) -> Drafts:
        drafts: Drafts = {}
        self._has_decodes = bool(decodes)
        if decodes and self._lengths.begin_step(len(decodes)):
            known = [sequence for sequence in decodes if not sequence.num_pending]
            for sequence in known:
                num = min(self._most, sequence.stops.max_len - len(sequence.tokens) - 1)
                if num > 0 and (tokens := self._drafter.propose(sequence, num)):
                    drafts[sequence] = tokens
            if known:
                drafts = self._lengths.cut(drafts, decodes, limit)
        self._is_drafted = bool(drafts)
        return drafts

    def settle(self, rows: tuple[Row, ...], sequences: list[Sequence], output: StepOutput) -> tuple[Row, ...]:
        if not self._has_module and not any(row.num_drafts for row in rows):
            return rows
        settled: list[Row] = []
        for index, (row, sequence, tokens) in enumerate(zip(rows, sequences, output.tokens, strict=True)):
            sequence.drafts = output.drafts.get(index, ())
            settled.append(self._settled(row, sequence, len(tokens)) if row.num_drafts else row)
        return tuple(settled)

    def _settled(self, row: Row, sequence: Sequence, num_tokens: int) -> Row:
        self.counts.add(row.num_drafts, num_tokens - 1)
        self._lengths.learn(sequence, row.num_drafts, num_tokens - 1)
        if sequence.status is Status.DECODING:
            sequence.num_scheduled = row.start + num_tokens
        return Row(row.slot, row.start, num_tokens, row.tokens[:num_tokens], row.blocks, True)

    def forget(self, sequence: Sequence) -> None:
        self._drafter.forget(sequence)
        self._lengths.forget(sequence)

    def note_cost(self, cost: DecodeCost | None) -> None:
        self._lengths.note_cost(cost)
