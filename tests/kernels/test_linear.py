from __future__ import annotations

import pytest
import torch

from baton.kernels.linear import DenseLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 16), (16, 48)])
def test_it_is_x_times_the_transposed_weight_plus_bias(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    bias, x = torch.randn(out_features).to(dtype), torch.randn(3, in_features).to(dtype)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(DenseLinear(weight)(x).double(), expected, atol=0.1, rtol=0.02)
    torch.testing.assert_close(DenseLinear(weight, bias)(x).double(), expected + bias.double(), atol=0.1, rtol=0.02)


def test_it_takes_a_slice_of_a_larger_weight() -> None:
    whole, x = torch.randn(64, 16), torch.randn(2, 16)
    torch.testing.assert_close(DenseLinear(whole[16:48])(x), x @ whole[16:48].t())
