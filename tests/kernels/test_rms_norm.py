from __future__ import annotations

import pytest
import torch

from baton.kernels.rms_norm import rms_norm, rms_norm_reference
from baton.kernels.rms_norm_triton import rms_norm_triton

SHAPES = [(1, 64), (5, 576), (3, 1000), (0, 64)]


def test_the_norm_is_x_over_its_root_mean_square() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = torch.stack([row / (row.pow(2).mean() + 1e-5).sqrt() * weight for row in x])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[1], device=device).to(dtype)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_triton_accepts_rows_of_a_wider_tensor(device: torch.device) -> None:
    x, weight = torch.randn(4, 100, device=device)[:, 20:84], torch.randn(64, device=device)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
