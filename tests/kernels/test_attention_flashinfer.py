"""FlashInfer against attention written out; collected only where there is a GPU (see conftest)."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_replays, naive_attention, paged_case

from baton.kernels.attention import AttentionShape, GraphSize, StepLayout
from baton.kernels.attention_flashinfer import FlashInferAttention, FlashInferWorkspace
from baton.kernels.attention_triton import TritonAttention

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
GRAPH = GraphSize(num_rows=8, max_blocks=200)

# query_lens, kv_lens, num_decodes
LAYOUTS: list[tuple[list[int], list[int], int]] = [
    ([1], [1], 1),
    ([1, 1, 1], [5, 140, 17], 3),
    ([20], [20], 0),
    ([30], [150], 0),
    ([1, 1, 13, 1], [40, 3, 29, 9], 2),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_equals_attention_written_out(
    layout: tuple[list[int], list[int], int], window: int | None, head_dim: int
) -> None:
    shape = AttentionShape(8, 2, head_dim=head_dim, block_size=16, scale=0.11, sliding_window=window)
    case = paged_case(shape, *layout)
    attention = FlashInferAttention(shape, torch.bfloat16, FlashInferWorkspace.allocate(shape, GRAPH, DEVICE))
    attention.plan(case.layout)
    actual = attention.run(case.query.to(DEVICE, torch.bfloat16), case.kv.to(DEVICE, torch.bfloat16))
    torch.testing.assert_close(actual.float().cpu(), naive_attention(shape, case), atol=2e-2, rtol=2e-2)


def test_it_agrees_with_triton_on_a_long_mixed_batch() -> None:
    shape = AttentionShape(32, 8, head_dim=128, block_size=16, scale=128**-0.5)
    query_lens, kv_lens = [1, 1, 1, 700, 65], [4000, 17, 2048, 700, 3000]
    counts = [-(-kv_len // 16) for kv_len in kv_lens]
    blocks = torch.randperm(sum(counts)).tolist()
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    layout = StepLayout(query_lens, kv_lens, tables, num_decodes=3)
    kv = torch.randn(sum(counts), 2, 2, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)[:, 1]
    query = torch.randn(sum(query_lens), 32, 128, device=DEVICE, dtype=torch.bfloat16)
    flashinfer = FlashInferAttention(shape, torch.bfloat16, FlashInferWorkspace.allocate(shape, GRAPH, DEVICE))
    triton = TritonAttention(shape, DEVICE)
    for attention in (flashinfer, triton):
        attention.plan(layout)
    torch.testing.assert_close(flashinfer.run(query, kv), triton.run(query, kv), atol=1e-2, rtol=2e-2)


def test_a_captured_graph_follows_the_plan() -> None:
    shape = AttentionShape(8, 2, head_dim=64, block_size=16, scale=0.125)
    workspace = FlashInferWorkspace.allocate(shape, GRAPH, DEVICE)
    attention = FlashInferAttention(shape, torch.bfloat16, workspace, GRAPH)
    assert_replays(attention, shape, num_rows=GRAPH.num_rows, dtype=torch.bfloat16)


def test_plans_in_flight_do_not_disturb_each_other() -> None:
    """Two steps are queued before the first has run, as overlapped scheduling does."""
    shape = AttentionShape(8, 2, head_dim=64, block_size=16, scale=0.125)
    attention = FlashInferAttention(shape, torch.bfloat16, FlashInferWorkspace.allocate(shape, GRAPH, DEVICE))
    cases = [paged_case(shape, [1, 1], kv_lens, 2) for kv_lens in ([300, 5], [9, 120])]
    on_device = [(c.query.to(DEVICE, torch.bfloat16), c.kv.to(DEVICE, torch.bfloat16)) for c in cases]
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(50):
        busy = busy @ busy
    outs = []
    for case, (query, kv) in zip(cases, on_device, strict=True):
        attention.plan(case.layout)
        outs.append(attention.run(query, kv))
    for case, out in zip(cases, outs, strict=True):
        torch.testing.assert_close(out.float().cpu(), naive_attention(shape, case), atol=2e-2, rtol=2e-2)


def test_an_unsupported_head_dim_is_refused() -> None:
    shape = AttentionShape(8, 2, head_dim=80, block_size=16, scale=0.125)
    with pytest.raises(ValueError, match="not 80; use TritonAttention"):
        FlashInferAttention(shape, torch.bfloat16, FlashInferWorkspace.allocate(shape, GRAPH, DEVICE))
