"""Decode steps by captured graphs against plain steps. Without a GPU the captured step is run again in place of a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from model_cases import smollm2

from baton.actors.engine.batch import Runner
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.runner_graph import Captured, GraphRunner, graph_sizes
from baton.kernels.attention import AttentionBackend, AttentionShape, GraphSize, StepLayout
from baton.kernels.attention_torch import TorchAttention
from baton.kernels.block_index import pad_decodes

NUM_BLOCKS, NUM_SLOTS = 64, 6

REQUESTS = [
    Request(id=str(i), tokens=tuple(range(100 * i, 100 * i + length)), sampling=sampling)
    for i, (length, sampling) in enumerate(
        [
            (5, SamplingParams(max_tokens=9, seed=0, temperature=0.0)),
            (16, SamplingParams(max_tokens=4, seed=1, temperature=0.0, logprobs=2)),
            (33, SamplingParams(max_tokens=12, seed=2, temperature=1.0)),
            (1, SamplingParams(max_tokens=7, seed=3, temperature=0.0, repetition_penalty=1.3)),
            (40, SamplingParams(max_tokens=10, seed=4, temperature=0.0, logit_bias={7: 3.0})),
        ]
    )
]


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

    def replay(self) -> None:
        self.work()


class RerunRunner(GraphRunner):
    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        self._sizes = graph_sizes(self._num_slots)
        for size in self._sizes:
            attention: list[AttentionBackend] = [
                self._make_attention(shape, GraphSize(size, self._max_blocks)) for shape in self._model.shapes
            ]
            fields = torch.zeros(4, size, dtype=torch.int64)
            logits, ids = torch.empty(size, self._model.config.vocab_size), torch.empty(size, dtype=torch.int64)

            def work(fields=fields, attention=attention, logits=logits, ids=ids) -> None:
                result = self._forward_captured(fields, attention)
                logits.copy_(result.logits)
                ids.copy_(result.ids)

            self._captured[size] = Captured(Rerun(work), attention, fields, logits, ids)


def outputs(runner: Runner, overlap: bool) -> dict[str, list[int]]:
    config = EngineConfig(max_num_seqs=NUM_SLOTS, max_step_tokens=64, overlap=overlap)
    engine = Engine(config, runner, num_blocks=NUM_BLOCKS, max_context=512, eos_token_ids=frozenset())
    tokens: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    for request in REQUESTS:
        engine.submit(request)
    while engine.has_work:
        for update in engine.step():
            tokens[update.request_id] += update.tokens
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_decode_steps_give_the_same_tokens(overlap: bool) -> None:
    model = smollm2()
    spec = KVSpec.of_model(model.config, 16, torch.float32)
    plain = TorchRunner(model, spec.allocate(NUM_BLOCKS), num_slots=NUM_SLOTS, make_attention=TorchAttention)
    graphs = RerunRunner(
        model, spec.allocate(NUM_BLOCKS), num_slots=NUM_SLOTS, max_blocks=NUM_BLOCKS, make_attention=PaddedAttention
    )
    graphs.capture()
    assert outputs(graphs, overlap) == outputs(plain, overlap=False)


def test_the_ladder_of_sizes_ends_with_the_number_of_slots() -> None:
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(256)[-1] == 256
    assert graph_sizes(100)[-3:] == [80, 96, 100]
