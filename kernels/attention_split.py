"""Attention by two backends: one for a step's decode rows, one for its prefill rows."""

from __future__ import annotations

import torch

from baton.kernels.attention import AttentionBackend, StepLayout


class SplitAttention:
    """Neither backend sees the other's rows. Decode rows come first, as in every step."""

    def __init__(self, decode: AttentionBackend, prefill: AttentionBackend) -> None:
        self._decode = decode
        self._prefill = prefill
        self._num_decodes = 0
        self._has_prefill = False

    def plan(self, layout: StepLayout) -> None:
        num = self._num_decodes = layout.num_decodes
        self._has_prefill = num < len(layout.query_lens)
        if num:
            self._decode.plan(_part(layout, slice(0, num), num))
        if self._has_prefill:
            self._prefill.plan(_part(layout, slice(num, None), 0))

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(query) if out is None else out
        num = self._num_decodes
        if num:
            self._decode.run(query[:num], kv, out[:num])
        if self._has_prefill:
            self._prefill.run(query[num:], kv, out[num:])
        return out


def _part(layout: StepLayout, rows: slice, num_decodes: int) -> StepLayout:
    return StepLayout(layout.query_lens[rows], layout.kv_lens[rows], layout.block_tables[rows], num_decodes)
