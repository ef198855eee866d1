"""FP8 (e4m3) quantisation of KV blocks, with one scale per block, layer, K or V, and head.

kv: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous, any float dtype. Values are stored as
kv / scale, scale = max |kv| / 448 over the block's tokens and the head's dims (1 for an all-zero head).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3_MAX = 448.0


class QuantisedKV(NamedTuple):
    values: torch.Tensor  # float8_e4m3fn, kv's shape
    scales: torch.Tensor  # float32 [num_blocks, num_layers, 2, num_kv_heads]


def quantise_kv(kv: torch.Tensor) -> QuantisedKV:
    if kv.is_cuda:
        from baton.kernels.kv_quant_triton import quantise_kv_triton

        return quantise_kv_triton(kv)
    return quantise_kv_reference(kv)


def dequantise_kv(quantised: QuantisedKV, dtype: torch.dtype) -> torch.Tensor:
    if quantised.values.is_cuda:
        from baton.kernels.kv_quant_triton import dequantise_kv_triton

        return dequantise_kv_triton(quantised, dtype)
    return dequantise_kv_reference(quantised, dtype)


def quantise_kv_reference(kv: torch.Tensor) -> QuantisedKV:
    scales = kv.abs().amax(dim=(3, 5)).float().div_(E4M3_MAX)
    scales.masked_fill_(scales == 0, 1.0)
    values = (kv.float() / scales[:, :, :, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return QuantisedKV(values.to(torch.float8_e4m3fn), scales)


def dequantise_kv_reference(quantised: QuantisedKV, dtype: torch.dtype) -> torch.Tensor:
    return (quantised.values.float() * quantised.scales[:, :, :, None, :, None]).to(dtype)
