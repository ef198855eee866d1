"""Cut KV blocks anew for a peer of other block size or tensor-parallel degree: a gather into staging, and heads joined.

cache: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous inside a block. staging: [parts,
staged_blocks, num_layers, 2, staged_block_size, num_kv_heads / parts, head_dim], contiguous: the same tokens in order,
cut anew into blocks, with the heads split over `parts` (TP 1 -> TP 2 packs with parts=2).
"""

from __future__ import annotations

import torch


def pack_into(cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """Pack the tokens of `blocks` ([n] int64, in token order); what exceeds the shorter of the two is left alone."""
    parts, heads = staging.shape[0], staging.shape[5]
    if parts * heads != cache.shape[4]:
        raise ValueError(f"staging holds {parts} x {heads} KV heads, the cache has num_kv_heads={cache.shape[4]}")
    if cache.is_cuda:
        from baton.kernels.kv_pack_triton import pack_triton

        pack_triton(cache, blocks, staging)
    else:
        pack_reference(cache, blocks, staging)


def pack_reference(cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    parts, staged_blocks, _, _, block_size, heads, head_dim = staging.shape
    num_tokens = min(blocks.numel() * cache.shape[3], staged_blocks * block_size)
    # Both as [tokens, num_layers, 2, parts, heads, head_dim].
    token = torch.arange(num_tokens, device=cache.device)
    staged = staging.permute(1, 4, 2, 3, 0, 5, 6)
    cached = cache.view(*cache.shape[:4], parts, heads, head_dim).permute(0, 3, 1, 2, 4, 5, 6)
    staged[token // block_size, token % block_size] = cached[blocks[token // cache.shape[3]], token % cache.shape[3]]


def join_heads(stretches: torch.Tensor, parts: int) -> torch.Tensor:
    """Put the heads of each `parts` stretches in a row side by side.

    [n * parts, num_layers, 2, block_size, heads, head_dim], each what a rank of a wider peer calls a block, becomes
    [n, num_layers, 2, block_size, parts * heads, head_dim].
    """
    *outer, heads, head_dim = stretches.shape[1:]  # num_layers, 2, block_size
    joined = stretches.view(-1, parts, *outer, heads, head_dim).permute(0, 2, 3, 4, 1, 5, 6)
    return joined.reshape(-1, *outer, parts * heads, head_dim)
