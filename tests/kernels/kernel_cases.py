"""Inputs and checks that several kernel tests share, and attention written out plainly."""

from __future__ import annotations

from typing import NamedTuple

import torch

from baton.kernels.attention import AttentionBackend, AttentionShape, StepLayout


class PagedCase(NamedTuple):
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv: torch.Tensor  # one layer's strided view of a cache that is NaN wherever no row stored anything
    layout: StepLayout


def paged_case(shape: AttentionShape, query_lens: list[int], kv_lens: list[int], num_decodes: int) -> PagedCase:
    generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(kv_lens))
    counts = [-(-kv_len // shape.block_size) for kv_len in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    cache = torch.full((sum(counts) + 3, 3, 2, shape.block_size, shape.num_kv_heads, shape.head_dim), float("nan"))
    kv = cache[:, 1]
    for table, kv_len in zip(tables, kv_lens, strict=True):
        for position in range(kv_len):
            block, offset = table[position // shape.block_size], position % shape.block_size
            kv[block, :, offset] = torch.randn(2, shape.num_kv_heads, shape.head_dim, generator=generator)
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, generator=generator)
    return PagedCase(query, kv, StepLayout(query_lens, kv_lens, tables, num_decodes))


def naive_attention(shape: AttentionShape, case: PagedCase) -> torch.Tensor:
    """One query of one head at a time, in float64."""
    out = torch.empty(case.query.shape, dtype=torch.float64)
    token = 0
    layout = case.layout
    for query_len, kv_len, table in zip(layout.query_lens, layout.kv_lens, layout.block_tables, strict=True):
        key, value = case.kv[table].double().transpose(0, 1).flatten(1, 2)  # [blocks * block_size, kv heads, dim]
        for position in range(kv_len - query_len, kv_len):
            first = 0 if shape.sliding_window is None else max(0, position + 1 - shape.sliding_window)
            for head in range(shape.num_heads):
                kv_head = head // (shape.num_heads // shape.num_kv_heads)
                scores = key[first : position + 1, kv_head] @ case.query[token, head].double() * shape.scale
                out[token, head] = scores.softmax(0) @ value[first : position + 1, kv_head]
            token += 1
    return out.to(case.query.dtype)


def assert_replays(attention: AttentionBackend, shape: AttentionShape, num_rows: int, dtype: torch.dtype) -> None:
    """Assert that a graph captured once serves other lengths and fewer rows after the next `plan`."""
    device = torch.device("cuda")
    query = torch.zeros(num_rows, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    num_blocks = 3 + num_rows * 20
    kv = torch.zeros(num_blocks, 2, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    attention.plan(StepLayout([1] * num_rows, [1] * num_rows, [[0]] * num_rows, num_rows))
    attention.run(query, kv)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run(query, kv)
    for kv_lens in ([1] * num_rows, [7 + 11 * row for row in range(num_rows)], [200, 3]):
        case = paged_case(shape, [1] * len(kv_lens), kv_lens, len(kv_lens))
        query[: len(kv_lens)] = case.query.to(device, dtype)
        kv[: case.kv.shape[0]] = case.kv.to(device, dtype)
        attention.plan(case.layout)
        graph.replay()
        expected = naive_attention(shape, case)
        torch.testing.assert_close(out[: len(kv_lens)].float().cpu(), expected, atol=2e-2, rtol=2e-2)
