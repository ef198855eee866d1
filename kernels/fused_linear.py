"""The three compositions of which a decoder layer consists, each with a linear layer in the middle.

h: [num_tokens, hidden], the residual stream; weight: [out_features, in_features]. Results have h's dtype.

    norm_linear(h)        = rms_norm(h) W^T                     QKV projection, language-model head
    norm_gated_linear(h)  = act(gate) * up of rms_norm(h) W^T   gate and up of an MLP, merged: gate rows first
    linear_add(x, h)      = h + x W^T                           output and down projections

At the few rows of a small decode batch the weights' bytes are all that counts, and the rest can hide behind them: on
a GPU one Triton kernel does the whole composition there. Elsewhere the parts run one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.kernels.gated_activation import ActivationKind, gated_activation
from baton.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class NormWeight:
    """An RMS norm's parameters, applied as they are."""

    weight: torch.Tensor  # [hidden]
    eps: float


def norm_linear(h: torch.Tensor, norm: NormWeight, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None and _is_skinny(h, weight):
        from baton.kernels.skinny_linear_triton import skinny_norm_linear

        return skinny_norm_linear(h, norm.weight, norm.eps, weight)
    return F.linear(rms_norm(h, norm.weight, norm.eps), weight, bias)


def norm_gated_linear(h: torch.Tensor, norm: NormWeight, weight: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    if kind == "silu" and _is_skinny(h, weight):
        from baton.kernels.skinny_linear_triton import skinny_norm_silu_linear

        return skinny_norm_silu_linear(h, norm.weight, norm.eps, weight)
    return gated_activation(F.linear(rms_norm(h, norm.weight, norm.eps), weight), kind)


def linear_add(x: torch.Tensor, weight: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, in_features]. The sum is a new tensor."""
    if _is_skinny(x, weight):
        from baton.kernels.skinny_linear_triton import skinny_linear_add

        return skinny_linear_add(x, weight, h)
    return torch.addmm(h, x, weight.t())


MAX_SKINNY_ROWS = 8
SKINNY_MULTIPLE = 2048  # of in_features: the widest tile that a kernel reads at once
SKINNY_ROWS_MULTIPLE = 128  # of out_features


def _is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    rows, width = weight.shape
    return (
        x.is_cuda
        and x.shape[0] <= MAX_SKINNY_ROWS
        and x.dtype == torch.bfloat16
        and width % SKINNY_MULTIPLE == 0
        and rows % SKINNY_ROWS_MULTIPLE == 0
    )
