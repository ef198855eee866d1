"""Networks that draft on the device: what the runner asks of them, and what it tells them of each target step.

The runner calls `advance` once after every step, on every rank, when the step's tokens are sampled and verified.
Per-token tensors run over all rows' tokens in the rows' order, as the target's forward pass had them.

    a row of the step       start            kept              num_tokens
                            |-- these stay --|-- rejected drafts --|
    positions               start .. start + kept - 1           (their KV is overwritten by the next step)
    following[kept - 1]     the token sampled after the last one that stays: the next draft comes after it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.actors.engine.batch import Admission, Row
from baton.kernels.attention import AttentionBackend
from baton.kernels.rope_store import TokenPlaces

# (logits [num_drafting_rows, vocab], index of the draft) -> ids [num_drafting_rows]. Chooses as the target will at that
# position: the row's temperature, filters, and the noise of its seed and position. So a draft model that agrees with
# the target's distribution also agrees with its sample, and drafts need no probabilities to be verified.
Choose = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TargetStep:
    """A verified step. `drafting` are the rows that sampled, in order: those to draft for."""

    rows: Sequence[Row]
    admissions: Sequence[Admission]  # whose first row this is: prompt and output so far
    kept: Sequence[int]  # of each row: how many of its leading positions stay; all of a prefill chunk's
    tokens: torch.Tensor  # [num_tokens] int64, the step's inputs
    following: torch.Tensor  # [num_tokens] int64, the token after each; noise behind `kept`
    places: TokenPlaces  # [num_tokens], of the target's KV; a module's own layers lie at the same places
    features: torch.Tensor  # [num_tokens, len(taps), hidden], of the target's dtype; valid during the call
    attention: Sequence[AttentionBackend]  # planned for the step; parallel to the target's `shapes`
    kv: torch.Tensor  # the whole cache: the module's layers are the last `num_layers` of dim 1
    num_drafts: int  # to propose after each drafting row; 0 = only keep the module's own KV up
    choose: Choose
    max_context: int = 1 << 40  # positions from here on do not exist

    @property
    def drafting(self) -> list[int]:
        """Indices of the rows to draft for."""
        return [i for i, row in enumerate(self.rows) if row.sample]

    @property
    def last(self) -> list[int]:
        """For each drafting row, the index of its last token that stays among the step's tokens."""
        indices: list[int] = []
        first = 0
        for row, kept in zip(self.rows, self.kept, strict=True):
            if row.sample:
                indices.append(first + kept - 1)
            first += row.num_tokens
        return indices


class DraftModule(Protocol):
    """Holds weights, and KV of its own only in `num_layers` layers of the block (or in tensors that it made itself).

    Layers of the block follow the target's rules: same dtype, KV heads and head_dim; what they hold for position i is
    a function of tokens 0..i+1 and of nothing else, so that it can be cached, shared and handed over with the block.
    (The last entry of a cached block may have seen another token i+1: texts may part at a block's end. One entry of a
    block is then a worse guess. The last block of a cached prefix is always recomputed, for its features. And what is
    decoded while nothing is drafted may be left out: its entries are whatever was there, guesses after it are worse.)
    """

    @property
    def num_layers(self) -> int:
        """KV layers in the block; 0 = none."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers (from 0) whose outputs, before any norm, are the features; empty = none are recorded."""
        ...

    @property
    def needs_every_step(self) -> bool:
        """Whether it must also see steps of decodes alone while nothing is drafted."""
        ...

    def advance(self, step: TargetStep) -> torch.Tensor:
        """Take in the step's tokens, then propose: ids [num_drafting_rows, step.num_drafts] int64; below 0 is none.

        Positions start .. start + kept - 1 of each row are to be brought up; an entry of the module's layers at
        position i may use features[i] and following[i]. Later drafts' KV goes to the positions after: `draft_pass`
        gives their rows. Collective calls must not depend on values that differ between ranks.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftPass:
    """Where the module's forward pass for one more draft stands: one token for each drafting row."""

    rows: list[Row]  # for `step_layout`: num_tokens = 1, and a table that covers `end`
    positions: list[int]
    slots: list[int]  # cache slots; -1 where the row has no room left: its drafts from here on are noise


def draft_pass(step: TargetStep, index: int, block_size: int) -> DraftPass:
    """Places of draft number `index` (from 0) when it is the module's input: right behind what stays."""
    result = DraftPass([], [], [])
    for i in step.drafting:
        row = step.rows[i]
        position = row.start + step.kept[i] + index
        has_room = position < min(len(row.blocks) * block_size, step.max_context)
        at = position if has_room else row.start + step.kept[i] - 1
        result.rows.append(Row(row.slot, at, 1, (0,), row.blocks, True))
        result.positions.append(at)
        result.slots.append(row.blocks[at // block_size] * block_size + at % block_size if has_room else -1)
    return result
