# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""How many tokens a step of greedy decoding would yield with a head, from samples that were decoded greedily.

A walk over each answer as the engine takes it: draft, keep the right ones, and one more. Nothing is run but the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.actors.drafter_training.heads import DraftHead
from baton.actors.drafter_training.objective import Target, collate, scores
from baton.actors.drafter_training.samples import Sample


@dataclass(frozen=True, slots=True)
class Acceptance:
    num_steps: int
    num_tokens: int
    rates: tuple[float, ...]  # of each draft: how often it was kept, of all steps

    @property
    def length(self) -> float:
        """Tokens a step; 1 = drafts never help."""
        return self.num_tokens / max(1, self.num_steps)


@torch.no_grad()
def acceptance(head: DraftHead, target: Target, samples: Sequence[Sample], num_drafts: int) -> Acceptance:
    kept = [0] * num_drafts
    num_steps = num_tokens = 0
    for sample in samples:
        right = torch.stack(
            [score.is_right[0] for score in scores(head, collate([sample], target.device), target, num_drafts)]
        )
        # At column p, drafts follow token p + 1; the first step knows the prompt and one token.
        runs: list[int] = right.long().cumprod(dim=0).sum(dim=0).tolist()
        position, last = sample.prompt_len - 1, len(sample.tokens) - 2
        while position < last:
            num_kept = min(runs[position], last - position)
            for index in range(num_kept):
                kept[index] += 1
            num_steps += 1
            num_tokens += min(num_kept + 1, last - position)
            position += num_kept + 1
    return Acceptance(num_steps, num_tokens, tuple(count / max(1, num_steps) for count in kept))
