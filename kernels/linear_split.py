"""Linear layers that are split over ranks: each multiplies by its share of the weight, a collective joins the results.

Split by inputs the products add up; split by outputs they stand side by side. (A layer whose split outputs only feed
the next layer's split inputs needs neither, and is a plain `Linear`.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.kernels.collective import Collective
from baton.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class ReducedLinear:
    """x: [num_tokens, in_features / world], this rank's. The result is whole on every rank."""

    local: Linear
    collective: Collective

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.collective.all_reduce(self.local(x))


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """x is whole, and so is the result, [num_tokens, out_features]: the same bits on every rank.

    Rank r's `local` makes the outputs from r * ceil(out_features / world) on; the last ranks may have fewer.
    """

    local: Linear
    collective: Collective
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(self.local(x))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        missing = -(-self.out_features // self.collective.world) - part.shape[1]
        if missing:
            part = F.pad(part, (0, missing))
        parts = self.collective.all_gather(part)  # [world, num_tokens, share]
        return parts.transpose(0, 1).flatten(1)[:, : self.out_features].contiguous()
