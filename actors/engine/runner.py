# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Runs batches with torch: builds the step's inputs, runs the model, samples, and keeps sampled ids on the device.

`launch` only queues work (on CUDA it never waits for the device). Its stages are methods, so that a runner with CUDA
graphs can replace the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from baton.actors.engine.batch import Batch, PendingStep, Row, StepOutput
from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.host_copy import HostCopy
from baton.actors.engine.models.model import Model, StepInputs
from baton.actors.engine.request import TokenLogprobs
from baton.actors.engine.runner_prompt import PendingParts, PromptReader
from baton.actors.engine.sampler_state import SlotStates
from baton.actors.engine.step_fields import UNKNOWN, sampled_after, step_layout, write_fields
from baton.kernels.attention import AttentionBackend, AttentionShape
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
        grammars: GrammarStore | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._block_size = kv.shape[3]
        self._attention = [make_attention(shape) for shape in model.shapes]
        self._num_slots = num_slots
        self._slots = SlotStates(num_slots, model.config.vocab_size, model.config.eos_ids, kv.device, grammars)
        self._prompts = PromptReader(model, self._to_device)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        rows = batch.rows
        self._prompts.admit(batch.admissions)
        layout = step_layout(rows, self._block_size)
        for backend in self._attention:
            backend.plan(layout)
        hidden = self._forward(rows, batch.num_tokens)
        prompts = self._prompts.read(rows, hidden)
        self._slots.admit(batch.admissions)  # only now, while the device works: what sampling asks for comes last
        return self._finish(batch, hidden, prompts)

    def _finish(self, batch: Batch, hidden: torch.Tensor, prompts: PendingParts | None) -> PendingStep:
        """Sample after the rows that want it; `hidden` are all rows' states."""
        rows = batch.rows
        sampled = sampled_after(rows)
        if not sampled.tokens:
            # No ids, yet whoever waits must know that the step's KV is complete: a peer is about to be sent it.
            return SampledStep(rows, HostCopy((hidden.new_empty(0, dtype=torch.int64),)), None, prompts)
        tokens, positions, slots = self._to_device(sampled)
        logits = self._model.logits(hidden.index_select(0, tokens))
        step = self._sample([row for row in rows if row.sample], SampledPlaces(positions, slots), logits, rows)
        return step if prompts is None else replace(step, prompts=prompts)

    def _forward(self, rows: Sequence[Row], num_tokens: int) -> torch.Tensor:
        """Run the model over a step that is planned. Returns hidden states, [at least num_tokens, hidden]."""
        return self._hidden(self._fields(rows, num_tokens).to(self._kv.device, non_blocking=True), self._attention)

    def _fields(self, rows: Sequence[Row], size: int) -> torch.Tensor:
        """The step's fields (see `write_fields`) on the host, padded to `size`; pinned where there is a GPU."""
        fields = torch.empty(4, size, dtype=torch.int64, pin_memory=self._kv.is_cuda)
        write_fields(fields.numpy(), rows, self._block_size, self._num_slots)
        return fields

    def _hidden(self, fields: torch.Tensor, attention: Sequence[AttentionBackend]) -> torch.Tensor:
        tokens, positions, cache_slots, slots = fields
        tokens = torch.where(tokens == UNKNOWN, self._slots.last_sampled.index_select(0, slots), tokens)
        return self._model.forward(StepInputs(tokens, TokenPlaces(positions, cache_slots)), self._kv, attention)

    def _sample(
        self, sampled: Sequence[Row], places: SampledPlaces, logits: torch.Tensor, rows: Sequence[Row]
    ) -> SampledStep:
        """Sample for the rows that want it, `sampled` of all `rows`; `places` and `logits` have one entry for each."""
        ids = sample(logits, self._slots.tensors(sampled, places.slots, places.positions)).ids
        self._slots.record(places.slots, ids)
        copy = HostCopy((ids,))
        self._slots.note(sampled, copy)
        return SampledStep(rows, copy, self._logprobs(sampled, logits, ids))

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


class SampledPlaces(NamedTuple):
    """Both [num_sampled] int64."""

    positions: torch.Tensor  # of the tokens to be sampled
    slots: torch.Tensor


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
