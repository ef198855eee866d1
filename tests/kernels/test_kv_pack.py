from __future__ import annotations

import pytest
import torch

from baton.kernels.kv_pack import move_blocks_reference, pack_blocks, unpack_blocks
from baton.kernels.kv_pack_triton import move_blocks_triton


def random_cache(num_blocks: int, block_size: int = 4, num_kv_heads: int = 4) -> torch.Tensor:
    return torch.randn(num_blocks, 3, 2, block_size, num_kv_heads, 8)


def token_kv(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """[num_tokens, num_layers, 2, num_kv_heads, head_dim], one token after the other."""
    return torch.stack([cache[block, :, :, offset] for block in blocks for offset in range(cache.shape[3])])


def test_packing_cuts_the_same_tokens_into_larger_blocks_and_splits_the_heads() -> None:
    cache, blocks = random_cache(9), [7, 2, 5, 0]
    staging = pack_blocks(cache, torch.tensor(blocks), block_size=8, parts=2)
    assert staging.shape == (2, 2, 3, 2, 8, 2, 8)
    tokens = token_kv(cache, blocks)
    for part in range(2):
        assert torch.equal(token_kv(staging[part], [0, 1]), tokens[:, :, :, 2 * part : 2 * part + 2])


def test_a_part_is_one_peers_cache_layout() -> None:
    """TP 1 with blocks of 4 to TP 2 with blocks of 8: each peer unpacks its part as it stands."""
    cache, blocks = random_cache(9), [7, 2, 5, 0]
    staging = pack_blocks(cache, torch.tensor(blocks), block_size=8, parts=2)
    peer = random_cache(6, block_size=8, num_kv_heads=2)
    unpack_blocks(staging[1:2], peer, torch.tensor([3, 1]))
    assert torch.equal(token_kv(peer, [3, 1]), token_kv(cache, blocks)[:, :, :, 2:])


@pytest.mark.parametrize(("block_size", "parts"), [(4, 1), (8, 1), (2, 1), (4, 4), (16, 2), (3, 2)])
def test_unpacking_what_was_packed_restores_it(block_size: int, parts: int) -> None:
    cache, target = random_cache(9), random_cache(9)
    untouched = target.clone()
    staging = pack_blocks(cache, torch.tensor([7, 2, 5]), block_size, parts)
    unpack_blocks(staging, target, torch.tensor([1, 8, 3]))
    assert torch.equal(target[[1, 8, 3]], cache[[7, 2, 5]])
    others = [0, 2, 4, 5, 6, 7]
    assert torch.equal(target[others], untouched[others])


def test_an_unfilled_last_block_ends_in_zeros() -> None:
    staging = pack_blocks(random_cache(5), torch.tensor([1, 2, 3]), block_size=8, parts=1)
    assert staging.shape[1] == 2
    assert not staging[0, 1, :, :, 4:].any()


def test_heads_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="parts=3 does not divide num_kv_heads=4"):
        pack_blocks(random_cache(2), torch.tensor([0]), block_size=4, parts=3)
    with pytest.raises(ValueError, match="num_kv_heads=2"):
        unpack_blocks(torch.zeros(1, 1, 3, 2, 4, 4, 8), random_cache(2, num_kv_heads=2), torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "parts"), [(4, 1), (8, 2), (2, 4), (16, 1), (3, 1)])
def test_triton_equals_the_reference(block_size: int, parts: int, dtype: torch.dtype, device: torch.device) -> None:
    cache = random_cache(9).to(device, dtype)
    blocks = torch.tensor([7, 2, 5], device=device)
    staged_blocks = -(-12 // block_size)
    expected, actual = torch.zeros(2, parts, staged_blocks, 3, 2, block_size, 4 // parts, 8, device=device).to(dtype)
    move_blocks_reference(cache, blocks, expected, to_staging=True)
    move_blocks_triton(cache, blocks, actual, to_staging=True)
    assert torch.equal(actual, expected)
    target = torch.zeros_like(cache)
    move_blocks_triton(target, blocks, actual, to_staging=False)
    assert torch.equal(target[blocks], cache[blocks])
    assert target.count_nonzero() == cache[blocks].count_nonzero()
