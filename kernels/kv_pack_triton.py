# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Triton kernel of `baton.kernels.kv_pack`: one program per cache block, layer and K or V, and tile of its elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048


def pack_triton(cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    num_layers, block_size, num_kv_heads, head_dim = cache.shape[1], *cache.shape[3:]
    plane_size = block_size * num_kv_heads * head_dim
    assert cache[0].is_contiguous() and staging.is_contiguous()
    if blocks.numel() == 0:
        return
    _pack[(blocks.numel(), num_layers * 2, triton.cdiv(plane_size, _TILE))](
        cache,
        blocks,
        staging,
        cache.stride(0),
        staging.shape[1],
        BLOCK_SIZE=block_size,
        STAGED_BLOCK_SIZE=staging.shape[4],
        HEADS=num_kv_heads,
        PARTS=staging.shape[0],
        HEAD_DIM=head_dim,
        TILE=_TILE,
    )


@triton.jit
def _pack(
    cache,  # [num_blocks, num_layers, 2, BLOCK_SIZE, HEADS, HEAD_DIM]
    blocks,  # [n] int64
    staging,  # [PARTS, staged_blocks, num_layers, 2, STAGED_BLOCK_SIZE, HEADS / PARTS, HEAD_DIM], contiguous
    cache_block_stride,
    staged_blocks,
    BLOCK_SIZE: tl.constexpr,
    STAGED_BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    index, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.program_id(2) * TILE + tl.arange(0, TILE)  # of one layer's K or V in the block
    cached = cache + tl.load(blocks + index) * cache_block_stride + plane * (BLOCK_SIZE * HEADS * HEAD_DIM) + element

    part_heads: tl.constexpr = HEADS // PARTS
    token = index * BLOCK_SIZE + element // (HEADS * HEAD_DIM)
    head = element // HEAD_DIM % HEADS
    # Row-major place in staging, from its outermost dim inwards.
    staged = head // part_heads * staged_blocks + token // STAGED_BLOCK_SIZE
    staged = staged * tl.num_programs(1) + plane
    staged = staged * STAGED_BLOCK_SIZE + token % STAGED_BLOCK_SIZE
    staged = staging + (staged * part_heads + head % part_heads) * HEAD_DIM + element % HEAD_DIM

    inside = (element < BLOCK_SIZE * HEADS * HEAD_DIM) & (token < staged_blocks * STAGED_BLOCK_SIZE)
    tl.store(staged, tl.load(cached, inside), inside)
