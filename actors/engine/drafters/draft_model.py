# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A whole smaller model with the target's vocabulary.

Its KV lies in a tensor of its own, at the same block numbers as the target's. It computes every sequence from the
first token itself when it enters, cached or handed over: what lies in a block that the target found is not trusted.
A long text is caught up over some steps, in which the sequence does not draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.actors.engine.batch import Row
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.module import TargetStep, draft_pass
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_config import UnsupportedModelError
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.model import Model, StepInputs
from baton.actors.engine.step_fields import step_layout
from baton.kernels.rope_store import TokenPlaces

CATCH_UP_TOKENS = 2048  # that one step computes, of all sequences together, beyond what the step itself has added


def make_draft_model(context: ModuleContext) -> DraftModel:
    assert context.config.model is not None
    checkpoint = open_checkpoint(resolve_model(context.config.model))
    if checkpoint.config.vocab_size != (wanted := context.target.config.vocab_size):
        raise UnsupportedModelError(
            f"speculation.model has a vocabulary of {checkpoint.config.vocab_size} tokens, the model one of {wanted}: "
            f"take a draft model of the same family"
        )
    model = build_model(checkpoint, context.placement, block_size=context.block_size, max_context=context.max_context)
    return DraftModel(model, context)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What the draft model computes of one sequence in a pass."""

    row: Row
    is_last: bool  # then it drafts


class DraftModel:
    num_layers = 0
    taps = ()
    needs_every_step = True  # the texts

    def __init__(self, model: Model, context: ModuleContext) -> None:
        self._model = model
        self._context = context
        world = context.placement.collective.world
        self._spec = KVSpec.of_model(model.config, context.block_size, context.placement.dtype, world)
        self._kv: torch.Tensor | None = None  # as many blocks as the target's has
        self._attention = [context.make_attention(shape) for shape in model.shapes]
        shape = (context.num_slots, context.max_context + 1)
        self._texts = torch.zeros(shape, dtype=torch.int64, device=context.placement.device)
        self._num_computed = [0] * context.num_slots  # by slot: leading tokens whose KV is there

    @property
    def own_block_bytes(self) -> int:
        return self._spec.block_bytes

    def advance(self, step: TargetStep) -> torch.Tensor:
        self._take_in(step)
        num_drafting = len(step.drafting)
        if not step.num_drafts or not num_drafting:
            return step.tokens.new_empty(num_drafting, step.num_drafts)
        if self._kv is None:
            self._kv = self._spec.allocate(step.kv.shape[0], step.kv.device)
        chunks = self._chunks(step)
        logits = self._pass([chunk.row for chunk in chunks], None)
        drafts = [step.choose(logits, 0)]
        for index in range(step.num_drafts - 1):
            place = draft_pass(step, index + 1, self._context.block_size)
            drafts.append(step.choose(self._pass(place.rows, drafts[-1], place.slots), index + 1))
        is_behind = torch.tensor([not chunk.is_last for chunk in chunks], device=step.tokens.device)
        return torch.stack(drafts, dim=1).masked_fill_(is_behind[:, None], NOTHING)

    def _take_in(self, step: TargetStep) -> None:
        """Note what the texts have become. Queues copies; waits for nothing."""
        for admission in step.admissions:
            tokens = torch.tensor(admission.tokens, dtype=torch.int64)
            self._texts[admission.slot, : len(tokens)] = tokens.to(self._texts.device, non_blocking=True)
            self._num_computed[admission.slot] = 0
        slots = [row.slot for row in step.rows for _ in range(row.num_tokens)]
        index = torch.tensor(slots, device=self._texts.device)
        # Behind what stays the text is noise, which the next step writes over before anybody reads it.
        self._texts[index, (step.places.positions + 1).clamp(max=self._context.max_context)] = step.following

    def _chunks(self, step: TargetStep) -> list[_Chunk]:
        """One for each drafting row, at least of one token: up to the token that was sampled, if the budget lasts."""
        budget = CATCH_UP_TOKENS
        chunks: list[_Chunk] = []
        for i in step.drafting:
            row = step.rows[i]
            end = row.start + step.kept[i] + 1  # the sampled token is computed too
            room = min(len(row.blocks) * self._context.block_size, self._context.max_context)
            start = min(self._num_computed[row.slot], end - 1)
            num = min(end - start, max(1, budget), room - start)
            budget -= num
            self._num_computed[row.slot] = start + max(0, num)
            if num < 1:  # no place for the sampled token's KV: any pass will do, its draft is dropped
                start, num = room - 1, 1
            chunks.append(_Chunk(Row(row.slot, start, num, (), row.blocks, True), start + num == end))
        return chunks

    def _pass(self, rows: list[Row], tokens: torch.Tensor | None, slots: list[int] | None = None) -> torch.Tensor:
        """Run the model over the rows' texts, or over `tokens`, one a row; logits after each row's last token."""
        assert self._kv is not None
        device, block_size = self._kv.device, self._context.block_size
        order = sorted(range(len(rows)), key=lambda i: rows[i].num_tokens != 1)  # as attention wants them
        ordered = [rows[i] for i in order]
        positions = [position for row in ordered for position in range(row.start, row.end)]
        places = [row.blocks[p // block_size] * block_size + p % block_size for row in ordered
                  for p in range(row.start, row.end)]  # fmt: skip
        if slots is not None:
            places = slots
        at = torch.tensor(positions, device=device)
        if tokens is None:
            owners = torch.tensor([row.slot for row in ordered for _ in range(row.num_tokens)], device=device)
            tokens = self._texts[owners, at]
        for backend in self._attention:
            backend.plan(step_layout(ordered, block_size))
        inputs = StepInputs(tokens, TokenPlaces(at, torch.tensor(places, device=device)))
        hidden = self._model.forward(inputs, self._kv, self._attention)
        ends = torch.tensor([row.num_tokens for row in ordered]).cumsum(0) - 1
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__))
        return self._model.logits(hidden.index_select(0, ends.index_select(0, back).to(device)))


NOTHING = -1  # in place of a draft that there is none of
