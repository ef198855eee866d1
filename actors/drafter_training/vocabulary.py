# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Which tokens a head may draft: the ones its model says most (FR-Spec), and the maps to and from their true ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from baton.actors.drafter_training.samples import Sample


class DraftVocabulary(NamedTuple):
    target_ids: torch.Tensor  # [size] int64, ascending
    coverage: float  # share of the answers' tokens that can be drafted


def choose_vocabulary(samples: Sequence[Sample], vocab_size: int, size: int) -> DraftVocabulary:
    """Take the answers' most frequent tokens, then the prompts', then the lowest ids, which tokenizers learnt first."""
    answers = torch.cat([sample.tokens[sample.prompt_len :] for sample in samples]).bincount(minlength=vocab_size)
    prompts = torch.cat([sample.tokens[: sample.prompt_len] for sample in samples]).bincount(minlength=vocab_size)
    rank = answers.double() * len(prompts) * max(1, int(prompts.max())) + prompts.double()
    chosen = rank.sort(descending=True, stable=True).indices[:size].sort().values
    return DraftVocabulary(chosen, float(answers[chosen].sum() / answers.sum()))


def d2t(target_ids: torch.Tensor) -> torch.Tensor:
    """What to add to a draft id to get the target's."""
    return target_ids - torch.arange(len(target_ids))


def t2d(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Which of the target's ids can be drafted."""
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[target_ids] = True
    return is_drafted
