"""RMS norm, alone and fused with the residual addition before it.

x, residual: [num_tokens, hidden], last dim contiguous; weight: [hidden], applied as is (gemma's 1 + w is folded at
load). The mean of squares is taken in float32; results have x's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class NormResult(NamedTuple):
    normed: torch.Tensor
    residual: torch.Tensor  # x + residual: what the next layer adds to


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_cuda:
        from baton.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> NormResult:
    if x.is_cuda:
        from baton.kernels.rms_norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> NormResult:
    residual = x + residual
    return NormResult(rms_norm_reference(residual, weight, eps), residual)
