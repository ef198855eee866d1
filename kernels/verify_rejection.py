"""Speculative sampling by rejection: keeps the target's distribution, and accepts a draft more often than any other
scheme could. What is emitted depends on the drafts, so the same seed gives another text of the same distribution.

A draft x, drawn from q, is accepted if u * q(x) < p(x); else the token comes from the residual, max(p - q, 0) scaled to
sum to 1. The last id of a row confirms no draft and comes from p. Sources: Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023; Chen et al., "Accelerating LLM Decoding with Speculative Sampling", 2023.

All random numbers are keyed by (seed, position), on streams of their own: not those that the drafts were drawn with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from baton.kernels.random_bits import gumbel
from baton.kernels.verify_chain import NO_DRAFT, Verified, verify_chains

ACCEPT_STREAM = 0x5DEECE66D1CE5EED  # what seeds are combined with
RESIDUAL_STREAM = 0x2545F4914F6CDD1D


class Chance(NamedTuple):
    """Each [num_ids] int64."""

    seeds: torch.Tensor
    positions: torch.Tensor  # of the tokens to be sampled
    plain: torch.Tensor  # the target's own samples: emitted where there is no draft to confirm, as if nobody drafted


def verify_by_rejection(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    drafts: torch.Tensor,
    firsts: torch.Tensor,
    chance: Chance,
) -> Verified:
    """See `verify_chains` for the rows. All tensors have one entry for each id.

    target: [num_ids, vocab] float32, the probabilities p after all filters. draft: likewise, q; None = each draft is
    certain (a lookup's). drafts: [num_ids] int64.
    """
    seeds, positions, plain = chance
    if target.is_cuda:
        from baton.kernels.verify_rejection_triton import rejection_ids_triton

        ids = rejection_ids_triton(target, draft, drafts, seeds, positions)
    else:
        ids = rejection_ids_reference(target, draft, drafts, seeds, positions)
    return verify_chains(torch.where(drafts == NO_DRAFT, plain, ids), drafts, firsts)


def rejection_ids_reference(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    drafts: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """[num_ids] int64: the draft where it is accepted, else a token of the residual, which is another one."""
    is_draft = drafts != NO_DRAFT
    at = drafts.clamp(min=0)[:, None]
    certain = torch.zeros_like(target).scatter_(1, at, 1.0)
    q = (certain if draft is None else draft) * is_draft[:, None]
    chance = torch.exp(-torch.exp(-gumbel(seeds ^ ACCEPT_STREAM, positions, 1)))  # uniform: Gumbel's own distribution
    accepted = is_draft & (chance * q.gather(1, at) < target.gather(1, at))[:, 0]
    noise = gumbel(seeds ^ RESIDUAL_STREAM, positions, target.shape[1])
    residual = (target - q).clamp_(min=0).log_().add_(noise)
    return torch.where(accepted, drafts, residual.argmax(dim=-1))
