# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Triton kernel of `baton.kernels.fingerprint`: several programs per block, each for a stretch of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.fingerprint import FACTOR, STEP

_TILE = 1024
_SPLITS = 8


def fingerprint_triton(words: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    partial = torch.empty(len(blocks), _SPLITS, dtype=torch.int64, device=words.device)
    if len(blocks):
        num_words = words.shape[1]
        span = triton.cdiv(triton.cdiv(num_words, _SPLITS), _TILE) * _TILE
        _fingerprint[(len(blocks), _SPLITS)](
            words, blocks, partial, num_words, span, STEP=STEP, FACTOR=FACTOR, TILE=_TILE
        )
    return partial.sum(dim=1)


@triton.jit
def _fingerprint(
    words,  # [num_blocks, num_words] int64
    blocks,  # [n] int64
    partial,  # [n, splits] int64
    num_words,
    span,
    STEP: tl.constexpr,
    FACTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    block = words + tl.load(blocks + row) * num_words
    step, factor = tl.full((), STEP, tl.int64), tl.full((), FACTOR, tl.int64)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(split * span, tl.minimum((split + 1) * span, num_words), TILE):
        place = start + tl.arange(0, TILE).to(tl.int64)
        inside = place < num_words
        word = tl.load(block + place, inside, 0) + step * place
        word = word ^ (word >> 32)
        word = word * factor
        word = word ^ (word >> 29)
        total += tl.where(inside, word, 0)
    tl.store(partial + row * tl.num_programs(1) + split, tl.sum(total))
