"""Steps by captured graphs against plain steps. Here the captured work is run again in place of a replay."""

from __future__ import annotations

import pytest
import torch
from model_cases import smollm2
from rerun import PaddedAttention, RerunRunner, SpeculativeRerunRunner, capture

from baton.actors.engine.batch import Runner
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.draft_length import FixedLengths
from baton.actors.engine.engine import Engine
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.runner_graph import GraphLimits, cut_sizes, decode_sizes
from baton.actors.engine.speculation import DraftSpeculation, Speculation
from baton.kernels.attention_torch import TorchAttention
from tests.actors.engine.scripted import Scripted, some_right

NUM_BLOCKS, NUM_SLOTS = 64, 6
MAX_CUT = 60  # tokens: some steps of 64 are beyond it

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


def outputs(runner: Runner, overlap: bool, speculation: Speculation | None = None) -> dict[str, list[int]]:
    config = EngineConfig(max_num_seqs=NUM_SLOTS, max_step_tokens=64, overlap=overlap)
    engine = Engine(
        config, runner, num_blocks=NUM_BLOCKS, max_context=512, eos_token_ids=frozenset(), speculation=speculation
    )
    tokens: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    for request in REQUESTS:
        engine.submit(request)
    while engine.has_work:
        for update in engine.step():
            tokens[update.request_id] += update.tokens
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_steps_give_the_same_tokens(overlap: bool) -> None:
    model = smollm2()
    spec = KVSpec.of_model(model.config, 16, torch.float32)
    plain = TorchRunner(model, spec.allocate(NUM_BLOCKS), num_slots=NUM_SLOTS, make_attention=TorchAttention)
    limits = GraphLimits(NUM_SLOTS, NUM_SLOTS, NUM_BLOCKS, max_tokens=MAX_CUT)
    graphs = RerunRunner(model, spec.allocate(NUM_BLOCKS), limits=limits, make_attention=PaddedAttention)
    capture(graphs)
    expected = outputs(plain, overlap=False)
    assert outputs(graphs, overlap) == expected
    assert graphs.num_cut_replays > 0

    num_cut_replays: list[int] = []
    for num_rows in (NUM_SLOTS, 5 * NUM_SLOTS):  # the more rows a decode graph has, the more drafts it verifies
        roomy = GraphLimits(NUM_SLOTS, num_rows, 5 * NUM_BLOCKS, max_tokens=MAX_CUT)
        drafting = SpeculativeRerunRunner(
            model, spec.allocate(NUM_BLOCKS), limits=roomy, make_attention=PaddedAttention
        )
        capture(drafting)
        drafter = Scripted(some_right, lambda request: [*expected[request.id], *[0] * 9], model.config.vocab_size)
        speculation = DraftSpeculation(drafter, FixedLengths(), 4)
        assert outputs(drafting, overlap, speculation) == expected
        assert sum(speculation.counts.accepted) > 0
        num_cut_replays.append(drafting.num_cut_replays)
    assert num_cut_replays[0] > num_cut_replays[1]


def test_the_ladders_of_sizes_end_with_the_largest_step() -> None:
    assert decode_sizes(6) == [1, 2, 4, 6]
    assert decode_sizes(256)[-1] == 256
    assert decode_sizes(300)[-3:] == [256, 288, 300]
    assert decode_sizes(100)[-3:] == [80, 96, 100]
    assert cut_sizes(200) == [16, 32, 64, 128, 192, 200]
    assert cut_sizes(8192)[-2:] == [1792, 2048]
