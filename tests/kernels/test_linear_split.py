"""Split layers: what the ranks compute adds up, or stands side by side, to what one rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from baton.kernels.collective import NoCollective
from baton.kernels.fused_linear import NormWeight, linear_add, norm_linear
from baton.kernels.linear import DenseLinear
from baton.kernels.linear_split import GatheredLinear, ReducedLinear
from baton.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class Given:
    """The last rank, which hears what the others would have sent."""

    others: list[torch.Tensor]

    @property
    def rank(self) -> int:
        return len(self.others)

    @property
    def world(self) -> int:
        return len(self.others) + 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return sum(self.others, start=tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([*self.others, tensor])


def test_the_residual_is_added_once() -> None:
    x, weight, h = torch.randn(5, 12), torch.randn(6, 12), torch.randn(5, 6)
    parts = [
        linear_add(part, ReducedLinear(DenseLinear(rows), NoCollective(rank, 3)), h.clone())
        for rank, (part, rows) in enumerate(zip(x.split(4, dim=1), weight.split(4, dim=1), strict=True))
    ]
    torch.testing.assert_close(sum(parts), h + x @ weight.T)


def test_a_reduced_product_is_whole_on_a_rank() -> None:
    x, weight = torch.randn(5, 8), torch.randn(6, 8)
    linear = ReducedLinear(DenseLinear(weight[:, 4:]), Given([x[:, :4] @ weight[:, :4].T]))
    torch.testing.assert_close(linear(x[:, 4:]), x @ weight.T)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("out_features", [12, 11, 8, 4])
def test_gathered_outputs_are_in_order_whatever_the_last_rank_has(out_features: int, num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 4), torch.randn(out_features, 4)
    norm = NormWeight(torch.rand(4), 1e-6)
    whole = rms_norm(x, norm.weight, norm.eps) @ weight.T
    share = -(-out_features // 3)
    linear = GatheredLinear(
        DenseLinear(weight[2 * share :]), Given([whole[:, :share], whole[:, share : 2 * share]]), out_features
    )
    found = norm_linear(x, norm, linear)
    torch.testing.assert_close(found, whole)
    assert found.is_contiguous()
