from __future__ import annotations

import pytest
import torch

from baton.kernels.kv_quant import dequantise_kv, dequantise_kv_reference, quantise_kv, quantise_kv_reference
from baton.kernels.kv_quant_triton import dequantise_kv_triton, quantise_kv_triton


def test_each_block_and_head_uses_the_whole_range() -> None:
    kv = torch.randn(3, 2, 2, 16, 4, 8)
    kv[1] *= 1000  # a loud block
    kv[:, :, :, :, 2] *= 1e-3  # a quiet head
    quantised = quantise_kv(kv)
    assert quantised.values.dtype == torch.float8_e4m3fn
    assert quantised.scales.shape == (3, 2, 2, 4)
    assert (quantised.values.float().abs().amax(dim=(3, 5)) == 448).all()
    error = (dequantise_kv(quantised, torch.float32) - kv).abs()
    # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, or of the subnormal range's top.
    assert (error <= kv.abs() / 16 + quantised.scales[:, :, :, None, :, None] * 2**-9).all()


def test_zeros_stay_zeros() -> None:
    quantised = quantise_kv(torch.zeros(1, 1, 2, 4, 2, 8))
    assert not dequantise_kv(quantised, torch.float32).any()


def representable_kv(block_size: int, head_dim: int) -> torch.Tensor:
    """Blocks that quantisation keeps as they are: e4m3 values times a power of two for each block and head."""
    values = torch.randint(8, 127, (2, 2, 2, block_size, 3, head_dim)).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values[:, :, :, 0, :, 0] = -448
    return values * 2.0 ** torch.randint(-9, 5, (2, 2, 2, 1, 3, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 8), (3, 12)])
def test_triton_equals_the_reference(block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    kv = representable_kv(block_size, head_dim)
    if device.type == "cuda":  # Triton 3.6's interpreter drops the carry of a mantissa that rounds up to 2
        kv = torch.randn_like(kv)
    kv[0, 0, 0, :, 1] = 0
    kv = kv.to(device, dtype)
    expected, actual = quantise_kv_reference(kv), quantise_kv_triton(kv)
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-6, atol=0)  # a GPU may divide by reciprocal
    # A scale that differs in its last bit may round a value to the neighbouring one, an eighth away.
    torch.testing.assert_close(actual.values.float(), expected.values.float(), rtol=0.13, atol=2**-9)
    assert (actual.values.float() != expected.values.float()).float().mean() < (0.01 if device.type == "cuda" else 1e-9)
    assert torch.equal(dequantise_kv_triton(actual, dtype), dequantise_kv_reference(actual, dtype))
