# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Paged attention in Triton: the fastest for decode rows, the check of FlashInfer, and what serves a GPU without it.

One flash-attention kernel for every row. A program takes a tile of a row's queries, with the query heads that share one
KV head, and one part ("split") of the row's KV. Decode rows are split so that a small batch fills the GPU; `_merge`
joins the parts. In graph mode the index buffer keeps its place, so a captured `run` sees what the next `plan` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from baton.kernels.attention import AttentionShape, GraphSize, StepLayout
from baton.kernels.block_index import block_index, pad_decodes
from baton.kernels.triton_pdl import pdl, start_next, wait_for_previous
from baton.kernels.triton_range import tensor_range

_KEY_TILE = 64
_PREFILL_ROWS = 64  # query tokens times heads of a group, per program
# Measured on an H200, 32 layers of 8 KV heads: one row takes 0.26 ms in 16 parts and 0.28 in 64 at 1k of context, 0.82
# and 0.50 at 8k, 2.74 and 1.23 at 32k. For 4 rows 16 parts are best, for 8 rows 8, for 64 and more 1.
_MAX_SPLITS = 64
_PROGRAMS_PER_SM = 4


@dataclass(frozen=True, slots=True)
class _Plan:
    """One step's indices on the device, all int32; see `BlockIndex` for the first four."""

    kv_lens: torch.Tensor
    cu_queries: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    decode_tiles: torch.Tensor  # [num_decodes, 2]: row, first query within the row
    prefill_tiles: torch.Tensor  # [num_tiles, 2]
    num_splits: int  # of a decode row's KV


