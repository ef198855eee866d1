"""The three compositions of which a decoder layer consists, each with a linear layer in the middle.

h: [num_tokens, hidden], the residual stream. Results have h's dtype.

    norm_linear(h)        = linear(rms_norm(h))                 QKV projection, language-model head
    norm_gated_linear(h)  = act(gate) * up of the same          gate and up of an MLP, merged: gate rows first
    linear_add(x, h)      = h + linear(x)                       output and down projections

At the few rows of a small decode batch the weights' bytes are all that counts, and the rest can hide behind them: on
a GPU one Triton kernel does the whole composition there. Elsewhere the parts run one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch

from baton.kernels.gated_activation import ActivationKind, gated_activation
from baton.kernels.linear import DenseLinear, Linear
from baton.kernels.linear_split import GatheredLinear, ReducedLinear
from baton.kernels.rms_norm import rms_norm

MAX_SKINNY_ROWS = 16  # what the tensor cores' smallest tile holds
SKINNY_WIDTH = 2048  # in_features must be a multiple: the widest tile that a kernel reads at once
SKINNY_FEATURES = 256  # likewise of out_features: two tiles of 128, gate and up


@dataclass(frozen=True, slots=True)
class NormWeight:
    """An RMS norm's parameters, applied as they are."""

    weight: torch.Tensor  # [hidden]
    eps: float


def norm_linear(h: torch.Tensor, norm: NormWeight, linear: Linear) -> torch.Tensor:
    if isinstance(linear, GatheredLinear):
        return linear.gather(norm_linear(h, norm, linear.local))
    if _is_skinny(linear, h):
        from baton.kernels.skinny_linear_triton import skinny_norm_linear

        return skinny_norm_linear(h, norm.weight, norm.eps, linear.weight)
    return linear(rms_norm(h, norm.weight, norm.eps))


def norm_gated_linear(h: torch.Tensor, norm: NormWeight, linear: Linear, kind: ActivationKind) -> torch.Tensor:
    if kind == "silu" and _is_skinny(linear, h):
        from baton.kernels.skinny_linear_triton import skinny_norm_silu_linear

        return skinny_norm_silu_linear(h, norm.weight, norm.eps, linear.weight)
    return gated_activation(linear(rms_norm(h, norm.weight, norm.eps)), kind)


def linear_add(x: torch.Tensor, linear: Linear, h: torch.Tensor | None) -> torch.Tensor:
    """x: [num_tokens, in_features]. The sum may take h's memory: h is dead afterwards. None adds nothing."""
    if isinstance(linear, ReducedLinear):
        # The ranks' results are added up, so that one alone brings the residual in.
        return linear.collective.all_reduce(linear_add(x, linear.local, None if linear.collective.rank else h))
    if _is_skinny(linear, x):
        from baton.kernels.skinny_linear_triton import skinny_linear_add

        return skinny_linear_add(x, linear.weight, h)
    if h is None:
        return linear(x)
    if isinstance(linear, DenseLinear) and linear.bias is None:
        return h.addmm_(x, linear.weight.t())
    return h + linear(x)


def _is_skinny(linear: Linear, x: torch.Tensor) -> TypeGuard[DenseLinear]:
    return (
        isinstance(linear, DenseLinear)
        and linear.bias is None
        and x.is_cuda
        and x.shape[0] <= MAX_SKINNY_ROWS
        and x.dtype == torch.bfloat16
        and linear.weight.shape[1] % SKINNY_WIDTH == 0
        and linear.weight.shape[0] % SKINNY_FEATURES == 0
    )
