"""A GraphRunner on a CPU: captured work is done again in place of a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from baton.actors.engine.cut_graph import CutForward
from baton.actors.engine.models.model import Model
from baton.actors.engine.runner_graph import Captured, GraphLimits, GraphRunner
from baton.actors.engine.runner_speculative import SpeculativeGraphRunner
from baton.kernels.attention import AttentionBackend, AttentionShape, GraphSize, StepLayout
from baton.kernels.attention_torch import TorchAttention
from baton.kernels.block_index import pad_decodes


class PaddedAttention(TorchAttention):
    def __init__(self, shape: AttentionShape, graph: GraphSize | None) -> None:
        super().__init__(shape)
        self._graph_size = graph

    def plan(self, layout: StepLayout) -> None:
        super().plan(layout if self._graph_size is None else pad_decodes(layout, self._graph_size.num_rows))


@dataclass
class Rerun:
    """Stands in for a CUDA graph: does the captured work again, into the same outputs."""

    work: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.work()


@dataclass
class TrueTokens:
    """Attention on the first tokens of a padded step, as between the graphs of a cut forward pass."""

    backend: AttentionBackend
    num_tokens: int

    def plan(self, layout: StepLayout) -> None: ...

    def run(self, query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full_like(query, float("nan"))
        self.backend.run(query[: self.num_tokens], kv, out[: self.num_tokens])
        return out


@dataclass
class RerunCut:
    runner: RerunRunner
    fields: torch.Tensor
    num_replays: int = 0

    def replay(self, attention: Sequence[AttentionBackend], num_tokens: int) -> torch.Tensor:
        self.num_replays += 1
        return self.runner._hidden(self.fields, [TrueTokens(backend, num_tokens) for backend in attention])


class RerunRunner(GraphRunner):
    def _capture_cut(self, size: int, pool: object) -> CutForward:
        return RerunCut(self, self._idle_fields(size))

    def _capture_decode(self, size: int, pool: object) -> Captured:
        graph = GraphSize(size, self._limits.max_blocks)
        attention = [self._make_attention(shape, graph) for shape in self._model.shapes]
        fields = self._idle_fields(size)
        logits, ids = torch.empty(size, self._model.config.vocab_size), torch.empty(size, dtype=torch.int64)

        def work() -> None:
            result = self._decode(fields, attention)
            logits.copy_(result.logits)
            ids.copy_(result.ids)

        return Captured(Rerun(work), attention, fields, logits, ids)

    @property
    def num_decode_replays(self) -> int:
        graphs = [captured.graph for captured in self._decodes.values()]
        return sum(graph.num_replays for graph in graphs if isinstance(graph, Rerun))

    @property
    def num_cut_replays(self) -> int:
        return sum(cut.num_replays for cut in self._cuts.values() if isinstance(cut, RerunCut))


class SpeculativeRerunRunner(SpeculativeGraphRunner, RerunRunner):
    """As SpeculativeGraphRunner."""


class CapturedRunner(SpeculativeRerunRunner):
    """In place of a SpeculativeRunner: with graphs for steps of up to 64 rows or tokens, captured at once."""

    def __init__(self, model: Model, kv: torch.Tensor, *, num_slots: int, **others: Any) -> None:
        limits = GraphLimits(num_slots, 64, 64 * kv.shape[0], max_tokens=64)
        others["make_attention"] = PaddedAttention
        super().__init__(model, kv, limits=limits, **others)
        capture(self)


def capture(runner: GraphRunner) -> None:
    with mock.patch.object(torch.cuda, "graph_pool_handle", lambda: None):
        runner.capture()
