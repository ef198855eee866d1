# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Triton kernel of `baton.kernels.rope_store`: one program per token and tile of heads (q, k and v alike)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.attention import AttentionShape
from baton.kernels.rope_store import QKNorm, TokenPlaces
from baton.kernels.triton_pdl import pdl, start_next, wait_for_previous

_HEAD_TILE = 8


def rope_and_store_triton(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    places: TokenPlaces,
    shape: AttentionShape,
    norm: QKNorm | None = None,
) -> torch.Tensor:
    num_tokens = qkv.shape[0]
    query = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and kv.stride(4) == 1
    half = shape.head_dim // 2
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    _rope_heads[(num_tokens, triton.cdiv(num_heads, _HEAD_TILE))](
        qkv,
        cos_sin,
        kv,
        places.positions,
        places.slots,
        qkv if norm is None else norm.q_weight,
        qkv if norm is None else norm.k_weight,
        query,
        qkv.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        shape.block_size,
        0.0 if norm is None else norm.eps,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HALF=half,
        HAS_NORM=norm is not None,
        HEAD_TILE=_HEAD_TILE,
        HALF_BLOCK=triton.next_power_of_2(half),
        **pdl(),
    )
    return query


@triton.jit
def _rope_heads(
    qkv,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF]
    cos_sin,  # [max_context, 2 * HALF] float32, contiguous
    kv,  # [num_blocks, 2, block_size, NUM_KV_HEADS, 2 * HALF]
    positions,  # [num_tokens] int64
    slots,  # [num_tokens] int64, negative = do not store
    q_weight,  # [2 * HALF], read if HAS_NORM
    k_weight,  # [2 * HALF], read if HAS_NORM
    query,  # [num_tokens, NUM_HEADS, 2 * HALF], contiguous
    qkv_stride,
    kv_block_stride,
    kv_plane_stride,
    kv_offset_stride,
    kv_head_stride,
    block_size,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]  # [HEAD_TILE, 1]
    dim = tl.arange(0, HALF_BLOCK)[None, :]  # [1, HALF_BLOCK]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (dim < HALF)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS

    source = qkv + token * qkv_stride + head * (2 * HALF) + dim
    wait_for_previous(PDL)
    low = tl.load(source, inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, inside, other=0.0).to(tl.float32)

    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        weight = tl.where(is_query, q_weight + dim, k_weight + dim)
        normed = inside & (head < NUM_HEADS + NUM_KV_HEADS)
        low = tl.where(is_value, low, low * scale * tl.load(weight, normed, other=0.0).to(tl.float32))
        high = tl.where(is_value, high, high * scale * tl.load(weight + HALF, normed, other=0.0).to(tl.float32))

    # Values pass through a rotation by 0.
    table = cos_sin + tl.load(positions + token) * (2 * HALF) + dim
    rotates = (dim < HALF) & (is_value == 0)
    cos = tl.load(table, rotates, other=1.0)
    sin = tl.load(table + HALF, rotates, other=0.0)
    first, second = low * cos - high * sin, high * cos + low * sin

    target = query + (token * NUM_HEADS + head) * (2 * HALF) + dim
    tl.store(target, first, inside & is_query)
    tl.store(target + HALF, second, inside & is_query)

    slot = tl.load(slots + token)
    plane = is_value.to(tl.int64)
    kv_head = head - NUM_HEADS - plane * NUM_KV_HEADS
    cell = kv + slot // block_size * kv_block_stride + slot % block_size * kv_offset_stride
    target = cell + plane * kv_plane_stride + kv_head * kv_head_stride + dim
    stored = inside & (is_query == 0) & (slot >= 0)
    tl.store(target, first, stored)
    tl.store(target + HALF, second, stored)
