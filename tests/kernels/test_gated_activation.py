from __future__ import annotations

import math

import pytest
import torch

from baton.kernels.gated_activation import ActivationKind, gated_activation, gated_activation_reference
from baton.kernels.gated_activation_triton import gated_activation_triton


def test_the_first_half_gates_the_second() -> None:
    out = gated_activation(torch.tensor([[1.0, -2.0, 3.0, 5.0]]), "silu")
    expected = [3 * 1 / (1 + math.exp(-1)), 5 * -2 / (1 + math.exp(2))]
    torch.testing.assert_close(out, torch.tensor([expected]))


def test_gelu_is_the_tanh_approximation() -> None:
    gate, up = 0.7, 2.0
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    out = gated_activation(torch.tensor([[gate, up]]), "gelu_tanh")
    torch.testing.assert_close(out, torch.tensor([[0.5 * gate * (1 + math.tanh(inner)) * up]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 48), (3, 1536), (0, 16)])
def test_triton_equals_the_reference(
    shape: tuple[int, int], kind: ActivationKind, dtype: torch.dtype, device: torch.device
) -> None:
    x = (torch.randn(shape[0], 2 * shape[1], device=device) * 3).to(dtype)
    # Below float32 the reference rounds once more than the kernel: after the activation.
    torch.testing.assert_close(gated_activation_triton(x, kind), gated_activation_reference(x, kind))
