"""The skinny kernels against the composition of plain parts. The interpreter has no bf16 dot, so float32 there."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.fused_linear import NormWeight, linear_add, norm_gated_linear, norm_linear
from baton.kernels.linear import DenseLinear
from baton.kernels.skinny_linear_triton import skinny_linear_add, skinny_norm_linear, skinny_norm_silu_linear

WIDTH, FEATURES, EPS = 2048, 256, 1e-5


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(*shape, dtype=torch.float32).to(device, dtype)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def _tolerance(device: torch.device) -> float:
    return 1e-2 if device.type == "cuda" else 1e-5


def _normed(h: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    h = h.double()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * norm.double()


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_norm_and_linear_in_one_pass(device: torch.device, rows: int) -> None:
    h, norm, weight = _random(device, rows, WIDTH), _random(device, WIDTH), _random(device, FEATURES, WIDTH) / 40
    wanted = _normed(h, norm) @ weight.double().t()
    assert _error(skinny_norm_linear(h, norm, EPS, weight), wanted) < _tolerance(device)
    assert _error(norm_linear(h, NormWeight(norm, EPS), DenseLinear(weight)), wanted) < _tolerance(device)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_norm_linear_and_activation_in_one_pass(device: torch.device, rows: int) -> None:
    h, norm, weight = _random(device, rows, WIDTH), _random(device, WIDTH), _random(device, 2 * FEATURES, WIDTH) / 40
    both = _normed(h, norm) @ weight.double().t()
    wanted = torch.nn.functional.silu(both[:, :FEATURES]) * both[:, FEATURES:]
    assert _error(skinny_norm_silu_linear(h, norm, EPS, weight), wanted) < _tolerance(device)
    assert _error(norm_gated_linear(h, NormWeight(norm, EPS), DenseLinear(weight), "silu"), wanted) < _tolerance(device)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_linear_and_residual_in_one_pass(device: torch.device, rows: int) -> None:
    x, h, weight = _random(device, rows, WIDTH), _random(device, rows, FEATURES), _random(device, FEATURES, WIDTH) / 40
    wanted = h.double() + x.double() @ weight.double().t()
    assert _error(skinny_linear_add(x, weight, h), wanted) < _tolerance(device)
    assert _error(linear_add(x, DenseLinear(weight), h), wanted) < _tolerance(device)
