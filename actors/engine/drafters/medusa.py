"""Medusa: heads on the target's last hidden state, of which head i foresees the token i + 2 positions on.

    head_i(h) = out_i(block_L(.. block_1(h)))      block(x) = x + silu(linear(x))

`h` is what the target's own head reads. Checkpoint as of github.com/FasterDecoding/Medusa, as safetensors:
`{i}.{block}.linear.weight`, `.bias`, and `{i}.{L}.weight`; config.json with medusa_num_heads and medusa_num_layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.module import DraftModule, TargetStep
from baton.actors.engine.loader_safetensors import SafetensorsWeights, read_hf_config
from baton.actors.engine.model_config import UnsupportedModelError
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.model import Model
from baton.actors.engine.weights import Weights
from baton.kernels.linear import Linear
from baton.kernels.linear_cpu import fastest_linear


def make_medusa(context: ModuleContext) -> DraftModule:
    assert context.config.model is not None
    path = resolve_model(context.config.model)
    hf = read_hf_config(path)
    num_heads, num_blocks = int(hf.get("medusa_num_heads", 0)), int(hf.get("medusa_num_layers", 1))
    if num_heads < context.config.max_draft_tokens:
        raise UnsupportedModelError(
            f"speculation.max_draft_tokens is {context.config.max_draft_tokens}, but {path.name} has "
            f"medusa_num_heads = {num_heads}, each good for one token; lower it to that"
        )
    weights = Weights(SafetensorsWeights(path), context.placement)
    heads = [_Head.read(weights, str(i), num_blocks, context.target) for i in range(num_heads)]
    weights.check_all_read()
    return Medusa(context.target, heads)


@dataclass(frozen=True, slots=True)
class _Head:
    blocks: list[Linear]
    out: Linear

    @classmethod
    def read(cls, weights: Weights, prefix: str, num_blocks: int, target: Model) -> _Head:
        hidden, vocab_size = target.config.hidden_size, target.config.vocab_size
        names = [f"{prefix}.{block}.linear" for block in range(num_blocks)]
        blocks = [
            fastest_linear(weights.tensor(f"{name}.weight", hidden, hidden), weights.tensor(f"{name}.bias", hidden))
            for name in names
        ]
        return cls(blocks, weights.gathered_linear(f"{prefix}.{num_blocks}", vocab_size, hidden))

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = h + F.silu(block(h))
        return self.out(h)


class Medusa:
    num_layers = 0
    needs_every_step = False

    def __init__(self, target: Model, heads: list[_Head]) -> None:
        self._target = target
        self._heads = heads
        self.taps = (target.config.num_layers - 1,)

    def advance(self, step: TargetStep) -> torch.Tensor:
        last = torch.tensor(step.last, dtype=torch.int64, device=step.tokens.device)
        if not (step.num_drafts and step.last):
            return last.new_empty(len(step.last), step.num_drafts)
        h = self._target.normed(step.features[:, 0].index_select(0, last))
        return torch.stack([step.choose(head(h), i) for i, head in enumerate(self._heads[: step.num_drafts])], dim=1)
