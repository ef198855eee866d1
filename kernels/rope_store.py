"""RoPE on a merged QKV projection, with this step's K and V stored into the paged cache on the way.

qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows contiguous. cos_sin: [max_context, head_dim]
float32, cosines in the first half, sines in the second; rotation pairs dim i with i + head_dim / 2 (neox). kv: one
layer's cache view [num_blocks, 2, block_size, num_kv_heads, head_dim]. The query comes back as [num_tokens, num_heads,
head_dim] of qkv's dtype; qkv is not modified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.kernels.attention import AttentionShape


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where each of the step's tokens stands in its text and in the cache. Both [num_tokens] int64."""

    positions: torch.Tensor
    slots: torch.Tensor  # block * block_size + offset; -1 = store nothing (the padding of a CUDA graph)


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norm over each head of q and k before RoPE (qwen3, gemma3). Weights [head_dim], applied as is."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def rope_and_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    places: TokenPlaces,
    shape: AttentionShape,
    norm: QKNorm | None = None,
) -> torch.Tensor:
    if qkv.is_cuda:
        from baton.kernels.rope_store_triton import rope_and_store_triton

        return rope_and_store_triton(qkv, cos_sin, kv, places, shape, norm)
    return rope_and_store_reference(qkv, cos_sin, kv, places, shape, norm)


def rope_and_store_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    places: TokenPlaces,
    shape: AttentionShape,
    norm: QKNorm | None = None,
) -> torch.Tensor:
    num_tokens, num_rotated = qkv.shape[0], shape.num_heads + shape.num_kv_heads
    heads = qkv.view(num_tokens, -1, shape.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qk = heads[:, :num_rotated]
    if norm is not None:
        query = F.rms_norm(qk[:, : shape.num_heads], norm.q_weight.shape, norm.q_weight, norm.eps)
        key = F.rms_norm(qk[:, shape.num_heads :], norm.k_weight.shape, norm.k_weight, norm.eps)
        qk = torch.cat((query, key), dim=1)
    rotated = _rotate(qk, cos_sin.index_select(0, places.positions)).to(qkv.dtype)
    _store(rotated[:, shape.num_heads :], heads[:, num_rotated:], kv, places.slots)
    return rotated[:, : shape.num_heads]


def _rotate(qk: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [num_tokens, heads, head_dim] in float32 by each token's row of cosines and sines."""
    num_tokens, num_heads, head_dim = qk.shape
    table = cos_sin.view(num_tokens, 1, 2, head_dim // 2)
    cos, sin = table[:, :, :1], table[:, :, 1]
    halves = qk.float().view(num_tokens, num_heads, 2, head_dim // 2)
    rotated = halves * cos
    rotated[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    rotated[:, :, 1].addcmul_(halves[:, :, 0], sin)
    return rotated.view(num_tokens, num_heads, head_dim)


def _store(key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    if int(slots.min()) < 0:
        real = slots >= 0
        key, value, slots = key[real], value[real], slots[real]
    block_size = kv.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, 0, offsets] = key.to(kv.dtype)
    kv[blocks, 1, offsets] = value.to(kv.dtype)
