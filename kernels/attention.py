"""Paged attention over the block-first KV cache: the protocol that every backend implements.

One KV tensor per worker, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`; a layer's cache is the
strided view `kv[:, layer]`, `[num_blocks, 2, block_size, num_kv_heads, head_dim]` (index 0 of dim 1 is K, 1 is V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float  # multiplies q.k before the softmax
    sliding_window: int | None = None  # a query sees at most this many positions, itself included; None = all


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where this step's tokens lie. Rows are concatenated; row i owns query rows cu_queries[i]:cu_queries[i+1].

    All lists are on the host, so that a backend can plan without a device synchronisation.
    """

    query_lens: list[int]
    kv_lens: list[int]  # KV length of each row after this step's tokens are stored
    block_tables: list[list[int]]  # each covers ceil(kv_len / block_size) blocks
    num_decodes: int  # the first num_decodes rows have query_len 1


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a CUDA graph is captured for: so many decode rows, whose block tables hold at most so many blocks in all."""

    num_rows: int
    max_blocks: int


class AttentionBackend(Protocol):
    """`plan` once per step on the host, then `run` once per layer on the device (the API shape CUDA graphs allow)."""

    def plan(self, layout: StepLayout) -> None: ...

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention of `query` [num_tokens, num_heads, head_dim] over one layer's cache (see module docstring).

        The step's own keys and values are already stored. Returns a tensor of query's shape and dtype: `out`, if given.
        """
        ...
