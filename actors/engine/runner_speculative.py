"""A runner that verifies drafts, and lets a draft module propose the next ones.

A row with drafts is sampled as if each of its prefixes were a row: the same noise, filters, penalties, masks and
log-probabilities as one token a step would see. Stands before any TorchRunner in a class's bases.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.actors.engine.batch import Batch, PendingStep, Row, StepOutput
from baton.actors.engine.draft_stage import DraftStage, StepTokens, Surroundings
from baton.actors.engine.host_copy import HostCopy
from baton.actors.engine.request import TokenLogprobs
from baton.actors.engine.runner import SampledStep, TorchRunner
from baton.actors.engine.runner_graph import GraphRunner
from baton.actors.engine.runner_prompt import PendingParts
from baton.actors.engine.step_fields import UNKNOWN, step_layout
from baton.kernels.rope_store import TokenPlaces
from baton.kernels.sampling import SamplingTensors, probabilities, sample
from baton.kernels.verify_chain import NO_DRAFT, REJECTED, Verified, verify_chains
from baton.kernels.verify_rejection import Chance, verify_by_rejection


class SpeculativeRunner(TorchRunner):
    max_context = 1 << 40  # set these two before the first launch
    stage: DraftStage | None = None  # None = what is drafted comes with the batch
    by_rejection = False  # else by the target's own sample

    def _finish(self, batch: Batch, hidden: torch.Tensor, prompts: PendingParts | None) -> PendingStep:
        inputs = self._step_tokens(batch) if self._is_followed(batch) else None
        if batch.has_drafts:
            sampled = self._to_device(_sampled_tokens(batch.rows))
            step: PendingStep = self._verify(batch.rows, self._model.logits(hidden.index_select(0, sampled)), prompts)
        else:
            step = super()._finish(batch, hidden, prompts)
        return self._follow(batch, inputs, step)

    def _is_followed(self, batch: Batch) -> bool:
        """Whether there is a draft module that has to see the step."""
        if self.stage is None:
            return False
        return bool(batch.draft_next) or self.stage.needs_every_step or not is_all_decodes(batch.rows)

    def _follow(self, batch: Batch, inputs: StepTokens | None, step: PendingStep) -> PendingStep:
        """Let the draft module look at the step that is queued, if `inputs` say that it has to."""
        if self.stage is None or inputs is None:
            return step
        around = Surroundings(self._kv, self._attention, self._slots, self._to_device, self.max_context)
        return self.stage.follow(batch, inputs, step, around)

    def _step_tokens(self, batch: Batch) -> StepTokens:
        """Must come before this step's ids are noted: an unknown token is what its slot sampled last."""
        fields = self._fields(batch.rows, batch.num_tokens).to(self._kv.device, non_blocking=True)
        tokens, positions, cache_slots, slots = fields
        tokens = torch.where(tokens == UNKNOWN, self._slots.last_sampled.index_select(0, slots), tokens)
        return StepTokens(tokens, TokenPlaces(positions, cache_slots))

    def _verify(self, rows: Sequence[Row], logits: torch.Tensor, prompts: PendingParts | None) -> VerifiedStep:
        """`logits` [num_prefixes, vocab] are of every prefix of the rows that sample."""
        prefixes = [prefix for row in rows if row.sample for prefix in row_prefixes(row)]
        chains = _chains(rows)
        fields = [[row.end for row in prefixes], [row.slot for row in prefixes], chains.drafts, chains.firsts]
        positions, slots, drafts, firsts = self._to_device(fields)
        params = self._slots.tensors(prefixes, slots, positions)
        self._count_drafts(params, prefixes)
        ids = sample(logits, params).ids
        if self.by_rejection and self.stage is not None and params.temperature is not None:
            target, guesses, seeds = probabilities(logits, params), self.stage.guesses(prefixes, logits), params.seeds
            assert seeds is not None
            ids, is_last = verify_by_rejection(target, guesses, drafts, firsts, Chance(seeds, positions, ids))
        else:
            ids, is_last = self._accept(ids, drafts, firsts)
        self._slots.record_chains(slots, ids, is_last)
        copy = HostCopy((ids,))
        self._slots.note(prefixes, copy)
        return VerifiedStep(rows, copy, self._logprobs(prefixes, logits, ids.clamp(min=0)), prompts)

    def _accept(self, ids: torch.Tensor, drafts: torch.Tensor, firsts: torch.Tensor) -> Verified:
        return verify_chains(ids, drafts, firsts)

    def _count_drafts(self, params: SamplingTensors, prefixes: Sequence[Row]) -> None:
        """To the penalties, the drafts that a prefix ends with are output like any other."""
        if params.penalties is None:
            return
        pairs = [(i, token) for i, row in enumerate(prefixes) for token in row.drafts]
        if pairs:
            indices, tokens = self._to_device(list(zip(*pairs, strict=True)))
            counts = params.penalties.output_counts  # a copy, made for these rows
            counts.index_put_((indices, tokens), torch.ones_like(tokens, dtype=counts.dtype), accumulate=True)


