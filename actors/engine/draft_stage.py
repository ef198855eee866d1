# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Runs a draft module after each of the target's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from baton.actors.engine.batch import Batch, PendingStep, Row, StepOutput
from baton.actors.engine.drafters.module import Choose, DraftModule, TargetStep
from baton.actors.engine.drafters.taps import Taps
from baton.actors.engine.host_copy import HostCopy
from baton.actors.engine.sampler_state import SlotStates
from baton.kernels.attention import AttentionBackend
from baton.kernels.rope_store import TokenPlaces
from baton.kernels.sampling import probabilities, sample


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step computed, on the device. Each [num_tokens] int64."""

    tokens: torch.Tensor
    places: TokenPlaces


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the stage shares with the runner."""

    kv: torch.Tensor
    attention: Sequence[AttentionBackend]
    slots: SlotStates
    to_device: Callable[[Sequence[int]], torch.Tensor]
    max_context: int


class DraftStage:
    def __init__(self, module: DraftModule, taps: Taps | None = None, *, keeps_guesses: bool = False) -> None:
        """`keeps_guesses`: remember the distributions that drafts were drawn from."""
        self._module = module
        self._taps = taps
        self._guesses: dict[int, list[torch.Tensor]] | None = {} if keeps_guesses else None  # by slot: [vocab] each
        self._texts: dict[int, Sequence[int]] = {}  # by slot: what was known when its sequence entered

    @property
    def needs_every_step(self) -> bool:
        return self._module.needs_every_step

    def follow(self, batch: Batch, inputs: StepTokens, step: PendingStep, around: Surroundings) -> PendingStep:
        """Call the module. Waits for the step if it verified drafts: how many stay decides what is drafted next."""
        for admission in batch.admissions:
            self._texts[admission.slot] = admission.tokens
        kept = [row.num_tokens for row in batch.rows]
        if batch.has_drafts:
            output = step.wait()
            step = _Ended(output)
            kept = [_num_kept(row, len(tokens)) for row, tokens in zip(batch.rows, output.tokens, strict=True)]
        target = TargetStep(
            rows=batch.rows,
            admissions=batch.admissions,
            kept=kept,
            tokens=inputs.tokens,
            following=self._following(batch.rows, kept, inputs.tokens, around),
            places=inputs.places,
            features=self._features(inputs.tokens, around),
            attention=around.attention,
            kv=around.kv,
            num_drafts=batch.draft_next,
            choose=self._chooser(batch.rows, kept, around),
            max_context=around.max_context,
        )
        drafts = self._module.advance(target)
        if not batch.draft_next or not target.drafting:
            return step
        return _DraftedStep(step, HostCopy((drafts,)), _num_good(target, around.kv.shape[3]))

    def guesses(self, prefixes: Sequence[Row], like: torch.Tensor) -> torch.Tensor:
        """For each prefix of a row, what the draft behind it was drawn from: [num_prefixes, vocab] float32.

        One that came without (from a peer) counts as certain: it has not been chosen by what decides about it.
        """
        assert self._guesses is not None
        guesses = torch.zeros(like.shape, device=like.device)
        for i, (row, after) in enumerate(zip(prefixes, (*prefixes[1:], None), strict=True)):
            if after is None or after.num_drafts != row.num_drafts + 1 or after.slot != row.slot:
                continue  # the last of its row
            known = self._guesses.get(row.slot, [])
            if row.num_drafts < len(known):
                guesses[i] = known[row.num_drafts]
            else:
                guesses[i, after.tokens[-1]] = 1.0
        return guesses

    def _chooser(self, rows: Sequence[Row], kept: Sequence[int], around: Surroundings) -> Choose:
        drafting = [(row, row.start + num + 1) for row, num in zip(rows, kept, strict=True) if row.sample]
        own_rows = [row for row, _ in drafting]
        guesses = None if self._guesses is None else {row.slot: list[torch.Tensor]() for row in own_rows}
        if guesses is not None:
            self._guesses = guesses

        def choose(logits: torch.Tensor, index: int) -> torch.Tensor:
            slots = around.to_device([row.slot for row in own_rows])
            positions = around.to_device([position + index for _, position in drafting])
            params = around.slots.draws(own_rows, slots, positions)
            if guesses is not None:
                for row, guess in zip(own_rows, probabilities(logits, params).unbind(), strict=True):
                    guesses[row.slot].append(guess)
            return sample(logits, params).ids

        return choose

    def _features(self, tokens: torch.Tensor, around: Surroundings) -> torch.Tensor:
        return around.kv.new_empty(len(tokens), 0, 0) if self._taps is None else self._taps.features(len(tokens))

    def _following(
        self, rows: Sequence[Row], kept: Sequence[int], tokens: torch.Tensor, around: Surroundings
    ) -> torch.Tensor:
        """The token after each of the step's: the next one, what was sampled, or what the prompt goes on with."""
        following = tokens.roll(-1)
        sampled: list[tuple[int, int]] = []
        known: list[tuple[int, int]] = []
        first = 0
        for row, num in zip(rows, kept, strict=True):
            if row.sample:
                sampled.append((first + num - 1, row.slot))
            else:
                known.append((first + num - 1, self._texts[row.slot][row.end]))
            first += row.num_tokens
        if sampled:
            indices, slots = (around.to_device(values) for values in zip(*sampled, strict=True))
            following[indices] = around.slots.last_sampled.index_select(0, slots)
        if known:
            indices, ids = (around.to_device(values) for values in zip(*known, strict=True))
            following[indices] = ids
        return following


def _num_kept(row: Row, num_tokens: int) -> int:
    """Of a row that yielded `num_tokens`: positions that are no rejected drafts."""
    return num_tokens if row.num_drafts else row.num_tokens


def _num_good(target: TargetStep, block_size: int) -> dict[int, int]:
    """By the row's index: how many of its drafts had room for the KV of those before them."""
    good: dict[int, int] = {}
    for i in target.drafting:
        row = target.rows[i]
        good[i] = 1 + max(0, min(len(row.blocks) * block_size, target.max_context) - row.start - target.kept[i])
    return good


@dataclass(frozen=True, slots=True)
class _Ended:
    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class _DraftedStep:
    step: PendingStep
    drafts: HostCopy  # [num_drafting_rows, num_drafts]
    num_good: dict[int, int]  # by the drafting row's index

    def wait(self) -> StepOutput:
        output = self.step.wait()
        ids: list[list[int]] = self.drafts.wait()[0].tolist()
        good = zip(self.num_good.items(), ids, strict=True)
        return replace(output, drafts={row: _leading(drafts[:num]) for (row, num), drafts in good})


def _leading(drafts: list[int]) -> tuple[int, ...]:
    """The drafts before the first that is none."""
    return tuple(drafts[: next((i for i, draft in enumerate(drafts) if draft < 0), len(drafts))])