class TritonAttention:
    """`num_splits` fixes the parts of a decode row's KV; left out, it follows from the batch and the GPU."""

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        graph: GraphSize | None = None,
        num_splits: int | None = None,
    ) -> None:
        self._shape = shape
        self._device = device
        self._graph = graph
        self._num_splits = num_splits
        self._group = shape.num_heads // shape.num_kv_heads
        self._prefill_queries = max(1, _PREFILL_ROWS // self._group)  # per tile
        self._plan: _Plan | None = None
        size = 0 if graph is None else 5 * graph.num_rows + 2 + graph.max_blocks
        self._buffer = torch.empty(size, dtype=torch.int32, device=device)

    def plan(self, layout: StepLayout) -> None:
        if self._graph is not None:
            layout = pad_decodes(layout, self._graph.num_rows)
        index = block_index(layout, slice(None), self._shape.block_size)
        decode_tiles = [(row, 0) for row in range(layout.num_decodes)]
        prefill_tiles = [
            (row, first)
            for row in range(layout.num_decodes, len(layout.query_lens))
            for first in range(0, layout.query_lens[row], self._prefill_queries)
        ]
        tiles = (np.array(tiles, dtype=np.int32).reshape(-1) for tiles in (decode_tiles, prefill_tiles))
        parts = (index.kv_lens, index.cu_queries, index.indptr, *tiles, index.indices)
        kv_lens, cu_queries, indptr, decodes, prefills, indices = self._upload(parts)
        self._plan = _Plan(
            kv_lens=kv_lens,
            cu_queries=cu_queries,
            indptr=indptr,
            indices=indices,
            decode_tiles=decodes.view(-1, 2),
            prefill_tiles=prefills.view(-1, 2),
            num_splits=self._splits(layout),
        )

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        plan = self._plan
        assert plan is not None, "run() before plan()"
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._attend(plan, plan.decode_tiles, query, kv, out)
        self._attend(plan, plan.prefill_tiles, query, kv, out)
        return out

    def _attend(
        self, plan: _Plan, tiles: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor
    ) -> None:
        if tiles.shape[0] == 0:
            return
        shape = self._shape
        decodes = tiles is plan.decode_tiles
        num_splits = plan.num_splits if decodes else 1
        num_queries = 1 if decodes else self._prefill_queries
        parts, log_sums = out[:, :, None], out  # one part: it is the result, and `log_sums` is not written
        if num_splits > 1:
            size = (tiles.shape[0], shape.num_heads, num_splits)
            parts = torch.empty(*size, shape.head_dim, dtype=torch.float32, device=query.device)
            log_sums = torch.empty(size, dtype=torch.float32, device=query.device)
        rows = max(16, triton.next_power_of_2(num_queries * self._group))  # 16: the least that tl.dot takes
        _attend_tile[(tiles.shape[0], shape.num_kv_heads, num_splits)](
            query, kv, parts, log_sums, tiles, plan.kv_lens, plan.cu_queries, plan.indptr, plan.indices,
            *query.stride()[:2], *kv.stride()[:4], *parts.stride()[:3], shape.scale,
            GROUP=self._group,
            HEAD_DIM=shape.head_dim,
            BLOCK_SIZE=shape.block_size,
            WINDOW=shape.sliding_window or 0,
            QUERIES=num_queries,
            SPLITS=num_splits,
            ROWS=rows,
            KEYS=_KEY_TILE,
            DIMS=triton.next_power_of_2(shape.head_dim),
            num_warps=4 if rows * shape.head_dim <= 64 * 128 else 8,
            **pdl(),
        )  # fmt: skip
        if num_splits > 1:
            _merge[(tiles.shape[0], shape.num_heads)](
                parts,
                log_sums,
                out,
                HEAD_DIM=shape.head_dim,
                SPLITS=num_splits,
                DIMS=triton.next_power_of_2(shape.head_dim),
                **pdl(),
            )

    def _splits(self, layout: StepLayout) -> int:
        if self._num_splits is not None:
            return self._num_splits
        if layout.num_decodes == 0:
            return 1
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        wanted = _PROGRAMS_PER_SM * num_sms / (layout.num_decodes * self._shape.num_kv_heads)
        if self._graph is None:  # a captured grid cannot follow the lengths
            wanted = min(wanted, max(layout.kv_lens[: layout.num_decodes]) / _KEY_TILE)
        return min(_MAX_SPLITS, 1 << round(log2(max(wanted, 1))))  # the nearest power of 2

    def _upload(self, parts: tuple[NDArray[np.int32], ...]) -> list[torch.Tensor]:
        """Copy the arrays to the device, all at once and without waiting for it."""
        host = torch.from_numpy(np.concatenate(parts))
        if self._device.type == "cuda":
            host = host.pin_memory()
        if self._graph is None:
            target = host.to(self._device, non_blocking=True)
        else:
            target = self._buffer[: host.numel()]
            target.copy_(host, non_blocking=True)
        return list(target.split([part.size for part in parts]))


@triton.jit
def _attend_tile(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    kv,  # [num_blocks, 2, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    parts,  # [num_tokens, num_heads, SPLITS, HEAD_DIM]: normalised within each part
    log_sums,  # [num_tokens, num_heads, SPLITS] float32: log2 of each part's sum; written if SPLITS > 1
    tiles,  # [num_tiles, 2]: row, first query within the row
    kv_lens,  # [num_rows]
    cu_queries,  # [num_rows + 1]
    indptr,  # [num_rows + 1]
    indices,  # block numbers
    query_token_stride,
    query_head_stride,
    kv_block_stride,
    kv_plane_stride,
    kv_offset_stride,
    kv_head_stride,
    part_token_stride,
    part_head_stride,
    part_split_stride,
    scale,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    QUERIES: tl.constexpr,  # queries per tile
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,  # QUERIES * GROUP, padded
    KEYS: tl.constexpr,  # keys per turn of the loop
    DIMS: tl.constexpr,  # HEAD_DIM, padded
    PDL: tl.constexpr,
):
    start_next(PDL)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start = tl.load(cu_queries + row)
    query_len = tl.load(cu_queries + row + 1) - start
    kv_len = tl.load(kv_lens + row)
    prefix = kv_len - query_len

    # Tile rows: the heads of the group within a query, queries one after the other.
    lane = tl.arange(0, ROWS)
    index = first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    dim = tl.arange(0, DIMS)
    is_query = (lane < QUERIES * GROUP) & (index < query_len)
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    token = (start + index).to(tl.int64)
    source = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    wait_for_previous(PDL)
    q = tl.load(source, inside, other=0.0)

    # The keys that this tile sees, begin..end, and of them this split's share.
    end = tl.minimum(kv_len, prefix + first + QUERIES)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, prefix + first - WINDOW + 1)
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
    begin += split * share
    end = tl.minimum(end, begin + share)

    position = prefix + index
    blocks = indices + tl.load(indptr + row)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    for key_start in tensor_range(begin, end, KEYS):
        key = key_start + tl.arange(0, KEYS)
        in_share = key < end
        block = tl.load(blocks + key // BLOCK_SIZE, in_share, other=0).to(tl.int64)
        cell = kv + block * kv_block_stride + key % BLOCK_SIZE * kv_offset_stride + kv_head * kv_head_stride
        loaded = in_share[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(cell[:, None] + dim[None, :], loaded, other=0.0)
        v = tl.load(cell[:, None] + kv_plane_stride + dim[None, :], loaded, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = in_share[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        shift = tl.where(new_best > float("-inf"), new_best, 0.0)  # a row that has seen nothing yet
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weight, 1)
        result = result * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        best = new_best

    result = result / tl.where(total > 0, total, 1.0)[:, None]
    target = parts + token[:, None] * part_token_stride + head[:, None] * part_head_stride + split * part_split_stride
    tl.store(target + dim[None, :], result, inside)
    if SPLITS > 1:
        num_heads = tl.num_programs(1) * GROUP
        log_sum = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(log_sums + (token * num_heads + head) * SPLITS + split, log_sum, is_query)


@triton.jit
def _merge(
    parts,  # [num_tokens, num_heads, SPLITS, HEAD_DIM] float32, contiguous
    log_sums,  # [num_tokens, num_heads, SPLITS] float32
    out,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    DIMS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    log_sum = tl.load(log_sums + place * SPLITS + split)
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    inside = dim < HEAD_DIM
    source = parts + (place * SPLITS + split[:, None]) * HEAD_DIM + dim[None, :]
    part = tl.load(source, inside[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + place * HEAD_DIM + dim, result, inside)