class SpeculativeGraphRunner(SpeculativeRunner, GraphRunner):
    """Verifies by decode graphs as well: to them, each draft is a row of its own.

    Such a row's KV ends with the draft's own, which is stored, like that of the drafts before it, ahead of the layer's
    attention. What a row of several tokens would read of the cache once is read for each: little, as long as a step's
    time is that of reading the weights.
    """

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        self._prompts.admit(batch.admissions)
        rows = [single for row in batch.rows for single in single_tokens(row)] if batch.has_drafts else batch.rows
        captured = self._captured(rows)
        if captured is None:
            return TorchRunner.launch(self, batch)
        inputs = self._step_tokens(batch) if self._is_followed(batch) else None
        if inputs is not None:
            for backend in self._attention:  # the graph has its own
                backend.plan(step_layout(batch.rows, self._block_size))
        self._replay(captured, rows)
        self._slots.admit(batch.admissions)
        if batch.has_drafts:
            step: PendingStep = self._verify(batch.rows, captured.logits[: len(rows)], None)
        else:
            step = self._choose(rows, captured)
        return self._follow(batch, inputs, step)


def is_all_decodes(rows: Sequence[Row]) -> bool:
    return all(row.sample and row.num_tokens == 1 + row.num_drafts for row in rows)


def single_tokens(row: Row) -> list[Row]:
    """The rows of one token that do what `row` does, if each of its tokens is to be sampled after; else itself."""
    if not row.num_drafts or row.num_tokens != 1 + row.num_drafts:
        return [row]
    return [Row(row.slot, row.start + i, 1, row.tokens[i : i + 1], row.blocks, True) for i in range(row.num_tokens)]


def row_prefixes(row: Row) -> list[Row]:
    """The rows that one token a step would have made of `row`, each ending with one more draft."""
    if not row.num_drafts:
        return [row]
    known = row.num_tokens - row.num_drafts
    return [
        Row(row.slot, row.start, known + num, row.tokens[: known + num], row.blocks, True, num)
        for num in range(row.num_drafts + 1)
    ]


class _Chains(NamedTuple):
    """One entry for each sampled id, see `verify_chains`."""

    drafts: list[int]
    firsts: list[int]


def _chains(rows: Sequence[Row]) -> _Chains:
    chains = _Chains([], [])
    for row in rows:
        if row.sample:
            chains.firsts.extend([len(chains.firsts)] * (1 + row.num_drafts))
            chains.drafts.extend((*row.drafts, NO_DRAFT))
    return chains


def _sampled_tokens(rows: Sequence[Row]) -> list[int]:
    """Which of the step's tokens are sampled after: the last one before a row's drafts, and these."""
    sampled: list[int] = []
    num_tokens = 0
    for row in rows:
        num_tokens += row.num_tokens
        if row.sample:
            sampled.extend(range(num_tokens - 1 - row.num_drafts, num_tokens))
    return sampled


@dataclass(frozen=True, slots=True)
class VerifiedStep(SampledStep):
    """`ids` and `logprobs` are of all the rows' prefixes that sample."""

    def wait(self) -> StepOutput:
        ids: list[int] = self.ids.wait()[0].tolist()
        logprobs = None if self.logprobs is None else self.logprobs.wait(len(ids))
        tokens_out: list[tuple[int, ...]] = []
        logprobs_out: list[tuple[TokenLogprobs, ...] | None] = []
        first = 0
        for row in self.rows:
            end = first + 1 + row.num_drafts if row.sample else first
            tokens = tuple(id for id in ids[first:end] if id != REJECTED)
            tokens_out.append(tokens)
            logprobs_out.append(None if logprobs is None else _joined(logprobs[first : first + len(tokens)]))
            first = end
        prompts = {} if self.prompts is None else self.prompts.wait()
        return StepOutput(tuple(tokens_out), tuple(logprobs_out), prompts)


def _joined(entries: Sequence[tuple[TokenLogprobs, ...] | None]) -> tuple[TokenLogprobs, ...] | None:
    """One row's entries; all or none of them are there."""
    found = [entry for entry in entries if entry is not None]
    return tuple(logprobs for entry in found for logprobs in entry) if found else None
