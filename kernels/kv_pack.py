"""Gather scattered KV blocks into a staging buffer for a peer of other block size or tensor-parallel degree, and back.

cache: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous inside a block. staging: [parts,
staged_blocks, num_layers, 2, staged_block_size, num_kv_heads / parts, head_dim], contiguous: the same tokens in order,
cut anew into blocks, with the heads split over `parts` (TP 1 -> TP 2 packs with parts=2, TP 2 -> TP 1 unpacks two).
"""

from __future__ import annotations

import torch


def pack_blocks(cache: torch.Tensor, blocks: torch.Tensor, block_size: int, parts: int) -> torch.Tensor:
    """Pack the tokens of `blocks` ([n] int64, in token order). A last staged block that is not filled ends in zeros."""
    num_layers, cache_block_size, num_kv_heads, head_dim = cache.shape[1], *cache.shape[3:]
    if num_kv_heads % parts:
        raise ValueError(f"parts={parts} does not divide num_kv_heads={num_kv_heads}")
    num_tokens = blocks.numel() * cache_block_size
    shape = (parts, -(-num_tokens // block_size), num_layers, 2, block_size, num_kv_heads // parts, head_dim)
    allocate = torch.zeros if num_tokens % block_size else torch.empty
    staging = allocate(shape, dtype=cache.dtype, device=cache.device)
    pack_into(cache, blocks, staging)
    return staging


def pack_into(cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """Pack the tokens of `blocks` into `staging`; what exceeds the shorter of the two is left alone."""
    _check_heads(cache, staging)
    _move(cache, blocks, staging, to_staging=True)


def unpack_blocks(staging: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write the staged tokens into `blocks` of the cache; what exceeds the shorter of the two is left alone."""
    _check_heads(cache, staging)
    _move(cache, blocks, staging, to_staging=False)


def _check_heads(cache: torch.Tensor, staging: torch.Tensor) -> None:
    parts, heads = staging.shape[0], staging.shape[5]
    if parts * heads != cache.shape[4]:
        raise ValueError(f"staging holds {parts} x {heads} KV heads, the cache has num_kv_heads={cache.shape[4]}")


def _move(cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor, to_staging: bool) -> None:
    if cache.is_cuda:
        from baton.kernels.kv_pack_triton import move_blocks_triton

        move_blocks_triton(cache, blocks, staging, to_staging)
    else:
        move_blocks_reference(cache, blocks, staging, to_staging)


def move_blocks_reference(cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor, to_staging: bool) -> None:
    parts, staged_blocks, _, _, block_size, heads, head_dim = staging.shape
    num_tokens = min(blocks.numel() * cache.shape[3], staged_blocks * block_size)
    # Both as [tokens, num_layers, 2, parts, heads, head_dim].
    token = torch.arange(num_tokens, device=cache.device)
    staged = staging.permute(1, 4, 2, 3, 0, 5, 6)
    staged_at = (token // block_size, token % block_size)
    cached = cache.view(*cache.shape[:4], parts, heads, head_dim).permute(0, 3, 1, 2, 4, 5, 6)
    cached_at = (blocks[token // cache.shape[3]], token % cache.shape[3])
    if to_staging:
        staged[staged_at] = cached[cached_at]
    else:
        cached[cached_at] = staged[staged_at]
