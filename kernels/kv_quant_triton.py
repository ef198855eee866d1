# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Triton kernels of `baton.kernels.kv_quant`: one program per block, layer and K or V, and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.kv_quant import E4M3_MAX, QuantisedKV

_E4M3_MAX = tl.constexpr(E4M3_MAX)


def quantise_kv_triton(kv: torch.Tensor) -> QuantisedKV:
    values = torch.empty(kv.shape, dtype=torch.float8_e4m3fn, device=kv.device)
    scales = torch.empty(*kv.shape[:3], kv.shape[4], dtype=torch.float32, device=kv.device)
    _launch(kv, values, scales, quantise=True)
    return QuantisedKV(values, scales)


def dequantise_kv_triton(quantised: QuantisedKV, dtype: torch.dtype) -> torch.Tensor:
    kv = torch.empty(quantised.values.shape, dtype=dtype, device=quantised.values.device)
    _launch(kv, quantised.values, quantised.scales, quantise=False)
    return kv


def _launch(kv: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, quantise: bool) -> None:
    assert kv.is_contiguous() and values.is_contiguous() and scales.is_contiguous()
    num_blocks, num_layers, _, block_size, num_kv_heads, head_dim = kv.shape
    if num_blocks == 0:
        return
    _convert[(num_blocks, num_layers * 2, num_kv_heads)](
        kv,
        values,
        scales,
        QUANTISE=quantise,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TOKENS=triton.next_power_of_2(block_size),
        DIMS=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _convert(
    kv,  # [num_blocks, num_layers, 2, BLOCK_SIZE, num_kv_heads, HEAD_DIM]: read if QUANTISE, else written
    values,  # float8_e4m3fn, the same shape: written if QUANTISE, else read
    scales,  # [num_blocks, num_layers, 2, num_kv_heads] float32: likewise
    QUANTISE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
):
    head, num_heads = tl.program_id(2), tl.num_programs(2)
    plane = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    token, dim = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIMS)[None, :]
    inside = (token < BLOCK_SIZE) & (dim < HEAD_DIM)
    cell = ((plane * BLOCK_SIZE + token) * num_heads + head) * HEAD_DIM + dim
    scale_at = scales + plane * num_heads + head
    if QUANTISE:
        value = tl.load(kv + cell, inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.max(tl.abs(value), 1), 0)
        scale = tl.where(largest > 0, tl.div_rn(largest, _E4M3_MAX), 1.0)
        scaled = tl.div_rn(value, tl.zeros_like(value) + scale)
        scaled = tl.minimum(tl.maximum(scaled, -_E4M3_MAX), _E4M3_MAX)
        tl.store(values + cell, scaled.to(tl.float8e4nv), inside)
        tl.store(scale_at, scale)
    else:
        value = tl.load(values + cell, inside, other=0.0).to(tl.float32)
        tl.store(kv + cell, value * tl.load(scale_at), inside)
