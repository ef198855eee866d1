# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Triton kernel of `baton.kernels.rms_norm`: one program per token, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.triton_pdl import pdl, start_next, wait_for_previous


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = torch.empty_like(x)
    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return normed
    assert x.stride(1) == 1
    block = triton.next_power_of_2(hidden)
    _norm_rows[(num_tokens,)](
        x,
        weight,
        normed,
        x.stride(0),
        normed.stride(0),
        hidden,
        eps,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **pdl(),
    )
    return normed


@triton.jit
def _norm_rows(
    x,  # [num_tokens, hidden]
    weight,  # [hidden]
    normed,  # [num_tokens, hidden]
    x_stride,
    out_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    wait_for_previous(PDL)
    value = tl.load(x + row * x_stride + cols, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    result = value * scale * tl.load(weight + cols, inside, other=0.0).to(tl.float32)
    tl.store(normed + row * out_stride + cols, result, inside)
