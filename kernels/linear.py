"""A linear layer as the models see it: a callable from activations to activations.

`x` is `[num_tokens, in_features]`, the result `[num_tokens, out_features]`. Quantised siblings implement the same
protocol, so a model never knows how its weights are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights as they are."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None = None  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
