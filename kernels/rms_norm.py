"""RMS norm.

x: [num_tokens, hidden], last dim contiguous; weight: [hidden], applied as is (gemma's 1 + w is folded at load). The
mean of squares is taken in float32; results have x's dtype. The addition of the residual before a norm is part of
`fused_linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_cuda:
        from baton.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
