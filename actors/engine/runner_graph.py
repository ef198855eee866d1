"""A TorchRunner that replays CUDA graphs, captured once for a ladder of sizes.

Decode-only steps are one graph each: it takes the sampled ids from the device, runs the model, picks the greedy token
and notes it. What other sampling parameters ask for is done on the graph's logits afterwards. Steps with prefill are
graphs cut at attention (cut_graph), up to the size from which the device is the slower side. Others run as in
TorchRunner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from baton.actors.engine.batch import Batch, PendingStep, Row
from baton.actors.engine.cut_graph import CutForward, Replayable, capture_cut
from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.host_copy import HostCopy
from baton.actors.engine.models.model import Model
from baton.actors.engine.runner import SampledPlaces, SampledStep, TorchRunner
from baton.actors.engine.step_fields import step_layout
from baton.kernels.attention import AttentionBackend, AttentionShape, GraphSize
from baton.kernels.sampling import SamplingTensors, sample

AttentionFactory = Callable[[AttentionShape, GraphSize | None], AttentionBackend]
T = TypeVar("T")
MAX_CUT_TOKENS = 2048  # above, an 8B model's step takes an H200 longer than its launches take the host


class GraphLimits(NamedTuple):
    """The largest captured steps: so many decode rows, with so many blocks in their tables; or so many tokens."""

    num_slots: int  # of sequences
    num_rows: int  # of decode steps; more than slots where drafts are rows of their own
    max_blocks: int  # a prefix that rows share counts for each row
    max_tokens: int


def decode_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending: dense where a padded row costs a large share, sparse above."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return sorted({*(size for size in ladder if size < max_rows), max_rows})


def cut_sizes(max_tokens: int) -> list[int]:
    """Token counts to capture for steps with prefill, ascending: multiples of a matrix product's least tile of rows."""
    limit = min(max_tokens, MAX_CUT_TOKENS)
    ladder = [16, 32, *range(64, 1024, 64), *range(1024, MAX_CUT_TOKENS + 1, 256)]
    return sorted({*(size for size in ladder if size < limit), limit})


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured decode step: write `fields`, plan `attention`, replay `graph`, read the rest."""

    graph: Replayable
    attention: list[AttentionBackend]
    fields: torch.Tensor  # [4, num_rows] int64, see `write_fields`
    logits: torch.Tensor  # [num_rows, vocab]
    ids: torch.Tensor  # [num_rows] int64


class _StepResult(NamedTuple):
    logits: torch.Tensor
    ids: torch.Tensor


class GraphRunner(TorchRunner):
    def __init__(
        self,
        model: Model,
        kv: torch.Tensor,
        *,
        limits: GraphLimits,
        make_attention: AttentionFactory,
        grammars: GrammarStore | None = None,
    ) -> None:
        super().__init__(
            model,
            kv,
            num_slots=limits.num_slots,
            make_attention=lambda shape: make_attention(shape, None),
            grammars=grammars,
        )
        self._limits = limits
        self._make_attention = make_attention
        self._decodes: dict[int, Captured] = {}  # by size, ascending
        self._cuts: dict[int, CutForward] = {}

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every kernel and capture every size, the largest first: the smaller ones reuse its memory."""
        decodes, cuts = decode_sizes(self._limits.num_rows), cut_sizes(self._limits.max_tokens)
        pool = torch.cuda.graph_pool_handle()
        total = len(decodes) + len(cuts)
        for size in reversed(cuts):
            self._cuts[size] = self._capture_cut(size, pool)
            on_progress(len(self._cuts), total)
        for size in reversed(decodes):
            self._decodes[size] = self._capture_decode(size, pool)
            on_progress(len(cuts) + len(self._decodes), total)
        self._cuts = dict(sorted(self._cuts.items()))
        self._decodes = dict(sorted(self._decodes.items()))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        rows = batch.rows
        self._prompts.admit(batch.admissions)
        captured = self._captured(rows)
        if captured is None:
            return super().launch(batch)
        self._replay(captured, rows)
        self._slots.admit(batch.admissions)
        return self._choose(rows, captured)

    def _captured(self, rows: Sequence[Row]) -> Captured | None:
        """The least decode graph that has room for `rows`; None if they are no decode step, or too much."""
        if self._prompts.is_asked(rows) or any(row.num_tokens != 1 or not row.sample for row in rows):
            return None
        captured = _least(self._decodes, len(rows))
        if captured is None:
            return None
        num_blocks = sum(row.start // self._block_size + 1 for row in rows) + captured.fields.shape[1] - len(rows)
        return captured if num_blocks <= self._limits.max_blocks else None

    def _replay(self, captured: Captured, rows: Sequence[Row]) -> None:
        layout = step_layout(rows, self._block_size)
        for backend in captured.attention:
            backend.plan(layout)
        captured.fields.copy_(self._fields(rows, captured.fields.shape[1]), non_blocking=True)
        captured.graph.replay()

    def _forward(self, rows: Sequence[Row], num_tokens: int) -> torch.Tensor:
        cut = _least(self._cuts, num_tokens)
        if cut is None:
            return super()._forward(rows, num_tokens)
        cut.fields.copy_(self._fields(rows, cut.fields.shape[1]), non_blocking=True)
        return cut.replay(self._attention, num_tokens)

    def _choose(self, rows: Sequence[Row], captured: Captured) -> PendingStep:
        """Keep the graph's greedy ids, or sample as the rows ask."""
        num = len(rows)
        if self._slots.is_plain(rows):
            return SampledStep(rows, HostCopy((captured.ids[:num],)), None)
        places = SampledPlaces(captured.fields[1, :num] + 1, captured.fields[3, :num])
        return self._sample(rows, places, captured.logits[:num], rows)

    def _idle_fields(self, size: int) -> torch.Tensor:
        """Fields of padding alone."""
        return self._fields((), size).to(self._kv.device)

    def _capture_cut(self, size: int, pool: object) -> CutForward:
        return capture_cut(self._hidden, self._idle_fields(size), len(self._model.shapes), pool)

    def _capture_decode(self, size: int, pool: object) -> Captured:
        graph_size = GraphSize(size, self._limits.max_blocks)
        attention = [self._make_attention(shape, graph_size) for shape in self._model.shapes]
        fields = self._idle_fields(size)
        padding = step_layout([Row(self._limits.num_slots, 0, 1, (0,), [0], True)], self._block_size)
        for backend in attention:
            backend.plan(padding)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(fields, attention)  # compiles, and lets libraries allocate what they keep
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # pyright: ignore[reportArgumentType]
            result = self._decode(fields, attention)
        return Captured(graph, attention, fields, result.logits, result.ids)

    def _decode(self, fields: torch.Tensor, attention: Sequence[AttentionBackend]) -> _StepResult:
        """What a decode graph holds."""
        logits = self._model.logits(self._hidden(fields, attention))
        ids = sample(logits, SamplingTensors()).ids
        self._slots.last_sampled.index_copy_(0, fields[3], ids)
        return _StepResult(logits, ids)


def _least(captured: dict[int, T], size: int) -> T | None:
    """The smallest captured size that `size` fits in."""
    return next((value for key, value in captured.items() if key >= size), None)
