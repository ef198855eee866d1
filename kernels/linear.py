"""A linear layer as the models see it: a callable from activations to activations.

`x` is `[num_tokens, in_features]`, the result `[num_tokens, out_features]`. Quantised siblings implement the same
protocol, so a model never knows how its weights are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

MAX_SKINNY_ROWS = 16  # the tensor cores' smallest tile
_SKINNY_WIDTH = 2048  # the widest tile that a skinny kernel reads at once
_SKINNY_FEATURES = 64  # the most features of one program


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights as they are."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None = None  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SkinnyLinear(DenseLinear):
    """Dense weights on a GPU that the skinny kernels serve too, for up to MAX_SKINNY_ROWS rows (bfloat16, no bias)."""

    tickets: torch.Tensor = field(kw_only=True)  # int32, from zero; order the programs that share a tile


def gpu_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Wrap a weight on a GPU so that few rows run fast where the skinny kernels can serve it."""
    rows, width = weight.shape
    if bias is not None or weight.dtype != torch.bfloat16 or width % _SKINNY_WIDTH or rows % _SKINNY_FEATURES:
        return DenseLinear(weight, bias)
    return SkinnyLinear(weight, tickets=torch.zeros(rows // 16, dtype=torch.int32, device=weight.device))
