"""TorchAttention against attention written out one query at a time."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import naive_attention, paged_case

from baton.kernels.attention import AttentionShape, StepLayout
from baton.kernels.attention_torch import TorchAttention


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "num_decodes"),
    [
        ([1], [1], 1),
        ([1, 1, 1], [33, 33, 33], 3),
        ([1, 1, 1, 1], [5, 700, 17, 350], 4),
        ([20], [20], 0),
        ([20], [53], 0),
        ([1, 1, 13, 16, 1], [40, 3, 13, 48, 9], 2),
    ],
)
def test_it_equals_attention_written_out(
    query_lens: list[int], kv_lens: list[int], num_decodes: int, heads: tuple[int, int], window: int | None
) -> None:
    shape = AttentionShape(*heads, head_dim=16, block_size=16, scale=0.3, sliding_window=window)
    case = paged_case(shape, query_lens, kv_lens, num_decodes)
    attention = TorchAttention(shape)
    attention.plan(case.layout)
    torch.testing.assert_close(attention.run(case.query, case.kv), naive_attention(shape, case), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=4, scale=0.25)
    case = paged_case(shape, [1, 1, 9], [30, 3, 21], 2)
    attention = TorchAttention(shape)
    attention.plan(case.layout)
    out = attention.run(case.query.to(dtype), case.kv.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), naive_attention(shape, case), atol=2e-2, rtol=2e-2)


def test_what_lies_beyond_a_rows_tokens_cannot_reach_it() -> None:
    """The case fills unowned cache positions with NaN; a padded row must not see them, nor any other row's blocks."""
    shape = AttentionShape(2, 1, head_dim=8, block_size=4, scale=1.0)
    case = paged_case(shape, [1, 1], [9, 2], 2)
    assert case.kv.isnan().any()
    attention = TorchAttention(shape)
    attention.plan(case.layout)
    assert not attention.run(case.query, case.kv).isnan().any()


def test_a_plan_serves_every_layer_and_the_next_replaces_it() -> None:
    shape = AttentionShape(2, 2, head_dim=8, block_size=4, scale=1.0)
    attention = TorchAttention(shape)
    for kv_len in (3, 8):
        case = paged_case(shape, [1], [kv_len], 1)
        attention.plan(case.layout)
        for query in (case.query, case.query + 1):
            expected = naive_attention(shape, case._replace(query=query))
            torch.testing.assert_close(attention.run(query, case.kv), expected, atol=1e-5, rtol=1e-4)


def test_an_empty_step_gives_an_empty_result() -> None:
    shape = AttentionShape(2, 2, head_dim=8, block_size=4, scale=1.0)
    attention = TorchAttention(shape)
    attention.plan(StepLayout([], [], [], 0))
    assert attention.run(torch.empty(0, 2, 8), torch.zeros(1, 2, 4, 2, 8)).shape == (0, 2, 8)
