"""What the runner asks of a model: token ids and places in, hidden states out, and the logits of those it wants.

A model holds weights and nothing of any request. It stores K and V in the cache that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.actors.engine.model_config import ModelConfig
from baton.kernels.attention import AttentionBackend, AttentionShape
from baton.kernels.rope_store import TokenPlaces


@dataclass(frozen=True, slots=True)
class StepInputs:
    tokens: torch.Tensor  # [num_tokens] int64
    places: TokenPlaces


class Model(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    @property
    def shapes(self) -> tuple[AttentionShape, ...]:
        """The distinct kinds of attention among the layers: one backend each."""
        ...

    def forward(self, inputs: StepInputs, kv: torch.Tensor, attention: Sequence[AttentionBackend]) -> torch.Tensor:
        """Hidden states [num_tokens, hidden]. `attention` runs parallel to `shapes`, and is planned for this step.

        kv: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab] of the token after each of `hidden` [num_rows, hidden]."""
        ...

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [num_rows, hidden] as the language-model head reads it."""
        ...
