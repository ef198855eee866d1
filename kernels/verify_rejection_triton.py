# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""The Triton side of `verify_rejection`: one program an id, which reads the vocabulary only to refuse a draft."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.sampling_triton import _gumbel
from baton.kernels.verify_rejection import ACCEPT_STREAM, RESIDUAL_STREAM

_SPAN = 4096  # vocabulary entries per loop turn
_ACCEPT_STREAM, _RESIDUAL_STREAM = tl.constexpr(ACCEPT_STREAM), tl.constexpr(RESIDUAL_STREAM)


def rejection_ids_triton(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    drafts: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """As `rejection_ids_reference`."""
    num_ids, vocab = target.shape
    ids = torch.empty_like(drafts)
    if num_ids:
        q = target if draft is None else draft
        assert target.stride(1) == q.stride(1) == 1
        assert drafts.is_contiguous() and seeds.is_contiguous() and positions.is_contiguous()
        _reject[(num_ids,)](
            target, q, drafts, seeds, positions, ids, target.stride(0), q.stride(0), vocab,
            IS_CERTAIN=draft is None, SPAN=_SPAN,
        )  # fmt: skip
    return ids


@triton.jit
def _reject(
    target,  # [num_ids, vocab] float32
    draft,  # [num_ids, vocab] float32, not read if IS_CERTAIN
    drafts,  # [num_ids] int64; below 0 = none
    seeds,  # [num_ids] int64
    positions,  # [num_ids] int64
    ids,  # [num_ids] int64: the result
    target_stride,
    draft_stride,
    vocab,
    IS_CERTAIN: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, seed, position = tl.load(drafts + row), tl.load(seeds + row), tl.load(positions + row)
    target += row * target_stride
    draft += row * draft_stride
    chosen = token
    if token >= 0:
        chance = tl.exp(-tl.exp(-_gumbel(seed ^ _ACCEPT_STREAM, position, tl.zeros((), tl.int32))))
        certainty = 1.0 if IS_CERTAIN else tl.load(draft + token)
        if chance * certainty >= tl.load(target + token):
            chosen = tl.full((), -1, tl.int64)
    if chosen < 0:
        best = tl.full((), float("-inf"), tl.float32)
        chosen = tl.full((), 0, tl.int64)
        for start in range(0, vocab, SPAN):
            entry = start + tl.arange(0, SPAN)
            residual = tl.load(target + entry, entry < vocab, other=0.0)
            if token >= 0:
                if IS_CERTAIN:
                    residual = tl.where(entry == token, 0.0, residual)
                else:
                    residual -= tl.load(draft + entry, entry < vocab, other=0.0)
            score = tl.where(residual > 0, tl.log(tl.maximum(residual, 1e-37)), float("-inf"))
            score += _gumbel(seed ^ _RESIDUAL_STREAM, position, entry)
            top = tl.max(score, 0)
            if top > best:
                best = top
                chosen = (start + tl.argmax(score, 0, tie_break_left=True)).to(tl.int64)
    tl.store(ids + row, chosen)
