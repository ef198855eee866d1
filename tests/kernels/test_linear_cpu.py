"""The CPU's linear layers compute what F.linear computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.kernels.linear import DenseLinear
from baton.kernels.linear_cpu import LeftLinear, PackedLinear, fastest_linear, shared_linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_weight_gives_the_same_product(num_rows: int, has_bias: bool):
    x, weight = torch.randn(num_rows, 48), torch.randn(80, 48)
    bias = torch.randn(80) if has_bias else None
    linear = fastest_linear(weight, bias)
    assert isinstance(linear, PackedLinear)
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 9])
def test_a_shared_weight_gives_the_same_product_in_rows(num_rows: int):
    x, weight = torch.randn(num_rows, 48), torch.randn(80, 48)
    linear = shared_linear(weight)
    assert isinstance(linear, LeftLinear)
    product = linear(x)
    torch.testing.assert_close(product, F.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert product.is_contiguous()


def test_other_dtypes_stay_plain():
    weight = torch.randn(8, 8, dtype=torch.bfloat16)
    assert isinstance(fastest_linear(weight), DenseLinear)
    assert isinstance(shared_linear(weight), DenseLinear)
