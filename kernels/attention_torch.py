"""Paged attention with torch alone: the backend of machines without a GPU, and the reference of the others.

Any float dtype. `plan` turns block tables into index tensors and masks, once per step; `run` gathers K and V of each
group of rows and calls scaled_dot_product_attention. Query heads that share a KV head are folded into the query
dimension (decode) or share it through a stride of 0 (prefill), so K and V are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton.kernels.attention import AttentionShape, StepLayout

# Decode rows are padded to the longest of their group; one more call costs about as much as this much padding.
_PADDING_TOKENS = 256
_PADDING_RATIO = 1.25


class _Span(NamedTuple):
    """The KV positions first..end that a row attends to, counted from the start of the blocks that hold them."""

    blocks: list[int]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: torch.Tensor | None  # int64 row numbers; None = every decode row, in order
    num_rows: int
    blocks: torch.Tensor  # int64, equally many per row
    first: int  # of the gathered positions, first..end are attended
    end: int
    tail: torch.Tensor | None  # gathered positions after each row's last token; None = no row has any below `end`
    mask: torch.Tensor | None  # [num_rows, 1, 1, end - first] bool; None = all rows use all positions


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    start: int  # query rows start..end
    end: int
    blocks: torch.Tensor  # int64
    first: int  # of the gathered positions, first..kv_end are attended
    kv_end: int
    mask: torch.Tensor | None  # [end - start, kv_end - first] bool; None = causal with no prefix


class TorchAttention:
    def __init__(self, shape: AttentionShape, device: torch.device | str = "cpu") -> None:
        self._shape = shape
        self._device = torch.device(device)
        self._num_decodes = 0
        self._decodes: list[_DecodeGroup] = []
        self._prefills: list[_PrefillRow] = []

    def plan(self, layout: StepLayout) -> None:
        rows = zip(layout.block_tables, layout.query_lens, layout.kv_lens, strict=True)
        spans = [self._span(blocks, query_len, kv_len) for blocks, query_len, kv_len in rows]
        start = self._num_decodes = layout.num_decodes
        self._decodes = [self._plan_decodes(spans, group) for group in _similar_rows(spans[:start])]
        self._prefills = []
        for span, query_len in zip(spans[start:], layout.query_lens[start:], strict=True):
            self._prefills.append(self._plan_prefill(span, start, query_len))
            start += query_len

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(query) if out is None else out
        for group in self._decodes:
            self._run_decodes(group, query, kv, out)
        for row in self._prefills:
            self._run_prefill(row, query, kv, out)
        return out

    def _span(self, blocks: list[int], query_len: int, kv_len: int) -> _Span:
        block_size, window = self._shape.block_size, self._shape.sliding_window
        oldest = 0 if window is None else max(0, kv_len - query_len + 1 - window)
        skipped = oldest // block_size
        offset = skipped * block_size
        return _Span(list(blocks[skipped : -(-kv_len // block_size)]), oldest - offset, kv_len - offset)

    def _plan_decodes(self, spans: list[_Span], rows: list[int]) -> _DecodeGroup:
        group = [spans[row] for row in rows]
        width = max(len(span.blocks) for span in group)
        first, end = min(span.first for span in group), max(span.end for span in group)
        tail = mask = None
        if any(span.first != first or span.end != end for span in group):
            position = torch.arange(width * self._shape.block_size, device=self._device)
            firsts, ends = self._tensor(span.first for span in group), self._tensor(span.end for span in group)
            after = position >= ends[:, None]
            tail = after.view(-1).nonzero()[:, 0]
            mask = ~(after | (position < firsts[:, None]))[:, None, None, first:end]
        return _DecodeGroup(
            rows=None if rows == list(range(self._num_decodes)) else self._tensor(rows),
            num_rows=len(rows),
            # Padding repeats a row's own first block: it may not touch what it does not own.
            blocks=self._tensor(
                b for span in group for b in span.blocks + span.blocks[:1] * (width - len(span.blocks))
            ),
            first=first,
            end=end,
            tail=tail,
            mask=mask,
        )

    def _plan_prefill(self, span: _Span, start: int, query_len: int) -> _PrefillRow:
        window = self._shape.sliding_window
        kv_len = span.end - span.first
        mask = None
        if kv_len != query_len or (window is not None and window < query_len):
            key = torch.arange(kv_len, device=self._device)
            query = torch.arange(kv_len - query_len, kv_len, device=self._device)[:, None]
            mask = key <= query if window is None else (key <= query) & (key > query - window)
        return _PrefillRow(start, start + query_len, self._tensor(span.blocks), span.first, span.end, mask)

    def _run_decodes(self, group: _DecodeGroup, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        shape = self._shape
        rows = query[: self._num_decodes] if group.rows is None else query.index_select(0, group.rows)
        folded = rows.view(group.num_rows, shape.num_kv_heads, -1, shape.head_dim)
        key, value = _gather(group, kv[:, 0]), _gather(group, kv[:, 1])
        attended = F.scaled_dot_product_attention(folded, key, value, attn_mask=group.mask, scale=shape.scale)
        attended = attended.reshape(rows.shape)
        if group.rows is None:
            out[: self._num_decodes] = attended
        else:
            out.index_copy_(0, group.rows, attended)

    def _run_prefill(self, row: _PrefillRow, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        num_heads, num_kv_heads, head_dim = self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim
        groups = (num_kv_heads, num_heads // num_kv_heads)
        grouped = query[row.start : row.end].view(-1, *groups, head_dim).permute(1, 2, 0, 3)
        key, value = (
            kv[:, plane]
            .index_select(0, row.blocks)
            .view(-1, num_kv_heads, head_dim)[row.first : row.kv_end]
            .transpose(0, 1)[:, None]
            .expand(*groups, -1, -1)  # one KV head under its query heads, by a stride of 0
            for plane in (0, 1)
        )
        attended = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=row.mask, is_causal=row.mask is None, scale=self._shape.scale
        )
        out[row.start : row.end].view(-1, *groups, head_dim).copy_(attended.permute(2, 0, 1, 3))

    def _tensor(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)


def _gather(group: _DecodeGroup, plane: torch.Tensor) -> torch.Tensor:
    """Gather a group's K or V from `plane` [num_blocks, block_size, ...] as [num_rows, num_kv_heads, len, head_dim]."""
    gathered = plane.index_select(0, group.blocks)
    if group.tail is not None:
        # A masked weight is 0, but 0 * NaN is NaN, and another sequence may have left one there.
        gathered.view(-1, *plane.shape[2:]).index_fill_(0, group.tail, 0)
    return gathered.view(group.num_rows, -1, *plane.shape[2:])[:, group.first : group.end].transpose(1, 2)


def _similar_rows(spans: list[_Span]) -> list[list[int]]:
    """Part decode rows into groups of like length; a single group keeps the rows' order."""
    groups: list[list[int]] = []
    shortest = 0
    for row in sorted(range(len(spans)), key=lambda row: spans[row].end):
        end = spans[row].end
        if not groups or end > shortest * _PADDING_RATIO + _PADDING_TOKENS:
            groups.append([])
            shortest = end
        groups[-1].append(row)
    return [sorted(group) for group in groups]
