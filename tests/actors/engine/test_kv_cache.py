from __future__ import annotations

import pytest
import torch

from baton.actors.engine.kv_cache import KVSpec, KVMemoryError

LAYOUT = KVSpec(num_layers=3, block_size=16, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_a_block_is_one_contiguous_range_of_block_bytes():
    kv = LAYOUT.allocate(5)
    assert kv.shape == (5, 3, 2, 16, 2, 8)
    assert kv[1].is_contiguous()
    assert kv[2].data_ptr() - kv[1].data_ptr() == LAYOUT.block_bytes == kv[1].nbytes


def test_num_blocks_is_what_fits_and_never_none():
    assert LAYOUT.num_blocks(7 * LAYOUT.block_bytes + 1) == 7
    with pytest.raises(KVMemoryError, match=f"one takes {LAYOUT.block_bytes} bytes"):
        LAYOUT.num_blocks(LAYOUT.block_bytes - 1)
