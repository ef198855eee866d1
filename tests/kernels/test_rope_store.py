from __future__ import annotations

import pytest
import torch

from baton.kernels.attention import AttentionShape
from baton.kernels.rope_store import QKNorm, TokenPlaces, rope_and_store, rope_and_store_reference
from baton.kernels.rope_store_triton import rope_and_store_triton

SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=16, block_size=4, scale=1.0)


def cos_sin_table(max_context: int, head_dim: int) -> torch.Tensor:
    angles = torch.arange(max_context)[:, None] / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def cache_layer(shape: AttentionShape, num_blocks: int = 6) -> torch.Tensor:
    return torch.zeros(num_blocks, 3, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)[:, 1]


def random_qkv(num_tokens: int, shape: AttentionShape) -> torch.Tensor:
    return torch.randn(num_tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)


def random_norm(shape: AttentionShape) -> QKNorm:
    return QKNorm(torch.randn(shape.head_dim), torch.randn(shape.head_dim), eps=1e-6)


def test_rotation_multiplies_pairs_half_a_head_apart_as_complex_numbers() -> None:
    qkv, kv = random_qkv(2, SHAPE), cache_layer(SHAPE)
    positions = torch.tensor([3, 11])
    query = rope_and_store(qkv, cos_sin_table(16, 16), kv, TokenPlaces(positions, torch.tensor([0, 9])), SHAPE)
    heads = qkv.view(2, 15, 16)
    turn = torch.polar(torch.ones(2, 8), positions[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16))
    turned = torch.complex(heads[..., :8], heads[..., 8:]) * turn[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(query, expected[:, :9])
    torch.testing.assert_close(kv[0, 0, 0], expected[0, 9:12])
    torch.testing.assert_close(kv[2, 0, 1], expected[1, 9:12])
    torch.testing.assert_close(kv[2, 1, 1], heads[1, 12:])


def test_only_the_named_slots_are_written() -> None:
    kv = cache_layer(SHAPE)
    places = TokenPlaces(torch.tensor([5, 6]), torch.tensor([13, -1]))
    rope_and_store(random_qkv(2, SHAPE), cos_sin_table(16, 16), kv, places, SHAPE)
    written = kv.transpose(1, 2).reshape(24, -1).abs().sum(dim=1).nonzero()[:, 0]
    assert written.tolist() == [13]


def test_norm_applies_to_each_head_of_q_and_k_but_not_v() -> None:
    norm, qkv = random_norm(SHAPE), random_qkv(1, SHAPE)
    kv, places = cache_layer(SHAPE), TokenPlaces(torch.tensor([0]), torch.tensor([0]))
    query = rope_and_store(qkv, cos_sin_table(16, 16), kv, places, SHAPE, norm)  # position 0 rotates by nothing
    heads = qkv.view(15, 16)
    unit = heads / (heads.pow(2).mean(dim=1, keepdim=True) + norm.eps).sqrt()
    torch.testing.assert_close(query[0], unit[:9] * norm.q_weight)
    torch.testing.assert_close(kv[0, 0, 0], unit[9:12] * norm.k_weight)
    torch.testing.assert_close(kv[0, 1, 0], heads[12:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((8, 1), 48), ((4, 4), 16)])
def test_triton_equals_the_reference(
    heads: tuple[int, int], head_dim: int, with_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    shape = AttentionShape(*heads, head_dim=head_dim, block_size=4, scale=1.0)
    qkv = random_qkv(5, shape).to(device, dtype)
    norm = random_norm(shape) if with_norm else None
    if norm is not None:
        norm = QKNorm(norm.q_weight.to(device, dtype), norm.k_weight.to(device, dtype), norm.eps)
    places = TokenPlaces(torch.tensor([0, 1, 30, 7, 2], device=device), torch.tensor([23, 0, -1, 6, 7], device=device))
    table = cos_sin_table(32, head_dim).to(device)
    expected_kv, kv = (cache_layer(shape).to(device, dtype) for _ in range(2))
    expected = rope_and_store_reference(qkv, table, expected_kv, places, shape, norm)
    actual = rope_and_store_triton(qkv, table, kv, places, shape, norm)
    # The reference rounds to the dtype between norm and rotation, the kernel does not.
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.06, 0.02)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(kv, expected_kv, atol=atol, rtol=rtol)
