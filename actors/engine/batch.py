"""One step's decision and its result: the engine's narrow waist between scheduler and runner.

Frozen. Knows token ids and block numbers; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.actors.engine.prompt_record import PromptPart
from baton.actors.engine.request import Request, TokenLogprobs


class Row(msgspec.Struct, frozen=True, gc=False):  # a tenth of a dataclass's cost, and there are hundreds a step
    """One sequence's part of a step.

         0            start                    start + num_tokens
         |--- KV there --|--- this step's queries ---|
                         tokens (known ids)   [+ 1 id that only the device knows]

    When `len(tokens) < num_tokens` the one missing id is the token sampled for this slot by the step before, which
    is still on the device (overlap scheduling). `blocks` is the sequence's live table, valid until the step has been
    waited for: later steps append to it, nothing in it changes.
    """

    slot: int
    start: int
    num_tokens: int
    tokens: Sequence[int]
    blocks: Sequence[int]  # block table, covers at least start + num_tokens positions
    sample: bool  # sample a token after the last position
    num_drafts: int = 0  # the last of `tokens` are guesses: sample after each of them, and after the one before them

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def drafts(self) -> Sequence[int]:
        return self.tokens[len(self.tokens) - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that enters `slot` with this step: its sampling state is built from `request` and `tokens`."""

    slot: int
    request: Request
    tokens: Sequence[int]  # prompt and output so far: the penalties' history


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in order: decodes (num_tokens == 1 and sample) first, then those with drafts, then prefill chunks."""

    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    draft_next: int = 0  # tokens that the runner's draft module is to propose after each row that samples

    @property
    def has_drafts(self) -> bool:
        return any(row.num_drafts for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`tokens[i]` are the 0..k+1 tokens that row i of the batch yielded; empty for a chunk that samples nothing.

    `logprobs[i]` runs parallel to `tokens[i]`, or is None where the request wants none. `prompts` tells of the rows
    whose requests ask about their prompts, by the row's index. `drafts` are what a draft module proposes to follow the
    row's tokens, likewise.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]
    prompts: Mapping[int, PromptPart] = field(default_factory=dict[int, PromptPart])
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


class PendingStep(Protocol):
    """A launched step. `wait` blocks until the sampled ids are on the host, and may be called once."""

    def wait(self) -> StepOutput: ...


class Runner(Protocol):
    """Runs batches in launch order on one device. `launch` returns as soon as the work is queued."""

    def launch(self, batch: Batch) -> PendingStep: ...
