"""64-bit fingerprints of KV blocks, computed where they lie: equal bytes in equal places have equal ones.

Not cryptographic: it finds bytes that were lost, torn, stale or misplaced, not bytes that were forged. Word i of a
block (int64, counted from 0) adds mix(word + i * STEP) to the block's sum modulo 2**64, so the order of additions does
not matter and every place does. mix multiplies and folds by shifts (arithmetic ones, as int64 has them).
"""

from __future__ import annotations

import torch

STEP = -7046029254386353131  # 2**64 / golden ratio, odd, as int64
FACTOR = -4658895280553007687
_WORDS_AT_ONCE = 1 << 20  # of the reference, to bound its memory


def fingerprint_blocks(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """rows: [num_blocks, block_bytes] uint8 of whole 8-byte words; blocks: [n] int64. Returns [n] int64."""
    if rows.shape[1] % 8:
        raise ValueError(f"block_bytes = {rows.shape[1]} must be divisible by 8 to be fingerprinted")
    words = rows.view(torch.int64)
    if rows.is_cuda:
        from baton.kernels.fingerprint_triton import fingerprint_triton

        return fingerprint_triton(words, blocks)
    return fingerprint_reference(words, blocks)


def fingerprint_reference(words: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(len(blocks), dtype=torch.int64, device=words.device)
    width = max(1, _WORDS_AT_ONCE // max(1, len(blocks)))
    for start in range(0, words.shape[1], width):
        some = words[blocks, start : start + width]
        some += STEP * torch.arange(start, start + some.shape[1], device=words.device)
        some ^= some >> 32
        some *= FACTOR
        some ^= some >> 29
        sums += some.sum(dim=1)
    return sums
