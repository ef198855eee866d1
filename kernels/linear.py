"""A linear layer as the models see it: a callable from activations to activations.

`x` is `[num_tokens, in_features]`, the result `[num_tokens, out_features]`. Quantised siblings implement the same
protocol, so a model never knows how its weights are stored.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """Weights as they are: `weight` [out_features, in_features], `bias` [out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        out_features, in_features = weight.shape
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and out_features >= in_features:
            # Decode multiplies by one or two tokens. With few inputs per output, MKL then reads a column-major matrix
            # at up to twice the speed; for many tokens the order makes no difference.
            weight = weight.t().contiguous().t()
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
