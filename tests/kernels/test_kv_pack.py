from __future__ import annotations

import pytest
import torch

from baton.kernels.kv_pack import join_heads, pack_into, pack_reference
from baton.kernels.kv_pack_triton import pack_triton


def random_cache(num_blocks: int, block_size: int = 4, num_kv_heads: int = 4) -> torch.Tensor:
    return torch.randn(num_blocks, 3, 2, block_size, num_kv_heads, 8)


def staging_for(num_tokens: int, block_size: int, parts: int) -> torch.Tensor:
    return torch.zeros(parts, -(-num_tokens // block_size), 3, 2, block_size, 4 // parts, 8)


def token_kv(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """[num_tokens, num_layers, 2, num_kv_heads, head_dim], one token after the other."""
    return torch.stack([cache[block, :, :, offset] for block in blocks for offset in range(cache.shape[3])])


@pytest.mark.parametrize(("block_size", "parts"), [(4, 1), (8, 2), (2, 1), (4, 4), (16, 2), (3, 2)])
def test_packing_cuts_the_same_tokens_into_other_blocks_and_splits_the_heads(block_size: int, parts: int) -> None:
    cache, blocks = random_cache(9), [7, 2, 5, 0]
    staging = staging_for(16, block_size, parts)
    pack_into(cache, torch.tensor(blocks), staging)
    tokens, heads = token_kv(cache, blocks), 4 // parts
    for part in range(parts):
        packed = token_kv(staging[part], list(range(staging.shape[1])))
        assert torch.equal(packed[:16], tokens[:, :, :, heads * part : heads * (part + 1)])
        assert not packed[16:].any()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_joining_heads_undoes_what_several_ranks_wrote(parts: int) -> None:
    """Each rank's block lies there as one stretch of the peer's."""
    whole, heads = random_cache(9), 4 // parts
    cache = whole.clone()
    for block in (7, 2):
        ranks = [whole[block, :, :, :, heads * rank : heads * (rank + 1)] for rank in range(parts)]
        cache[block] = torch.cat([share.reshape(-1) for share in ranks]).view_as(cache[block])
    assert parts == 1 or not torch.equal(cache, whole)
    stretches = cache[[7, 2]].view(2 * parts, 3, 2, 4, heads, 8)
    assert torch.equal(join_heads(stretches, parts), whole[[7, 2]])


def test_heads_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="3 x 1 KV heads, the cache has num_kv_heads=4"):
        pack_into(random_cache(2), torch.tensor([0]), torch.zeros(3, 1, 3, 2, 4, 1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "parts"), [(4, 1), (8, 2), (2, 4), (16, 1), (3, 1)])
def test_triton_equals_the_reference(block_size: int, parts: int, dtype: torch.dtype, device: torch.device) -> None:
    cache = random_cache(9).to(device, dtype)
    blocks = torch.tensor([7, 2, 5], device=device)
    expected = staging_for(12, block_size, parts).to(device, dtype)
    actual = expected.clone()
    pack_reference(cache, blocks, expected)
    pack_triton(cache, blocks, actual)
    assert torch.equal(actual, expected)
