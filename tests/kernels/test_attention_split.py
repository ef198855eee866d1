"""Rows go to the backend that is theirs, and come back in order; gathered tokens are the cache's."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.attention import AttentionShape, StepLayout
from baton.kernels.attention_split import SplitAttention
from baton.kernels.attention_torch import TorchAttention

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, scale=0.25)


def layout(num_decodes: int, num_prefills: int) -> StepLayout:
    query_lens = [1] * num_decodes + [5] * num_prefills
    kv_lens = [9] * num_decodes + [11] * num_prefills
    tables = [[3 * row, 3 * row + 2, 3 * row + 1] for row in range(len(query_lens))]
    return StepLayout(query_lens, kv_lens, tables, num_decodes)


@pytest.mark.parametrize(("num_decodes", "num_prefills"), [(3, 0), (0, 2), (3, 2)])
def test_two_backends_together_do_what_one_does(num_decodes: int, num_prefills: int) -> None:
    step = layout(num_decodes, num_prefills)
    kv, query = torch.randn(16, 2, 4, 2, 16), torch.randn(sum(step.query_lens), 4, 16)
    whole, split = TorchAttention(SHAPE), SplitAttention(TorchAttention(SHAPE), TorchAttention(SHAPE))
    whole.plan(step)
    split.plan(step)
    torch.testing.assert_close(split.run(query, kv), whole.run(query, kv))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[(7, 7)], [(64, 64), (5, 133), (300, 300)]])
def test_gathered_prefill_equals_the_reference(lengths: list[tuple[int, int]]) -> None:
    from baton.kernels.attention_gathered import GatheredPrefill

    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, block_size=16, scale=128**-0.5)
    kv = torch.randn(100, 3, 2, 16, 2, 128, device="cuda", dtype=torch.bfloat16)
    blocks = torch.randperm(100).tolist()
    tables = [[blocks.pop() for _ in range(-(-kv_len // 16))] for _, kv_len in lengths]
    step = StepLayout([query for query, _ in lengths], [kv_len for _, kv_len in lengths], tables, 0)
    query = torch.randn(sum(step.query_lens), 8, 128, device="cuda", dtype=torch.bfloat16)
    gathered = GatheredPrefill(shape, torch.bfloat16, torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"))
    reference = TorchAttention(shape)
    gathered.plan(step)
    reference.plan(step)
    got = gathered.run(query, kv[:, 1]).float().cpu()
    wanted = reference.run(query.cpu().float(), kv[:, 1].cpu().float())
    assert ((got - wanted).norm() / wanted.norm()).item() < 1e-2
