# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Runs batches with torch: builds the step's inputs, runs the model, samples, and keeps sampled ids on the device.

`launch` only queues work (on CUDA it never waits for the device); the three stages are separate objects or methods,
so that a runner with CUDA graphs can replace the middle one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from baton.actors.engine.batch import Batch, PendingStep, Row, StepOutput
from baton.actors.engine.host_copy import HostCopy
from baton.actors.engine.models.model import Model, StepInputs
from baton.actors.engine.request import TokenLogprobs
from baton.actors.engine.runner_prompt import PendingParts, PromptReader
from baton.actors.engine.sampler_state import SlotStates
from baton.kernels.attention import AttentionBackend, AttentionShape, StepLayout
from baton.kernels.rope_store import TokenPlaces
from baton.kernels.sampling import Logprobs, sample, token_logprobs


class TorchRunner:
    def __init__(
        self,
        model: Model,
        kv: torch.Tensor,
        *,
        num_slots: int,
        make_attention: Callable[[AttentionShape], AttentionBackend],
    ) -> None:
        self._model = model
        self._kv = kv
        self._block_size = kv.shape[3]
        self._attention = [make_attention(shape) for shape in model.shapes]
        self._slots = SlotStates(num_slots, model.config.vocab_size, model.config.eos_ids, kv.device)
        self._prompts = PromptReader(model, self._to_device)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        self._slots.admit(batch.admissions)
        self._prompts.admit(batch.admissions)
        inputs = self._build_inputs(batch.rows)
        layout = step_layout(batch.rows, self._block_size)
        for backend in self._attention:
            backend.plan(layout)
        hidden = self._model.hidden(inputs, self._kv, self._attention)
        logits = self._model.logits(hidden.index_select(0, inputs.logit_rows))
        positions = inputs.places.positions.index_select(0, inputs.logit_rows) + 1
        return replace(self._sample(batch.rows, positions, logits), prompts=self._prompts.read(batch.rows, hidden))

    def _build_inputs(self, rows: Sequence[Row]) -> StepInputs:
        host = host_inputs(rows, self._block_size)
        tokens, positions, slots = self._to_device(host.token_places)
        if host.unknown_at:
            unknown_at, sampled_slots = self._to_device([host.unknown_at, host.unknown_slots])
            tokens = tokens.index_copy(0, unknown_at, self._slots.last_sampled.index_select(0, sampled_slots))
        return StepInputs(tokens, TokenPlaces(positions, slots), self._to_device(host.logit_rows))

    def _sample(self, rows: Sequence[Row], positions: torch.Tensor, logits: torch.Tensor) -> SampledStep:
        """Sample for the rows that want it; `positions` and `logits` have one entry for each of them."""
        sampled_rows = [row for row in rows if row.sample]
        if not sampled_rows:
            # No ids, yet whoever waits must know that the step's KV is complete: a peer is about to be sent it.
            return SampledStep(rows, HostCopy((logits.new_empty(0, dtype=torch.int64),)), None)
        slots = self._to_device([row.slot for row in sampled_rows])
        ids = sample(logits, self._slots.tensors(sampled_rows, slots, positions)).ids
        self._slots.record(slots, ids)
        return SampledStep(rows, HostCopy((ids,)), self._logprobs(sampled_rows, logits, ids))

    def _logprobs(self, rows: Sequence[Row], logits: torch.Tensor, ids: torch.Tensor) -> StepLogprobs | None:
        wanted = {i: num for i, row in enumerate(rows) if (num := self._slots.num_logprobs(row.slot)) is not None}
        if not wanted:
            return None
        if len(wanted) < len(rows):
            index = self._to_device(list(wanted))
            logits, ids = logits.index_select(0, index), ids.index_select(0, index)
        return StepLogprobs(wanted, HostCopy(token_logprobs(logits, ids, max(wanted.values()))))

    def _to_device(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._kv.is_cuda:
            # Pinned, so that the copy does not wait for what the device still has to do.
            return tensor.pin_memory().to(self._kv.device, non_blocking=True)
        return tensor


class HostInputs(NamedTuple):
    """A step's inputs as plain lists, each parallel to the step's tokens unless said otherwise."""

    token_places: tuple[list[int], list[int], list[int]]  # token id, position, cache slot
    unknown_at: list[int]  # the tokens whose id only the device knows ...
    unknown_slots: list[int]  # ... and the sequence slots that sampled them
    logit_rows: list[int]  # the tokens to sample after


def host_inputs(rows: Sequence[Row], block_size: int) -> HostInputs:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    unknown_at: list[int] = []
    unknown_slots: list[int] = []
    logit_rows: list[int] = []
    for row in rows:
        tokens += row.tokens
        positions += range(row.start, row.end)
        slots += _cache_slots(row, block_size)
        if len(tokens) < len(positions):
            unknown_at.append(len(tokens))
            unknown_slots.append(row.slot)
            tokens.append(0)
        if row.sample:
            logit_rows.append(len(tokens) - 1)
    return HostInputs((tokens, positions, slots), unknown_at, unknown_slots, logit_rows)


def step_layout(rows: Sequence[Row], block_size: int) -> StepLayout:
    num_decodes = next((i for i, row in enumerate(rows) if row.num_tokens != 1), len(rows))
    return StepLayout(
        query_lens=[row.num_tokens for row in rows],
        kv_lens=[row.end for row in rows],
        block_tables=[list(row.blocks[: -(-row.end // block_size)]) for row in rows],
        num_decodes=num_decodes,
    )


def _cache_slots(row: Row, block_size: int) -> list[int]:
    """The place of each of the row's tokens in the cache: block * block_size + offset."""
    first, offset = divmod(row.start, block_size)
    if row.num_tokens == 1:
        return [row.blocks[first] * block_size + offset]
    blocks = row.blocks[first : -(-row.end // block_size)]
    slots = [place for block in blocks for place in range(block * block_size, (block + 1) * block_size)]
    return slots[offset : offset + row.num_tokens]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    num_top: dict[int, int]  # for each sampled row that wants logprobs: how many alternatives
    copy: HostCopy  # of kernels.sampling.Logprobs, one row for each of them

    def wait(self, num_rows: int) -> list[tuple[TokenLogprobs, ...] | None]:
        copied = Logprobs(*self.copy.wait())
        chosen: list[float] = copied.chosen.tolist()
        top_ids: list[list[int]] = copied.top_ids.tolist()
        top: list[list[float]] = copied.top.tolist()
        rows: list[tuple[TokenLogprobs, ...] | None] = [None] * num_rows
        for i, (row, num) in enumerate(self.num_top.items()):
            rows[row] = (TokenLogprobs(chosen[i], tuple(top_ids[i][:num]), tuple(top[i][:num])),)
        return rows


@dataclass(frozen=True, slots=True)
class SampledStep:
    rows: Sequence[Row]
    ids: HostCopy  # of the rows that sample
    logprobs: StepLogprobs | None
    prompts: PendingParts | None = None

    def wait(self) -> StepOutput:
        ids: list[int] = self.ids.wait()[0].tolist()
        logprobs = [None] * len(ids) if self.logprobs is None else self.logprobs.wait(len(ids))
        sampled = iter(zip(ids, logprobs, strict=True))
        tokens_out: list[tuple[int, ...]] = []
        logprobs_out: list[tuple[TokenLogprobs, ...] | None] = []
        for row in self.rows:
            token, logprob = next(sampled) if row.sample else (None, None)
            tokens_out.append(() if token is None else (token,))
            logprobs_out.append(logprob)
        prompts = {} if self.prompts is None else self.prompts.wait()
        return StepOutput(tuple(tokens_out), tuple(logprobs_out), prompts)
