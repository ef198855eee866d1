"""A forward pass as CUDA graphs cut at attention: for steps with prefill, whose attention no graph can foresee.

    graph | attention | graph | attention | ... | graph
     embed,             o, MLP,                   o, MLP
     norm, QKV,         norm, QKV,
     RoPE, store        RoPE, store

Without them a step of 512 tokens keeps the host busy for 32 ms and an H200 for 17 ms: some hundred launches. The token
count is padded to a captured size; attention runs between the graphs on the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.kernels.attention import AttentionBackend, StepLayout


class Replayable(Protocol):
    def replay(self) -> None: ...


class CutForward(Protocol):
    """One captured size. Write `fields`, plan attention, then `replay`."""

    @property
    def fields(self) -> torch.Tensor:
        """[4, size] int64, see `write_fields`."""
        ...

    def replay(self, attention: Sequence[AttentionBackend], num_tokens: int) -> torch.Tensor:
        """Hidden states [size, hidden]; those from `num_tokens` on are noise."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """What leads to one layer's attention, and that attention's place in memory."""

    graph: Replayable
    backend: int  # index in the model's shapes
    query: torch.Tensor  # [size, num_heads, head_dim]
    kv: torch.Tensor  # the layer's view of the cache
    out: torch.Tensor  # like query


@dataclass(frozen=True, slots=True)
class CutGraph:
    fields: torch.Tensor
    pieces: Sequence[_Piece]
    last: Replayable
    hidden: torch.Tensor

    def replay(self, attention: Sequence[AttentionBackend], num_tokens: int) -> torch.Tensor:
        for piece in self.pieces:
            piece.graph.replay()
            attention[piece.backend].run(piece.query[:num_tokens], piece.kv, piece.out[:num_tokens])
        self.last.replay()
        return self.hidden


Forward = Callable[[torch.Tensor, Sequence[AttentionBackend]], torch.Tensor]


def capture_cut(forward: Forward, fields: torch.Tensor, num_shapes: int, pool: object) -> CutGraph:
    """Capture `forward(fields, attention)`, which must call an attention backend once per layer.

    `pool` is a CUDA graph memory pool. Sizes may share it, since only one replays at a time, from its start to its end.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(fields, [_Idle()] * num_shapes)  # compiles, and lets libraries allocate what they keep
        cutter = _Cutter(pool)
        hidden = forward(fields, [_Cut(cutter, i) for i in range(num_shapes)])
        last = cutter.end()
    torch.cuda.current_stream().wait_stream(stream)
    return CutGraph(fields, cutter.pieces, last, hidden)


class _Cutter:
    """The chain of graphs in the making: always one open, until `end`."""

    def __init__(self, pool: object) -> None:
        self.pieces: list[_Piece] = []
        self._pool = pool
        self._graph = self._begin()

    def cut(self, backend: int, query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(query)  # inside the graph: padding rows stay finite at every replay
        self.pieces.append(_Piece(self.end(), backend, query, kv, out))
        self._graph = self._begin()
        return out

    def end(self) -> Replayable:
        self._graph.capture_end()
        return self._graph

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)  # pyright: ignore[reportArgumentType]
        return graph


@dataclass(frozen=True, slots=True)
class _Cut:
    """The attention of a capture: ends a graph and begins the next."""

    cutter: _Cutter
    backend: int

    def plan(self, layout: StepLayout) -> None: ...

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.cutter.cut(self.backend, query, kv)


class _Idle:
    def plan(self, layout: StepLayout) -> None: ...

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros_like(query)
