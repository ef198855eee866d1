"""A TorchRunner whose decode-only steps replay CUDA graphs, captured once for a ladder of batch sizes.

A captured step takes its sampled ids from the device, runs the model, picks the greedy token and notes it. What other
sampling parameters ask for is done on the graph's logits afterwards. Every other step runs as TorchRunner's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from baton.actors.engine.batch import Batch, PendingStep, Row
from baton.actors.engine.host_copy import HostCopy
from baton.actors.engine.models.model import Model, StepInputs
from baton.actors.engine.runner import SampledStep, TorchRunner, step_layout
from baton.kernels.attention import AttentionBackend, AttentionShape, GraphSize
from baton.kernels.rope_store import TokenPlaces
from baton.kernels.sampling import SamplingTensors, sample

UNKNOWN = -1  # in place of a token id that only the device knows

AttentionFactory = Callable[[AttentionShape, GraphSize | None], AttentionBackend]


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending: dense where a padded row costs a large share, sparse above."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, max_rows + 1, 16)]
    return sorted({*(size for size in ladder if size < max_rows), max_rows})


class Replayable(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured step: write `fields`, plan `attention`, replay `graph`, read the rest."""

    graph: Replayable
    attention: list[AttentionBackend]
    fields: torch.Tensor  # [4, num_rows] int64: token, position, cache slot, sequence slot
    logits: torch.Tensor  # [num_rows, vocab]
    ids: torch.Tensor  # [num_rows] int64


class _StepResult(NamedTuple):
    logits: torch.Tensor
    ids: torch.Tensor


class GraphRunner(TorchRunner):
    def __init__(
        self, model: Model, kv: torch.Tensor, *, num_slots: int, max_blocks: int, make_attention: AttentionFactory
    ) -> None:
        """`max_blocks` bounds the block tables of one step together; a prefix that rows share counts for each row."""
        super().__init__(model, kv, num_slots=num_slots, make_attention=lambda shape: make_attention(shape, None))
        self._num_slots = num_slots
        self._max_blocks = max_blocks
        self._make_attention = make_attention
        self._captured: dict[int, Captured] = {}
        self._sizes: list[int] = []

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every kernel and capture every size, the largest first: the smaller ones reuse its memory."""
        sizes = graph_sizes(self._num_slots)
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(sizes), 1):
            self._captured[size] = self._capture(size, pool)
            on_progress(done, len(sizes))
        self._sizes = sizes

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        rows = batch.rows
        self._prompts.admit(batch.admissions)
        size = next((size for size in self._sizes if size >= len(rows)), None)
        if size is None or self._prompts.is_asked(rows) or any(row.num_tokens != 1 or not row.sample for row in rows):
            return super().launch(batch)
        self._slots.admit(batch.admissions)
        captured = self._captured[size]
        layout = step_layout(rows, self._block_size)
        for backend in captured.attention:
            backend.plan(layout)
        captured.fields.copy_(self._to_device(self._host_fields(rows, size)), non_blocking=True)
        captured.graph.replay()
        return self._choose(rows, captured)

    def _choose(self, rows: Sequence[Row], captured: Captured) -> PendingStep:
        """Keep the graph's greedy ids, or sample as the rows ask."""
        if self._slots.is_plain(rows):
            return SampledStep(rows, HostCopy((captured.ids[: len(rows)],)), None)
        num = len(rows)
        return self._sample(rows, captured.fields[1, :num] + 1, captured.logits[:num])

    def _host_fields(self, rows: Sequence[Row], size: int) -> list[list[int]]:
        block_size = self._block_size
        padding = size - len(rows)
        return [
            [row.tokens[0] if row.tokens else UNKNOWN for row in rows] + [0] * padding,
            [row.start for row in rows] + [0] * padding,
            [row.blocks[row.start // block_size] * block_size + row.start % block_size for row in rows]
            + [-1] * padding,
            [row.slot for row in rows] + [self._num_slots] * padding,
        ]

    def _capture(self, size: int, pool: object) -> Captured:
        device = self._kv.device
        graph_size = GraphSize(size, self._max_blocks)
        attention = [self._make_attention(shape, graph_size) for shape in self._model.shapes]
        fields = torch.zeros(4, size, dtype=torch.int64, device=device)
        fields[2] = -1
        fields[3] = self._num_slots
        padding = step_layout([Row(self._num_slots, 0, 1, (0,), [0], True)], self._block_size)
        for backend in attention:
            backend.plan(padding)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward_captured(fields, attention)  # compiles, and lets libraries allocate what they keep
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # pyright: ignore[reportArgumentType]
            result = self._forward_captured(fields, attention)
        return Captured(graph, attention, fields, result.logits, result.ids)

    def _forward_captured(self, fields: torch.Tensor, attention: Sequence[AttentionBackend]) -> _StepResult:
        tokens, positions, cache_slots, slots = fields
        last_sampled = self._slots.last_sampled
        tokens = torch.where(tokens == UNKNOWN, last_sampled.index_select(0, slots), tokens)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        inputs = StepInputs(tokens, TokenPlaces(positions, cache_slots), rows)
        logits = self._model.logits(self._model.hidden(inputs, self._kv, attention))
        ids = sample(logits, SamplingTensors()).ids
        last_sampled.index_copy_(0, slots, ids)
        return _StepResult(logits, ids)
