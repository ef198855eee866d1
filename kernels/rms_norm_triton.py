# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Triton kernels of `baton.kernels.rms_norm`: one program per token, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.rms_norm import NormResult
from baton.kernels.triton_pdl import pdl, start_next, wait_for_previous


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = torch.empty_like(x)
    _launch(x, None, weight, eps, NormResult(normed, x))
    return normed


def add_rms_norm_triton(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> NormResult:
    result = NormResult(torch.empty_like(x), torch.empty_like(x))
    _launch(x, residual, weight, eps, result)
    return result


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, result: NormResult
) -> None:
    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    block = triton.next_power_of_2(hidden)
    _norm_rows[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        result.normed,
        result.residual,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        result.normed.stride(0),
        hidden,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **pdl(),
    )


@triton.jit
def _norm_rows(
    x,  # [num_tokens, hidden]
    residual,  # [num_tokens, hidden], read if HAS_RESIDUAL
    weight,  # [hidden]
    normed,  # [num_tokens, hidden]
    residual_out,  # [num_tokens, hidden], written if HAS_RESIDUAL; strided as `normed`
    x_stride,
    residual_stride,
    out_stride,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    wait_for_previous(PDL)
    value = tl.load(x + row * x_stride + cols, inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + cols, inside, other=0.0).to(tl.float32)
        rounded = value.to(residual_out.dtype.element_ty)
        tl.store(residual_out + row * out_stride + cols, rounded, inside)
        value = rounded.to(tl.float32)  # the norm of what the next layer will see
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    result = value * scale * tl.load(weight + cols, inside, other=0.0).to(tl.float32)
    tl.store(normed + row * out_stride + cols, result, inside)
