"""The gated activation of an MLP: act(gate) * up.

x: [num_tokens, 2 * width], gate in the first half of the last dim, up in the second, last dim contiguous. Returns
[num_tokens, width] of x's dtype.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

ActivationKind = Literal["silu", "gelu_tanh"]


def gated_activation(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    if x.is_cuda:
        from baton.kernels.gated_activation_triton import gated_activation_triton

        return gated_activation_triton(x, kind)
    return gated_activation_reference(x, kind)


def gated_activation_reference(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
