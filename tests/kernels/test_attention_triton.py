from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_replays, naive_attention, paged_case

from baton.kernels.attention import AttentionShape, GraphSize
from baton.kernels.attention_triton import TritonAttention

# query_lens, kv_lens, num_decodes
LAYOUTS: list[tuple[list[int], list[int], int]] = [
    ([1], [1], 1),
    ([1, 1, 1], [5, 140, 17], 3),
    ([20], [20], 0),
    ([30], [150], 0),
    ([1, 1, 13, 1], [40, 3, 29, 9], 2),
]


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_equals_attention_written_out(
    layout: tuple[list[int], list[int], int],
    heads: tuple[int, int],
    window: int | None,
    num_splits: int,
    device: torch.device,
) -> None:
    shape = AttentionShape(*heads, head_dim=16, block_size=16, scale=0.3, sliding_window=window)
    case = paged_case(shape, *layout)
    attention = TritonAttention(shape, device, num_splits=num_splits)
    attention.plan(case.layout)
    actual = attention.run(case.query.to(device), case.kv.to(device))
    torch.testing.assert_close(actual.cpu(), naive_attention(shape, case), atol=1e-5, rtol=1e-4)


def test_many_heads_per_kv_head_and_an_odd_head_dim(device: torch.device) -> None:
    shape = AttentionShape(80, 1, head_dim=24, block_size=8, scale=0.2)
    case = paged_case(shape, [1, 5], [20, 9], 1)
    attention = TritonAttention(shape, device, num_splits=2)
    attention.plan(case.layout)
    actual = attention.run(case.query.to(device), case.kv.to(device))
    torch.testing.assert_close(actual.cpu(), naive_attention(shape, case), atol=1e-5, rtol=1e-4)


def test_half_precision_is_close_and_keeps_its_dtype(device: torch.device) -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=4, scale=0.25)
    case = paged_case(shape, [1, 1, 9], [30, 3, 21], 2)
    attention = TritonAttention(shape, device, num_splits=2)
    attention.plan(case.layout)
    dtype = (
        torch.bfloat16 if device.type == "cuda" else torch.float16
    )  # the interpreter multiplies no bfloat16 matrices
    actual = attention.run(case.query.to(device, dtype), case.kv.to(device, dtype))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float().cpu(), naive_attention(shape, case), atol=2e-2, rtol=2e-2)


def test_graph_mode_pads_the_batch_to_its_size(device: torch.device) -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=4, scale=0.25)
    attention = TritonAttention(shape, device, GraphSize(num_rows=4, max_blocks=40), num_splits=2)
    for kv_lens in ([30, 3, 21], [8, 16]):
        case = paged_case(shape, [1] * len(kv_lens), kv_lens, len(kv_lens))
        query = torch.cat((case.query, torch.zeros(4 - len(kv_lens), 4, 16))).to(device)
        attention.plan(case.layout)
        actual = attention.run(query, case.kv.to(device))[: len(kv_lens)]
        torch.testing.assert_close(actual.cpu(), naive_attention(shape, case), atol=1e-5, rtol=1e-4)


def test_a_graph_refuses_what_it_was_not_captured_for(device: torch.device) -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=4, scale=0.25)
    attention = TritonAttention(shape, device, GraphSize(num_rows=2, max_blocks=40), num_splits=2)
    for query_lens, num_decodes in (([1, 1, 1], 3), ([1, 5], 1)):
        case = paged_case(shape, query_lens, [9] * len(query_lens), num_decodes)
        with pytest.raises(ValueError, match="a graph of 2 decode rows was given"):
            attention.plan(case.layout)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_plan() -> None:
    shape = AttentionShape(8, 2, head_dim=64, block_size=16, scale=0.125)
    attention = TritonAttention(shape, torch.device("cuda"), GraphSize(num_rows=8, max_blocks=200))
    assert_replays(attention, shape, num_rows=8, dtype=torch.bfloat16)
