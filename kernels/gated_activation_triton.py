# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Triton kernel of `baton.kernels.gated_activation`: one program per token and tile of the width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.gated_activation import ActivationKind
from baton.kernels.triton_pdl import pdl, start_next, wait_for_previous

_BLOCK = 1024


def gated_activation_triton(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    num_tokens, width = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _activate[grid](x, out, x.stride(0), width, GELU=kind == "gelu_tanh", BLOCK=_BLOCK, **pdl())
    return out


@triton.jit
def _activate(
    x,  # [num_tokens, 2 * width]
    out,  # [num_tokens, width], contiguous
    x_stride,
    width,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    wait_for_previous(PDL)
    gate = tl.load(x + row * x_stride + cols, inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + cols, inside, other=0.0).to(tl.float32)
    # Both activations are gate * sigmoid(z): gelu's (1 + tanh(u)) / 2 is sigmoid(2 u).
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(out + row * width + cols, gate * tl.sigmoid(z) * up, inside)
